"""Who is admitted next.

Knows waiting sequences, their priorities and scopes, and what each scope has
cost. Does not know blocks: how much of a prompt is cached, it asks.

Sequences of the most urgent priority go first. Among its scopes turns go round
(surplus round robin, the form of deficit round robin that charges afterwards:
Adiseshu, Parulkar, Varghese 1996): a scope collects a quantum each turn, pays for
the tokens that were not cached, and has the turn while it owes nothing. Within a scope the
longest cached prefix goes first, of the few that have waited longest.

None of this starves anybody: every `OLDEST_EVERY`-th admission is the one that
has waited longest, whatever its priority or scope. So a sequence with k older
ones before it is among the next (k + 1) * OLDEST_EVERY admissions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from model_worker.sequence import Sequence

OLDEST_EVERY = 16
WINDOW = 8
"""How many of a scope's sequences are compared: each look costs a walk over its prompt."""
LOOK_AGAIN_AFTER = 8
"""Admissions for which a look is good enough."""
MAX_DEBTORS = 4096
"""Scopes whose debts are remembered."""


@dataclass(slots=True)
class _Level:
    """One priority's sequences by scope, first come first, and the scopes in the order of their turns."""

    scopes: dict[str, dict[Sequence, None]] = field(default_factory=dict)
    turns: deque[str] = field(default_factory=deque)

    def add(self, sequence: Sequence) -> None:
        scope = sequence.request.scope
        if scope not in self.scopes:
            self.scopes[scope] = {}
            self.turns.append(scope)
        self.scopes[scope][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        scope = sequence.request.scope
        del self.scopes[scope][sequence]
        if not self.scopes[scope]:
            del self.scopes[scope]
            self.turns.remove(scope)


class WaitingQueue:
    """Sequences without a lease. States of each: fresh, interrupted or next; then taken or removed.

    An interrupted one was admitted before; it goes before the fresh ones of its
    priority. One that was taken and found no room is `next`, whatever else comes:
    only so does a large one ever find room beside many small ones.
    """

    def __init__(self, *, quantum_tokens: int, cached_tokens: Callable[[Sequence], int]) -> None:
        self._quantum_tokens = quantum_tokens
        self._cached_tokens = cached_tokens
        self._arrivals = 0
        self._num_taken = 0
        self._all: dict[Sequence, None] = {}
        self._levels: dict[int, _Level] = {}
        self._interrupted: dict[Sequence, None] = {}
        self._next: Sequence | None = None
        self._credit: dict[str, int] = {}
        self._looks: dict[Sequence, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._all

    def add(self, sequence: Sequence) -> None:
        """One that comes for the first time."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._all[sequence] = None
        self._levels.setdefault(sequence.request.priority, _Level()).add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that was interrupted."""
        self._all[sequence] = None
        self._interrupted[sequence] = None

    def reserve(self, sequence: Sequence) -> None:
        """One that was taken and found no room."""
        self.put_back(sequence)
        self._next = sequence

    def remove(self, sequence: Sequence) -> None:
        del self._all[sequence]
        self._looks.pop(sequence, None)
        if sequence is self._next:
            self._next = None
        if sequence in self._interrupted:
            del self._interrupted[sequence]
            return
        priority = sequence.request.priority
        level = self._levels[priority]
        level.remove(sequence)
        if not level.scopes:
            del self._levels[priority]

    def take(self) -> Sequence:
        """Removes the one that is due. There must be one."""
        sequence = self._next or self._choose()
        self.remove(sequence)
        self._num_taken += 1
        return sequence

    def charge(self, scope: str, num_tokens: int) -> None:
        """A scope's prompt is going to be computed: it pays for what was not cached."""
        self._set_credit(scope, self._credit.get(scope, 0) - num_tokens)

    def _choose(self) -> Sequence:
        if self._num_taken % OLDEST_EVERY == OLDEST_EVERY - 1:
            return min(self._all, key=lambda one: one.arrival)
        interrupted = min(
            self._interrupted, key=lambda one: (one.request.priority, one.arrival), default=None
        )
        most_urgent = min(self._levels, default=None)
        if most_urgent is None or (interrupted and interrupted.request.priority <= most_urgent):
            assert interrupted is not None, "nobody waits"
            return interrupted
        level = self._levels[most_urgent]
        first = list(islice(level.scopes[self._scope_in_turn(level)], WINDOW))
        return first[0] if len(first) == 1 else max(first, key=self._look)

    def _look(self, sequence: Sequence) -> int:
        """Cached tokens, as of some admissions ago at most."""
        cached, looked_at = self._looks.get(sequence, (0, -LOOK_AGAIN_AFTER))
        if self._num_taken - looked_at >= LOOK_AGAIN_AFTER:
            cached = self._cached_tokens(sequence)
            self._looks[sequence] = cached, self._num_taken
        return cached

    def _scope_in_turn(self, level: _Level) -> str:
        """The one whose turn it is until it has spent its quantum, debts paid first.

        Rounds are as many as debts are worth: paid for by their tokens.
        """
        while self._credit.get(level.turns[0], 0) <= 0:
            level.turns.rotate(-1)
            scope = level.turns[0]
            self._set_credit(scope, self._credit.get(scope, 0) + self._quantum_tokens)
        return level.turns[0]

    def _set_credit(self, scope: str, num_tokens: int) -> None:
        self._credit[scope] = num_tokens
        if len(self._credit) > MAX_DEBTORS:
            del self._credit[next(iter(self._credit))]
