"""What is computed in which step, with a real store and no model."""

from __future__ import annotations

from model_worker.scheduler import MAX_STEPS_WAITED, Scheduler
from model_worker.sequence import Sequence
from prefix_store.blocks import BlockNamer
from prefix_store.store import PrefixStore
from tests.unit.model_worker.sequences import sequence_of

BLOCK = 16
STEP = 64


def make_scheduler(
    *, num_blocks: int = 256, max_running: int = 16, decode_step_tokens: int | None = None
) -> Scheduler:
    namer = BlockNamer(seed=1, model_fingerprint="m", dtype="f32", kv_codec="none", block_size=BLOCK)
    store = PrefixStore(num_blocks=num_blocks, block_size=BLOCK, namer=namer)
    return Scheduler(store, step_tokens=STEP, max_running=max_running, decode_step_tokens=decode_step_tokens)


def run_step(scheduler: Scheduler) -> dict[Sequence, int]:
    """One step, computed; sequences whose prompt is done go on by a token. Returns the tokens of each."""
    step = scheduler.schedule()
    assert sum(chunk.num_tokens for chunk in step.chunks) <= STEP
    scheduler.commit(step)
    for chunk in step.chunks:
        if chunk.stop == len(chunk.sequence.tokens):
            chunk.sequence.tokens.append(0)
    scheduler.check()
    return {chunk.sequence: chunk.num_tokens for chunk in step.chunks}


def prompt(seed: int, length: int) -> list[int]:
    return [1000 * seed + position for position in range(length)]


def test_a_short_prompt_of_another_scope_does_not_wait_for_a_long_one() -> None:
    scheduler = make_scheduler()
    long, short = sequence_of(prompt(1, 2000)), sequence_of(prompt(2, 20), scope="bb")
    scheduler.add(long)
    run_step(scheduler)
    scheduler.add(short)
    computed = run_step(scheduler)
    assert computed == {short: 20, long: STEP - 20}


def test_a_long_prompt_moves_in_every_step_however_many_short_ones_come() -> None:
    scheduler = make_scheduler()
    long = sequence_of(prompt(1, 400))
    scheduler.add(long)
    run_step(scheduler)
    for number in range(2, 60):
        scheduler.add(sequence_of(prompt(number, 60), priority=-1))
        if not long.is_prefilling and long.has_begun:
            return
        assert run_step(scheduler).get(long, 0) >= STEP // 8
        for one in [one for one in scheduler.running if one.num_output and one is not long]:
            scheduler.finish(one)
    raise AssertionError("it never came to its end")


def test_the_least_urgent_is_preempted_though_it_came_first() -> None:
    scheduler = make_scheduler(num_blocks=6)
    bulk, urgent = sequence_of(prompt(1, 31), priority=5), sequence_of(prompt(2, 47), priority=0)
    scheduler.add(bulk)
    run_step(scheduler)
    scheduler.add(urgent)
    while scheduler.preemptions == 0:
        run_step(scheduler)
    assert urgent in scheduler.running
    assert bulk in scheduler.waiting


def test_where_the_leader_gets_nowhere_one_follower_computes_and_the_others_follow_it() -> None:
    scheduler = make_scheduler()
    leader, *followers = [sequence_of(prompt(1, 200)) for _ in range(4)]
    scheduler.add(leader)
    run_step(scheduler)
    for follower in followers:
        scheduler.add(follower)
    # As if others took every step: the leader's part is left out.
    for _ in range(MAX_STEPS_WAITED):
        step = scheduler.schedule()
        assert {chunk.sequence for chunk in step.chunks} == {leader}
    step = scheduler.schedule()
    assert [one for one in followers if one.has_begun] == followers[:1]
    scheduler.commit(step)
    scheduler.check()
    for _ in range(12):
        run_step(scheduler)
    assert all(one.num_output for one in [leader, *followers])
    assert [one.started.uncached for one in followers if one.started] == [200 - 64, 8, 8], "of full blocks"


def test_a_follower_lends_its_urgency_to_its_leader() -> None:
    scheduler = make_scheduler()
    other = sequence_of(prompt(3, 2000), scope="bb", priority=0)
    leader = sequence_of(prompt(1, 2000), priority=5)
    follower = sequence_of(prompt(1, 2000), priority=-5)
    scheduler.add(other)
    scheduler.add(leader)
    run_step(scheduler)
    assert run_step(scheduler)[other] == STEP, "the less urgent one waits"
    scheduler.add(follower)
    assert run_step(scheduler)[leader] == STEP - STEP // 8


def test_more_sequences_than_a_step_holds_decode_in_turns() -> None:
    scheduler = make_scheduler(num_blocks=4 * STEP, max_running=2 * STEP)
    sequences = [sequence_of(prompt(number, 2)) for number in range(STEP + 30)]
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.waiting or any(one.is_prefilling for one in scheduler.running):
        run_step(scheduler)
    before = [one.num_output for one in sequences]
    for _ in range(6):
        run_step(scheduler)
    gained = [one.num_output - had for one, had in zip(sequences, before, strict=True)]
    assert min(gained) >= 3
    assert max(gained) <= 5


def test_a_prompt_takes_smaller_steps_beside_a_text_that_decodes() -> None:
    scheduler = make_scheduler(decode_step_tokens=STEP // 4)
    short, long = sequence_of(prompt(1, 20)), sequence_of(prompt(2, 400))
    scheduler.add(short)
    assert run_step(scheduler) == {short: 20}
    scheduler.add(long)
    assert run_step(scheduler) == {short: 1, long: STEP // 4 - 1}
    scheduler.finish(short)
    assert run_step(scheduler) == {long: STEP}
