"""Which tokens are computed in the next step, and who waits.

Knows sequences, the token budget and the prefix store; it is the only caller
of the store. Does not know tensors: it returns integers for the runner.

First in, first out. Sequences that decode go first, one token each; what is
left of the budget goes to prefill in chunks, admitted ones before new ones.
What one sequence is computing no other computes beside it: a prompt that
shares its next blocks with one under way follows it, and begins where they part
(or where the other stopped). When blocks run out, the sequence admitted last
is preempted: its blocks become cached ones, and it resumes by computing again
what was evicted meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from model_worker.protocol import Started, TierTokens
from model_worker.sequence import Sequence
from prefix_store.flights import Following
from prefix_store.leases import Lease, RowCopy
from prefix_store.pool import OutOfBlocks
from prefix_store.store import PrefixStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens `start` to `start + num_tokens` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether this chunk ends at the last known token, so that its logits choose the next one."""
        return self.stop == len(self.sequence.tokens)


@dataclass(slots=True, kw_only=True)
class Step:
    """One step's work. Copies come before chunks and are executed in order."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    begun: list[Sequence] = field(default_factory=list)
    budget: int

    def add(self, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_pending, self.budget)
        self.chunks.append(Chunk(sequence=sequence, start=sequence.num_computed, num_tokens=num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """Owns the queues and the leases. `check()` states what always holds between steps."""

    def __init__(self, store: PrefixStore, *, step_tokens: int, max_running: int) -> None:
        self._store = store
        self._step_tokens = step_tokens
        self._max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Step:
        """Chooses the next step. Holds blocks for every chunk in it."""
        step = Step(budget=self._step_tokens)
        self._grow_running()
        under_way = [sequence for sequence in self.running if sequence.has_begun]
        for sequence in sorted(under_way, key=lambda one: one.is_prefilling):
            if step.budget:
                step.add(sequence)
        followers = [sequence for sequence in self.running if not sequence.has_begun]
        for sequence in followers:
            self._catch_up(sequence, step)
        if all(self._advance(sequence, step) for sequence in followers):
            self._admit_waiting(step)
        return step

    def commit(self, step: Step) -> None:
        """The step was computed: its tokens' KV is in the pool and may be found by others."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            if sequence.shares_cache:
                assert sequence.lease is not None
                self._store.seal(sequence.lease, sequence.tokens, sequence.num_computed)
                if not sequence.is_prefilling:
                    self._store.leave_flight(sequence.lease)

    def finish(self, sequence: Sequence) -> None:
        """Gives back every block of a sequence that ended, in whatever state it is."""
        if sequence.lease is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release(sequence)

    def abandon(self, sequence: Sequence) -> None:
        """Gives back the blocks of a running sequence whose step failed; nothing new of it may be found."""
        assert sequence.lease is not None
        self.running.remove(sequence)
        self._store.discard(sequence.lease)
        sequence.lease = None

    def check(self) -> None:
        """Asserts the store's invariants, and that exactly the running sequences hold leases."""
        self._store.check()
        assert all(sequence.lease is not None for sequence in self.running)
        assert all(sequence.lease is None for sequence in self.waiting)
        if not self.running:
            assert self._store.counts.held == 0, self._store.counts

    def _grow_running(self) -> None:
        """Makes room for every running sequence's next token, oldest first, preempting the youngest."""
        for sequence in [one for one in self.running if one.has_begun]:
            while sequence.lease is not None:
                try:
                    self._store.extend(sequence.lease, len(sequence.tokens))
                    break
                except OutOfBlocks:
                    self._preempt(self.running[-1])

    def _admit_waiting(self, step: Step) -> None:
        """Takes from the head of the queue while there is budget, and room for what begins."""
        while step.budget and self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting.popleft()
            sequence.lease = self._store.acquire(
                sequence.request.scope,
                sequence.tokens,
                max_cached_tokens=sequence.max_cached_tokens,
                num_prompt_tokens=sequence.num_prompt,
            )
            self.running.append(sequence)
            step.copies.extend(sequence.lease.copies)
            if not self._advance(sequence, step):
                break

    def _catch_up(self, sequence: Sequence, step: Step) -> None:
        """Takes what was sealed since, most of it by the sequence that this one follows."""
        lease, limit = sequence.lease, sequence.max_cached_tokens
        assert lease is not None
        if self._store.catch_up(lease, sequence.tokens, max_cached_tokens=limit):
            step.copies.extend(lease.copies)

    def _advance(self, sequence: Sequence, step: Step) -> bool:
        """Begins a sequence, unless another computes its next blocks. False when there is no room to."""
        lease = sequence.lease
        assert lease is not None
        if sequence.shares_cache and isinstance(self._store.join_flight(lease, sequence.tokens), Following):
            return True
        if not step.budget:
            return True
        try:
            self._store.extend(lease, len(sequence.tokens))
        except OutOfBlocks:
            self._preempt(sequence)
            return False
        self._begin(sequence, lease, step)
        return True

    def _begin(self, sequence: Sequence, lease: Lease, step: Step) -> None:
        sequence.has_begun = True
        sequence.num_computed = cached = lease.cached_tokens
        if sequence.started is None:
            sequence.started = Started(
                cached=TierTokens(device=cached), uncached=sequence.num_prompt - cached
            )
            step.begun.append(sequence)
        step.add(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.num_computed_before = max(sequence.num_computed_before, sequence.num_computed)
        self.preemptions += sequence.has_begun
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        if sequence.shares_cache and sequence.has_begun:
            self._store.release(sequence.lease, sequence.tokens, sequence.num_computed)
        else:
            self._store.discard(sequence.lease)
        sequence.lease = None
        sequence.has_begun = False
        sequence.num_computed = 0
