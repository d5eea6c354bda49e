"""Why a prompt was not cached further than it was.

Knows where the prompt left the index, which names are gone and what is being
written. Does not know text: whoever can name the message adds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from prefix_store.blocks import NAME_BYTES, TOKEN_BYTES, BlockName, BlockNamer, TokenView
from prefix_store.flights import FlightBoard
from prefix_store.index import PUBLIC_SCOPE, IndexMatch
from prefix_store.misses import Cause, GhostNames, Miss, MissReason
from prefix_store.public import PublicPrefixes


@dataclass(slots=True, kw_only=True)
class Question:
    """A prompt, how much of it might have been cached, and how far it is in the index."""

    scope: str
    data: TokenView
    limit_bytes: int
    match: IndexMatch | None

    @property
    def matched_bytes(self) -> int:
        return 0 if self.match is None else self.match.num_bytes

    @property
    def token_index(self) -> int:
        return 0 if self.match is None else self.match.num_tokens


class MissExplainer:
    """Looks only; nothing here changes what it looks at."""

    def __init__(
        self, *, namer: BlockNamer, ghosts: GhostNames, flights: FlightBoard, public: PublicPrefixes
    ) -> None:
        self._namer = namer
        self._ghosts = ghosts
        self._flights = flights
        self._public = public
        self._block_bytes = namer.block_size * TOKEN_BYTES

    def explain(self, question: Question, *, max_lost_blocks: int) -> Miss | None:
        """The first token that was not found, and why; None when nothing that is or was there was missed.

        Hashes one block, or as many as were there once, up to `max_lost_blocks`.
        """
        if question.limit_bytes == 0:
            return Miss(reason=MissReason.BELOW_MINIMUM, token_index=0)
        if question.token_index * TOKEN_BYTES >= question.limit_bytes:
            return None
        return (
            self._being_written(question)
            or self._departed(question, max_lost_blocks)
            or self._never_there(question)
        )

    def _being_written(self, question: Question) -> Miss | None:
        match, start = question.match, question.matched_bytes
        if match is None or match.num_inside:
            return None
        rest = bytes(question.data[start : start + self._block_bytes])
        if self._flights.writer_after(match.path[-1], rest) is None:
            return None
        return Miss(reason=MissReason.NOT_YET_WRITTEN, token_index=question.token_index)

    def _departed(self, question: Question, max_lost_blocks: int) -> Miss | None:
        """Blocks that were there once."""
        names = self._missing_names(question, max_lost_blocks)
        name = next(names, None)
        departure = None if name is None else self._ghosts.find(name)
        if departure is None:
            return None
        num_lost = 1 + sum(1 for _ in takewhile(self._ghosts.find, names))
        end = question.matched_bytes + num_lost * self._block_bytes
        expired = departure.cause is Cause.EXPIRED
        return Miss(
            reason=MissReason.EXPIRED if expired else MissReason.EVICTED,
            token_index=question.token_index,
            gone_at=departure.at,
            cause=departure.cause,
            lost_tokens=end // TOKEN_BYTES - question.token_index,
        )

    def _missing_names(self, question: Question, max_blocks: int) -> Iterator[BlockName]:
        """Names of the prompt's full blocks from the first missing one on, hashed as they are asked for."""
        data, block_bytes = question.data, self._block_bytes
        first = question.matched_bytes
        end = min(first + max_blocks * block_bytes, len(data))
        name = self._name_before(question)
        for start in range(first, end - block_bytes + 1, block_bytes):
            name = self._namer.name(name, bytes(data[start : start + block_bytes]))
            yield name

    def _name_before(self, question: Question) -> BlockName:
        """The name that the name of the first missing block continues from."""
        match, public_bytes = question.match, self._public.num_bytes(question.scope, question.data)
        if match is None:
            return self._namer.root(PUBLIC_SCOPE if public_bytes else question.scope)
        name = match.path[-1].last_name
        if match.inside is not None and match.num_inside:
            last = (match.num_inside - 1) * NAME_BYTES
            name = match.inside.names[last : last + NAME_BYTES]
        if match.num_bytes == public_bytes > 0 and match.path[-1].scope == PUBLIC_SCOPE:
            return self._namer.enter_scope(name, question.scope)
        return name

    def _never_there(self, question: Question) -> Miss | None:
        """Tokens that the nearest cached prompt does not have; None if that one just ends there."""
        match, token_index = question.match, question.token_index
        if match is None or token_index == 0:
            return Miss(reason=MissReason.NO_SHARED_PREFIX, token_index=0)
        if match.inside is not None or match.path[-1].children:
            return Miss(reason=MissReason.DIVERGED, token_index=token_index)
        return None
