"""The prefix store against a brute-force model, and the model against planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefix_store.policy import POLICIES
from tests.property.prefix_world import PUBLIC, SCOPES, World

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
PROMPTS = TOKENS | TOKENS.map(lambda tail: [*PUBLIC, *tail][:14])
PICK = st.integers(0, 7)


class PrefixStoreMachine(RuleBasedStateMachine):
    """Match, lease, extend, write, seal, release, cancel, evict, pin, expire, clear, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(scope=st.sampled_from(SCOPES), tokens=PROMPTS, spare=st.integers(0, 3))
    def acquire(self, scope: str, tokens: list[int], spare: int) -> None:
        if len(self.world.live) < 4:
            self.world.acquire(scope, tokens, max(len(tokens) - spare, 0))

    @rule(scope=st.sampled_from(SCOPES), tokens=PROMPTS)
    def look(self, scope: str, tokens: list[int]) -> None:
        self.world.look(scope, tokens)

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK, more=st.integers(1, 12))
    def extend(self, pick: int, more: int) -> None:
        seq = self.world.live[pick % len(self.world.live)]
        self.world.extend(seq, min(seq.written + more, len(seq.tokens)))

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK, more=st.integers(1, 12))
    def write(self, pick: int, more: int) -> None:
        seq = self.world.live[pick % len(self.world.live)]
        self.world.write(seq, seq.written + more)

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK, token=st.integers(0, 1))
    def generate(self, pick: int, token: int) -> None:
        seq = self.world.live[pick % len(self.world.live)]
        if len(seq.tokens) < 16:
            self.world.generate(seq, token)

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        seq = self.world.live[pick % len(self.world.live)]
        if len(self.world.live) < 4 and seq.written:
            self.world.fork(seq)

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        self.world.seal(self.world.live[pick % len(self.world.live)])

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        self.world.release(self.world.live[pick % len(self.world.live)])

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        self.world.discard(self.world.live[pick % len(self.world.live)])

    @rule(scope=st.sampled_from(SCOPES), tokens=PROMPTS, ttl=st.sampled_from([3.0, 20.0]))
    def pin(self, scope: str, tokens: list[int], ttl: float) -> None:
        self.world.pin(scope, tokens, ttl)

    @precondition(lambda self: self.world.pinned)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        self.world.expire()
        self.world.store.pins()
        if self.world.pinned:
            self.world.unpin(self.world.pinned[pick % len(self.world.pinned)])

    @rule(seconds=st.sampled_from([2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(sure=st.integers(0, 7))
    def clear(self, sure: int) -> None:
        if sure == 0:
            self.world.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.verify()

    def teardown(self) -> None:
        self.world.finish()


TestPrefixStore = PrefixStoreMachine.TestCase
TestPrefixStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def live(world: World, rng: random.Random) -> None:
    """One step of a random life; weighted so that pools fill up and prompts meet."""
    scope = rng.choice(SCOPES)
    tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
    if rng.random() < 0.4:
        tokens = [*PUBLIC, *tokens]
    seq = rng.choice(world.live) if world.live else None
    dice = rng.random()
    if seq is None or (dice < 0.25 and len(world.live) < 4):
        world.acquire(scope, tokens, max(len(tokens) - rng.randint(0, 2), 0))
    elif dice < 0.30:
        world.look(scope, tokens)
    elif dice < 0.60:
        world.extend(seq, len(seq.tokens))
        world.write(seq, len(seq.tokens))
    elif dice < 0.68 and len(seq.tokens) < 16:
        world.generate(seq, rng.randint(0, 1))
    elif dice < 0.71 and len(world.live) < 4 and seq.written:
        world.fork(seq)
    elif dice < 0.78:
        world.seal(seq)
    elif dice < 0.90:
        world.release(seq)
    elif dice < 0.94:
        world.discard(seq)
    elif dice < 0.98:
        world.pin(scope, tokens, rng.choice([3.0, 20.0]))
    else:
        world.tick(10.0)


def lives(*, num_lives: int, num_steps: int, make_world: Callable[[], World] = World) -> None:
    for seed in range(num_lives):
        rng = random.Random(seed)
        world = make_world()
        for _ in range(num_steps):
            live(world, rng)
        world.finish()


def test_a_store_without_planted_bugs_lives_through_the_same_lives() -> None:
    lives(num_lives=60, num_steps=80)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_evicts_only_what_may_go_and_no_more_than_is_needed(name: str) -> None:
    lives(num_lives=25, num_steps=80, make_world=lambda: World(policy=POLICIES[name]()))
