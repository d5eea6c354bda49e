"""Why a prompt was not cached further, and what became of prefixes that were.

Knows names of blocks that are gone, when they went and why. Does not know
where the prompt came from: whoever can name the message adds that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prefix_store.blocks import BlockName


class Cause(StrEnum):
    """Why a block left the index."""

    PRESSURE = "pressure"
    """Room was needed."""
    QUOTA = "quota"
    """Its scope kept more than it may."""
    EXPIRED = "expired"
    """Room was needed, and the time it had been pinned for was over."""
    CLEARED = "cleared"
    """Everything was dropped."""
    SUPERSEDED = "superseded"
    """Another block says the same and more. Nothing is lost."""


class MissReason(StrEnum):
    """The reasons a store can know: those of the wire that do not need the prompt's text."""

    BELOW_MINIMUM = "below_minimum"
    NO_SHARED_PREFIX = "no_shared_prefix"
    DIVERGED = "diverged"
    NOT_YET_WRITTEN = "not_yet_written"
    EXPIRED = "expired"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """The first token that was not cached, `token_index`, and why.

    For a prefix that existed once: when it went, on the store's clock, why, and how
    many tokens of this prompt it had from `token_index` on.
    """

    reason: MissReason
    token_index: int
    gone_at: float | None = None
    cause: Cause | None = None
    lost_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """When some blocks left, and why."""

    at: float
    cause: Cause


class GhostNames:
    """Names of blocks that left the index. Bounded: the oldest half is forgotten at once.

    A name is no proof: a collision here gives a wrong explanation, never a wrong block.
    """

    def __init__(self, *, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1 name")
        self._generation_size = max(capacity // 2, 1)
        self._young: dict[BlockName, Departure] = {}
        self._old: dict[BlockName, Departure] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, names: list[BlockName], departure: Departure) -> None:
        room = self._generation_size - len(self._young)
        if len(names) <= room:
            self._young.update(dict.fromkeys(names, departure))
            return
        self._young.update(dict.fromkeys(names[:room], departure))
        self._old, self._young = self._young, {}
        # Of a batch beyond all bounds the first names are kept: a prompt is missed from its front.
        self._young.update(dict.fromkeys(names[room:][: self._generation_size], departure))

    def find(self, name: BlockName) -> Departure | None:
        return self._young.get(name) or self._old.get(name)
