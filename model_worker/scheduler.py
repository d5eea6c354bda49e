"""Which tokens are computed in the next step, and who waits.

Knows sequences, the token budget and the prefix store; it is the only caller
of the store. Does not know tensors: it returns integers for the runner.

Sequences that decode go first, one token each, but for a share of the step that
is kept for prompts; what is left of the budget the prompts share (`shares`),
admitted ones before new ones (`waiting`). What one
sequence is computing no other computes beside it: a prompt that shares its
next blocks with one under way follows it, and begins where they part (or
where the other stopped, or got nowhere for `MAX_STEPS_WAITED` steps). When
blocks run out, the least urgent sequence admitted last is preempted: its
blocks become cached ones, and it resumes by computing again what was evicted
meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from model_worker.protocol import Missed, Started, TierTokens
from model_worker.sequence import Sequence
from model_worker.shares import OLDEST_SHARE, split
from model_worker.waiting import WaitingQueue
from prefix_store.flights import Following
from prefix_store.leases import Lease, RowCopy
from prefix_store.pool import OutOfBlocks
from prefix_store.store import PrefixStore

MAX_STEPS_WAITED = 8
"""How long a prompt follows another that gets nowhere."""
MAX_PREFILLS = 4
"""Prompts begun although the others fill the step: others need not wait for a long one."""


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


class StepAbandoned(Exception):
    """Nobody waits for a step any more; nothing of it was committed."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One step's work. Copies come before chunks and are executed in order.

    `is_abandoned` is asked now and then while it is computed, from the same thread.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[RowCopy] = field(default_factory=list)
    begun: list[Sequence] = field(default_factory=list)
    prefills: list[Sequence] = field(default_factory=list)
    is_abandoned: Callable[[], bool] = lambda: False
    budget: int

    def go_on_or_raise(self) -> None:
        """Raises `StepAbandoned` when nobody waits any more."""
        if self.is_abandoned():
            raise StepAbandoned

    @property
    def may_begin(self) -> bool:
        """Whether one more prompt would have something of this step."""
        if len(self.prefills) < MAX_PREFILLS:
            return self.budget > 0
        return sum(sequence.num_pending for sequence in self.prefills) < self.budget

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.chunks.append(Chunk(sequence=sequence, start=sequence.num_computed, num_tokens=num_tokens))
        self.budget -= num_tokens


class Scheduler:
    """Owns the queues and the leases. `check()` states what always holds between steps."""

    def __init__(
        self, store: PrefixStore, *, step_tokens: int, max_running: int, decode_step_tokens: int | None = None
    ) -> None:
        """A step computes at most `step_tokens`, and one in which something decodes `decode_step_tokens`."""
        self._store = store
        self.step_tokens = step_tokens
        self._decode_step_tokens = min(step_tokens, decode_step_tokens or step_tokens)
        self._max_running = max_running
        self.waiting = WaitingQueue(quantum_tokens=step_tokens, cached_tokens=self._look)
        self.running: list[Sequence] = []
        self._next_to_decode = 0
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> Step:
        """Chooses the next step. Holds blocks for every chunk in it."""
        self._grow_running()
        decoding = self._decoding_in_turn()
        step = Step(budget=self._decode_step_tokens if decoding else self.step_tokens)
        self._decode(step, decoding, step.budget - self._kept_for_prompts(step.budget))
        step.prefills = [one for one in self.running if one.has_begun and one.num_pending > 1]
        followers = [sequence for sequence in self.running if not sequence.has_begun]
        for sequence in followers:
            self._catch_up(sequence, step)
        if all(self._advance(sequence, step) for sequence in followers):
            self._admit_waiting(step)
        self._lend_urgency(step)
        for sequence, num_tokens in split(step.budget, step.prefills).items():
            step.add(sequence, num_tokens)
        self._decode(step, decoding, step.budget)
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

    def fork(self, first: Sequence, fork: Sequence) -> Lease | None:
        """A text begins where `first` is: with its prompt computed. The copies of its lease are due at once.

        Where it does not fit, it gets none and waits, and resumes like one that was preempted.
        """
        assert first.lease is not None
        assert first.num_output == 0
        fork.started, fork.arrival = first.started, first.arrival
        fork.num_computed_before = first.num_computed
        if len(self.running) < self._max_running:
            try:
                fork.lease = self._store.fork(first.lease, first.num_computed)
            except OutOfBlocks:
                pass
            else:
                fork.has_begun = True
                fork.num_computed = first.num_computed
                self.running.append(fork)
                return fork.lease
        self.waiting.put_back(fork)
        return None

    def finish(self, sequence: Sequence) -> None:
        """Gives back every block of a sequence that ended, in whatever state it is."""
        if sequence.lease is not None:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:  # a fork that has not begun is nowhere
            self.waiting.remove(sequence)

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

    def _look(self, sequence: Sequence) -> int:
        """How much of a waiting prompt is cached."""
        if not sequence.shares_cache:
            return 0
        return self._store.match(sequence.cache_scope, sequence.tokens).num_tokens

    def _by_rank(self) -> list[Sequence]:
        """Running sequences, the first to be served first: by priority, then by admission."""
        return sorted(self.running, key=lambda one: one.request.priority)

    def _grow_running(self) -> None:
        """Makes room for every running sequence's next token, preempting from the other end."""
        for sequence in self._by_rank():
            while sequence.has_begun and sequence.lease is not None:
                try:
                    self._store.extend(sequence.lease, len(sequence.tokens))
                    break
                except OutOfBlocks:
                    self._preempt(self._by_rank()[-1])

    def _decoding_in_turn(self) -> deque[Sequence]:
        decoding = deque(one for one in self.running if one.has_begun and one.num_pending == 1)
        decoding.rotate(-self._next_to_decode)
        return decoding

    def _kept_for_prompts(self, step_tokens: int) -> int:
        """Of a step that decoding alone would fill, so that prompts move on beside it."""
        begins = self.waiting and len(self.running) < self._max_running
        is_wanted = begins or any(not one.has_begun or one.num_pending > 1 for one in self.running)
        return max(1, step_tokens // OLDEST_SHARE) if is_wanted else 0

    def _decode(self, step: Step, decoding: deque[Sequence], num_tokens: int) -> None:
        """One token each; who finds no place in this step is first in the next."""
        for _ in range(min(num_tokens, len(decoding))):
            step.add(decoding.popleft(), 1)
            self._next_to_decode += 1
        if not decoding:
            self._next_to_decode = 0

    def _admit_waiting(self, step: Step) -> None:
        """Takes who is due while the step has something for it, and room for what begins."""
        while self.waiting and step.may_begin and len(self.running) < self._max_running:
            sequence = self.waiting.take()
            sequence.lease = self._store.acquire(
                sequence.cache_scope,
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
        if sequence.shares_cache and self._follows(sequence, lease):
            return True
        if not step.may_begin:
            return True
        try:
            self._store.extend(lease, len(sequence.tokens))
        except OutOfBlocks:
            self.running.remove(sequence)
            self._release(sequence)
            self.waiting.reserve(sequence)
            return False
        self._begin(sequence, lease, step)
        return True

    def _follows(self, sequence: Sequence, lease: Lease) -> bool:
        """Whether a sequence has somebody to wait for, who has come further within its patience."""
        role = self._store.join_flight(lease, sequence.tokens)
        if not isinstance(role, Following):
            sequence.waits_for = None
            return False
        seen = (role.leader, self._led(role.leader).num_computed)
        if sequence.waits_for != seen:
            sequence.waits_for, sequence.steps_waited = seen, 0
        sequence.steps_waited += 1
        if sequence.steps_waited <= MAX_STEPS_WAITED:
            return True
        self._store.take_over_flight(lease)
        sequence.waits_for = None
        return False

    def _led(self, leader: Lease) -> Sequence:
        return next(sequence for sequence in self.running if sequence.lease is leader)

    def _lend_urgency(self, step: Step) -> None:
        """Who others wait for is as urgent as they are."""
        by_lease = {sequence.lease: sequence for sequence in step.prefills}
        for sequence in step.prefills:
            sequence.urgency = sequence.request.priority
        for sequence in self.running:
            if sequence.waits_for is not None and (leader := by_lease.get(sequence.waits_for[0])):
                leader.urgency = min(leader.urgency, sequence.request.priority)

    def _begin(self, sequence: Sequence, lease: Lease, step: Step) -> None:
        sequence.has_begun = True
        sequence.num_computed = cached = lease.cached_tokens
        if sequence.started is None:
            uncached = sequence.num_prompt - cached
            sequence.started = Started(
                cached=TierTokens(device=cached), uncached=uncached, missed=_missed(sequence, lease)
            )
            step.begun.append(sequence)
            self.waiting.charge(sequence.request.scope, uncached)
        step.prefills.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.num_computed_before = max(sequence.num_computed_before, sequence.num_computed)
        self.preemptions += sequence.has_begun
        self._release(sequence)
        self.waiting.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        if sequence.shares_cache and sequence.has_begun:
            self._store.release(sequence.lease, sequence.tokens, sequence.num_computed)
        else:
            self._store.discard(sequence.lease)
        sequence.lease = None
        sequence.waits_for = None
        sequence.has_begun = False
        sequence.num_computed = 0


def _missed(sequence: Sequence, lease: Lease) -> Missed | None:
    """What the store says; of a prompt that waited for another and found more since, nothing is known."""
    if sequence.request.cache == "bypass":
        return Missed(reason="bypass", token_index=0)
    miss = lease.miss
    if miss is None or miss.token_index < lease.cached_tokens:
        return None
    return Missed(reason=miss.reason.value, token_index=miss.token_index)
