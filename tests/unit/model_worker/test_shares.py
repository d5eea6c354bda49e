"""How prompts share a step: by urgency, evenly by scope, short ones first, and the oldest always some."""

from __future__ import annotations

import random

from model_worker.sequence import Sequence
from model_worker.shares import OLDEST_SHARE, split
from tests.unit.model_worker.sequences import sequence_of

BUDGET = 128
FLOOR = BUDGET // OLDEST_SHARE


def prefill(length: int, *, scope: str = "aa", urgency: int = 0) -> Sequence:
    sequence = sequence_of([1] * length, scope=scope)
    sequence.urgency = urgency
    return sequence


def test_one_prompt_has_the_whole_step() -> None:
    alone = prefill(1000)
    assert split(BUDGET, [alone]) == {alone: BUDGET}


def test_short_prompts_of_a_scope_pass_a_long_one_that_still_moves() -> None:
    long, short = prefill(1000), prefill(50)
    assert split(BUDGET, [long, short]) == {long: BUDGET - 50, short: 50}
    middle = prefill(500)
    assert split(BUDGET, [long, middle]) == {long: FLOOR, middle: BUDGET - FLOOR}


def test_scopes_share_evenly_however_many_prompts_they_have() -> None:
    mine = prefill(1000, scope="aa")
    theirs = [prefill(1000, scope="bb") for _ in range(3)]
    granted = split(BUDGET, [*theirs, mine])
    assert granted[mine] == (BUDGET - FLOOR) // 2


def test_what_a_scope_cannot_use_the_others_get() -> None:
    short, long = prefill(10, scope="aa"), prefill(1000, scope="bb")
    assert split(BUDGET, [short, long]) == {short: 10, long: BUDGET - 10}


def test_urgent_prompts_take_all_but_the_oldest_ones_share() -> None:
    oldest, urgent = prefill(1000), prefill(1000, scope="bb", urgency=-1)
    assert split(BUDGET, [oldest, urgent]) == {oldest: FLOOR, urgent: BUDGET - FLOOR}


def test_nothing_is_left_over_and_nobody_gets_more_than_it_needs() -> None:
    rng = random.Random(1)
    for _ in range(300):
        prefills = [
            prefill(rng.randrange(1, 200), scope=rng.choice(["aa", "bb", "cc"]), urgency=rng.randrange(2))
            for _ in range(rng.randrange(6))
        ]
        budget = rng.randrange(0, 150)
        granted = split(budget, prefills)
        assert all(0 < tokens <= sequence.num_pending for sequence, tokens in granted.items())
        assert sum(granted.values()) == min(budget, sum(one.num_pending for one in prefills))
        assert not prefills or not budget or prefills[0] in granted
