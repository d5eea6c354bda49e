"""Mixed traffic without end: more than the pool holds, with hang-ups, and what must still be true of it.

Knows how to ask one running engine for everything at once: shared and unshared
prompts, several choices, structures, priorities, scopes, the cache by-passed.
Does not know how long to go on, or what is measured meanwhile.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from dataclasses import dataclass, field

from model_worker.protocol import (
    Event,
    Failed,
    Finished,
    GenerateRequest,
    JsonObject,
    Regex,
    SamplingParams,
    Started,
    Structure,
    Token,
    WorkerStats,
)
from tests.engines import DEADLINE_SECONDS, EngineDriver

BLOCK_SIZE = 16
POOL_BLOCKS = 64
DEMAND_SHARE = 1.1
"""Blocks that the open requests need for themselves alone, by the pool's."""
SCOPES = ("aa", "bb", "cc")
CONVERSATIONS_PER_SCOPE = 3
MAX_SHARED_TOKENS, MAX_NEW_TOKENS = 10 * BLOCK_SIZE, 4 * BLOCK_SIZE
STRUCTURES: tuple[Structure, ...] = (
    JsonObject(),
    Regex(pattern="[a-c]{2,6}x"),
    Regex(pattern="([0-9]{2},)+"),
)


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A request under way, and what it has said so far."""

    request: GenerateRequest
    num_blocks: int
    hang_up_after: int | None
    num_events: int = 0
    started: Started | None = None
    texts: list[list[int]] = field(default_factory=list)
    num_finished: int = 0

    def take(self, event: Event) -> None:
        """Asserts that the event is one that may come now."""
        self.num_events += 1
        assert not isinstance(event, Failed), event
        if isinstance(event, Started):
            assert self.started is None, "it began twice"
            assert event.prompt == len(self.request.token_ids)
            self.started = event
            return
        assert self.started is not None, "it has not begun"
        if isinstance(event, Token):
            self.texts[event.choice] += event.token_ids
        elif isinstance(event, Finished):
            assert event.output_tokens == len(self.texts[event.choice])
            self.num_finished += 1

    @property
    def has_ended(self) -> bool:
        return self.num_finished == self.request.n

    @property
    def is_hung_up(self) -> bool:
        return self.hang_up_after is not None and self.num_events >= self.hang_up_after


class Churn:
    """Keeps an engine over-full. Everything it asserts holds at every moment; `lull` asserts the rest."""

    def __init__(self, driver: EngineDriver, *, seed: int, pool_blocks: int = POOL_BLOCKS) -> None:
        self._driver = driver
        self._rng = random.Random(seed)
        self._wanted_blocks = int(DEMAND_SHARE * pool_blocks)
        self._told: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._conversations = {scope: deque[list[int]](maxlen=CONVERSATIONS_PER_SCOPE) for scope in SCOPES}
        self._num_asides = 0  # requests that `idle_stats` sent
        self.num_sent = self.num_ended = self.num_hung_up = self.cached_tokens = 0

    def send(self, count: int) -> None:
        """Sends so many requests, each as soon as there is demand for less than `DEMAND_SHARE`."""
        for _ in range(count):
            while sum(one.num_blocks for one in self._open.values()) >= self._wanted_blocks:
                self._listen()
            self._submit()

    def lull(self) -> WorkerStats:
        """Waits until every request has ended: then nothing is held, and each is counted."""
        while self._open:
            self._listen()
        stats = self._driver.idle_stats()
        assert (stats.sequences_running, stats.sequences_waiting, stats.blocks_held) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert stats.requests_failed == 0
        assert self.num_ended + self.num_hung_up == self.num_sent
        self._num_asides += 1
        assert stats.requests_finished + stats.requests_cancelled == self.num_sent + self._num_asides
        # One may have ended just before its hang-up was heard.
        assert stats.requests_cancelled <= self.num_hung_up
        self._driver.engine.cancel("nobody")  # wakes an idle engine, which checks its invariants
        return stats

    def _submit(self) -> None:
        rng, request_id = self._rng, f"churn-{self.num_sent}"
        scope = rng.choice(SCOPES)
        prompt, num_shared = self._prompt(scope)
        max_tokens = rng.choice((1, 2, 4, 8, 8, 24))
        n = rng.choice((1, 1, 1, 1, 1, 1, 1, 2, 3, 4))
        request = GenerateRequest(
            request_id=request_id,
            scope=scope,
            token_ids=prompt,
            sampling=self._sampling(max_tokens),
            cache="bypass" if rng.random() < 0.1 else "automatic",
            n=n,
            priority=rng.choice((-2, 0, 0, 0, 1)),
        )
        self._open[request_id] = _Open(
            request=request,
            num_blocks=blocks_of(len(prompt) - num_shared) + n * blocks_of(max_tokens),
            hang_up_after=rng.randrange(6) if rng.random() < 0.2 else None,
            texts=[[] for _ in range(n)],
        )
        self._driver.engine.submit(request, lambda event: self._told.put((request_id, event)))
        self.num_sent += 1
        self._hang_up_if_due(request_id)

    def _prompt(self, scope: str) -> tuple[list[int], int]:
        """A new one, or one that goes on from some place in an earlier conversation; how much is shared."""
        rng, known = self._rng, self._conversations[scope]
        base: list[int] = []
        if known and rng.random() < 0.9:
            base = rng.choice(known)[:MAX_SHARED_TOKENS]
            if rng.random() < 0.3:
                base = base[: rng.randrange(len(base) + 1)]
        return base + [rng.randrange(256) for _ in range(rng.randrange(1, MAX_NEW_TOKENS))], len(base)

    def _sampling(self, max_tokens: int) -> SamplingParams:
        rng = self._rng
        if rng.random() < 0.1:
            return SamplingParams(max_tokens=max_tokens, seed=1, structure=rng.choice(STRUCTURES))
        if rng.random() < 0.1:
            return SamplingParams(
                max_tokens=max_tokens,
                top_logprobs=2,
                frequency_penalty=0.5,
                repetition_penalty=1.1,
                stop=("qz",),
                stop_token_ids=(7,),
            )
        return SamplingParams(max_tokens=max_tokens, temperature=rng.choice((0.0, 1.0)), ignore_eos=True)

    def _listen(self) -> None:
        """Takes one event. None within the deadline means that somebody waits for ever: `queue.Empty`."""
        request_id, event = self._told.get(timeout=DEADLINE_SECONDS)
        one = self._open.get(request_id)
        if one is None:
            return  # said before the hang-up was heard
        one.take(event)
        if one.has_ended:
            self._end(request_id, one)
        else:
            self._hang_up_if_due(request_id)

    def _end(self, request_id: str, one: _Open) -> None:
        del self._open[request_id]
        assert one.started is not None
        self.num_ended += 1
        self.cached_tokens += one.started.cached.total
        self._conversations[one.request.scope].append(one.request.token_ids + one.texts[0])

    def _hang_up_if_due(self, request_id: str) -> None:
        if self._open[request_id].is_hung_up:
            del self._open[request_id]
            self.num_hung_up += 1
            self._driver.engine.cancel(request_id)
