"""Who is admitted next: by priority, scopes in turn, the longest cached prefix; and nobody starves."""

from __future__ import annotations

import random

import pytest

from model_worker.sequence import Sequence
from model_worker.waiting import LOOK_AGAIN_AFTER, MAX_DEBTORS, OLDEST_EVERY, WINDOW, WaitingQueue
from tests.unit.model_worker.sequences import sequence_of

QUANTUM = 100


def queue_of(*sequences: Sequence, cached: dict[Sequence, int] | None = None) -> WaitingQueue:
    known = {} if cached is None else cached
    queue = WaitingQueue(quantum_tokens=QUANTUM, cached_tokens=lambda one: known.get(one, 0))
    for sequence in sequences:
        queue.add(sequence)
    return queue


def admit(queue: WaitingQueue) -> Sequence:
    """Takes one, and charges its scope for all of its prompt."""
    sequence = queue.take()
    queue.charge(sequence.request.scope, sequence.num_prompt)
    return sequence


def test_alike_ones_go_in_the_order_they_came() -> None:
    sequences = [sequence_of([1] * 10) for _ in range(5)]
    queue = queue_of(*sequences)
    assert [admit(queue) for _ in range(5)] == sequences
    assert len(queue) == 0


def test_a_lower_priority_number_goes_first() -> None:
    bulk, usual, urgent = (sequence_of([1], priority=priority) for priority in (5, 0, -5))
    queue = queue_of(bulk, usual, urgent)
    assert [admit(queue) for _ in range(3)] == [urgent, usual, bulk]


def test_within_a_scope_the_longest_cached_prefix_goes_first() -> None:
    sequences = [sequence_of([1] * 10) for _ in range(4)]
    queue = queue_of(*sequences, cached={sequences[2]: 9, sequences[3]: 5})
    assert [admit(queue) for _ in range(4)] == [sequences[index] for index in (2, 3, 0, 1)]


def test_only_the_first_few_of_a_scope_are_compared() -> None:
    looked: list[Sequence] = []
    queue = WaitingQueue(quantum_tokens=QUANTUM, cached_tokens=lambda one: looked.append(one) or 0)
    for _ in range(500):
        queue.add(sequence_of([1]))
    queue.take()
    assert len(looked) == WINDOW
    for _ in range(64):
        queue.take()
    assert len(looked) <= 3 * 64, "what was seen is good for a while"


def test_a_prefix_that_was_cached_meanwhile_is_noticed() -> None:
    first, *others = (sequence_of([1]) for _ in range(100))
    cached = dict.fromkeys(others, 5)
    queue = queue_of(first, *others, cached=cached)
    queue.take()
    cached[first] = 9
    for _ in range(LOOK_AGAIN_AFTER):
        queue.take()
    assert first not in queue, "and it is not yet the oldest one's turn"
    assert LOOK_AGAIN_AFTER + 1 < OLDEST_EVERY


def test_a_scope_with_many_requests_does_not_hold_up_one_with_few() -> None:
    flood = [sequence_of([1] * 100, scope="aa") for _ in range(50)]
    few = [sequence_of([1] * 100, scope="bb") for _ in range(3)]
    queue = queue_of(*flood, *few)
    order = [admit(queue).request.scope for _ in range(6)]
    assert order.count("bb") == 3


def test_scopes_get_tokens_not_requests_in_equal_measure() -> None:
    long = [sequence_of([1] * 400, scope="aa") for _ in range(20)]
    short = [sequence_of([1] * 50, scope="bb") for _ in range(160)]
    queue = queue_of(*long, *short)
    spent = {"aa": 0, "bb": 0}
    for _ in range(45):
        sequence = admit(queue)
        spent[sequence.request.scope] += sequence.num_prompt
    assert abs(spent["aa"] - spent["bb"]) <= 400 + QUANTUM


def test_what_was_cached_costs_a_scope_nothing() -> None:
    hits = [sequence_of([1] * 400, scope="aa") for _ in range(20)]
    misses = [sequence_of([1] * 400, scope="bb") for _ in range(20)]
    queue = queue_of(*hits, *misses)
    taken = {"aa": 0, "bb": 0}
    for _ in range(15):
        scope = queue.take().request.scope
        queue.charge(scope, 1 if scope == "aa" else 400)
        taken[scope] += 1
    assert taken["aa"] > taken["bb"]


def test_an_interrupted_one_goes_before_fresh_ones_of_its_priority() -> None:
    old, fresh, urgent = sequence_of([1]), sequence_of([1]), sequence_of([1], priority=-1)
    queue = queue_of(old)
    queue.take()
    queue.add(fresh)
    queue.put_back(old)
    queue.add(urgent)
    assert [queue.take() for _ in range(3)] == [urgent, old, fresh]


def test_one_that_found_no_room_is_next_whatever_comes() -> None:
    large = sequence_of([1] * 400)
    queue = queue_of(large)
    queue.take()
    queue.reserve(large)
    queue.add(sequence_of([1], priority=-8))
    assert queue.take() is large


@pytest.mark.parametrize("state", ["fresh", "interrupted", "next"])
def test_a_cancelled_one_is_gone_in_whatever_state(state: str) -> None:
    gone, stays = sequence_of([1]), sequence_of([1])
    queue = queue_of(gone)
    if state != "fresh":
        queue.take()
        (queue.put_back if state == "interrupted" else queue.reserve)(gone)
    queue.add(stays)
    queue.remove(gone)
    assert gone not in queue
    assert queue.take() is stays


def test_nobody_is_overtaken_for_longer_than_is_stated() -> None:
    """A cold, least urgent prompt, with `older` ones before it, among endless better ones."""
    rng = random.Random(0)
    for older in (0, 3, 10):
        before = [sequence_of([1] * 300, scope="aa", priority=8) for _ in range(older)]
        last = sequence_of([1] * 300, scope="aa", priority=8)
        queue = queue_of(*before, last)
        admissions = 0
        while last in queue:
            for _ in range(2):
                queue.add(sequence_of([1], scope=rng.choice(["bb", "cc"]), priority=-8))
            admit(queue)
            admissions += 1
        assert admissions > OLDEST_EVERY * older, "no claim about a bound without pressure"
        assert admissions <= OLDEST_EVERY * (older + 1)


def test_debts_of_scopes_that_never_come_back_do_not_pile_up() -> None:
    queue = queue_of()
    for index in range(MAX_DEBTORS + 500):
        queue.charge(f"{index:08x}", 10)
    assert len(queue._credit) == MAX_DEBTORS
