"""What an eviction policy is told, and the one question it is asked.

Knows runs of blocks by opaque keys. Does not know tokens, tenants, leases or
pins: the caller says which runs may go, a policy says which goes next.

A run is one or more blocks that come, stay and go together, the later ones
first; in the store it is an edge of the index, in the simulator one block. It
is in one of two states, and the caller moves it:

    covered → exposed   `expose`: nothing follows it and nobody holds it
    exposed → covered   `cover`: something follows it, or somebody holds it

Only exposed runs can be victims, so what a prefix needs is never evicted
before what continues it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prefix_store.blocks import BlockName, TokenKind

RunKey: TypeAlias = Hashable
"""Identity of a run while it is in the store; compared and hashed, never looked into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run when it is inserted.

    `name` is the name of its first block: the same when the same prefix comes back
    after an eviction. `depth` is the number of blocks before the run.
    """

    name: BlockName
    num_blocks: int
    depth: int
    kind: TokenKind


class EvictionPolicy(Protocol):
    """Chooses victims. Every method changes the policy's own state only; `now` never goes back.

    A call costs O(log runs) at most, amortised.
    """

    def insert(self, run: RunKey, facts: RunFacts, now: float) -> None:
        """A new run, covered."""

    def hit(self, run: RunKey, now: float) -> None:
        """A later prompt found this run."""

    def resize(self, run: RunKey, num_blocks: int) -> None:
        """A run grew at its end, or lost blocks there other than by eviction."""

    def split(self, run: RunKey, upper: RunKey, num_upper_blocks: int) -> None:
        """The first blocks of `run` become `upper`, covered, with the same history; `run` keeps the rest."""

    def merge(self, upper: RunKey, run: RunKey) -> None:
        """`run` takes in the blocks of `upper`, which it followed; `upper` is gone.

        Both were last used at the same time.
        """

    def expose(self, run: RunKey, last_used: float) -> None:
        """The run may be a victim from now on; `last_used` is when it was last found or let go."""

    def cover(self, run: RunKey) -> None:
        """The run may not be a victim until it is exposed again."""

    def evict(self, run: RunKey, name: BlockName, num_blocks: int, now: float) -> None:
        """Blocks left the end of an exposed run under pressure; `name` is the name of the first of them.

        The run, if nothing of it is left, is removed next.
        """

    def remove(self, run: RunKey) -> None:
        """The run is gone. It may be covered or exposed."""

    def victim(self, now: float) -> RunKey | None:
        """The exposed run to take blocks from next; None when none is exposed."""
