"""A running engine on a tiny model, driven without HTTP."""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from model_worker.engine import Engine
from model_worker.models import LoadedModel
from model_worker.protocol import (
    CacheMode,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    SamplingParams,
    Started,
    Token,
    WorkerStats,
)
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker

DEADLINE_SECONDS = 60.0
SCOPE = "aa"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random bytes, as tokens of the tiny models."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


@dataclass(slots=True)
class Generation:
    """One request's events, as they come."""

    request_id: str
    n: int = 1
    events: list[Event] = field(default_factory=list)
    inbox: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def next_event(self) -> Event:
        event = self.inbox.get(timeout=DEADLINE_SECONDS)
        self.events.append(event)
        return event

    def wait(self) -> Generation:
        while not self.has_ended:
            self.next_event()
        return self

    @property
    def has_ended(self) -> bool:
        """Every choice is finished, or one failure has ended them all."""
        num_finished = sum(isinstance(event, Finished) for event in self.events)
        return num_finished == self.n or any(isinstance(event, Failed) for event in self.events)

    def wait_for(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.next_event(), kind):
            assert not isinstance(event, Finished | Failed), event
        return event

    @property
    def started(self) -> Started:
        return next(event for event in self.events if isinstance(event, Started))

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Token) for token in event.token_ids]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token | Finished))

    @property
    def choices(self) -> list[list[int]]:
        """The tokens of each choice."""
        texts: list[list[int]] = [[] for _ in range(self.n)]
        for event in self.events:
            if isinstance(event, Token):
                texts[event.choice] += event.token_ids
        return texts

    @property
    def end(self) -> Finished | Failed:
        assert isinstance(self.events[-1], Finished | Failed)
        return self.events[-1]


class EngineDriver:
    """Submits requests to an engine and waits for what becomes of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self.stopped = False

    def stop(self) -> None:
        """Stops the engine on purpose."""
        self.stopped = True
        self.engine.stop()

    def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        scope: str = SCOPE,
        cache: CacheMode = "automatic",
        adapter: str | None = None,
        n: int = 1,
        priority: int = 0,
        **sampling: object,
    ) -> Generation:
        generation = Generation(f"request-{next(self._ids)}", n)
        settings = SamplingParams(max_tokens=max_tokens, **({"temperature": 0.0} | sampling))  # type: ignore[arg-type]
        self.engine.submit(
            GenerateRequest(
                request_id=generation.request_id,
                scope=scope,
                token_ids=prompt,
                sampling=settings,
                cache=cache,
                adapter=adapter,
                n=n,
                priority=priority,
            ),
            generation.inbox.put,
        )
        return generation

    def generate(self, prompt: list[int], **options: object) -> Generation:
        return self.submit(prompt, **options).wait()  # type: ignore[arg-type]

    def idle_stats(self) -> WorkerStats:
        """The counters once nothing runs, as of after one more request of one token."""
        before = self.engine.stats.steps
        self.generate([0], max_tokens=1, cache="bypass", ignore_eos=True)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (stats := self.engine.stats).steps == before or stats.sequences_running:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return stats


@contextmanager
def running_engine(model: LoadedModel, **settings: object) -> Iterator[EngineDriver]:
    """An engine with a 64-block pool unless told otherwise; its invariants are checked whenever it idles."""
    defaults: dict[str, object] = {"kv_cache_blocks": 64, "check_when_idle": True}
    worker = build_worker(model, WorkerSettings(**(defaults | settings)))  # type: ignore[arg-type]
    worker.engine.start()
    try:
        driver = EngineDriver(worker.engine)
        yield driver
        assert driver.stopped or worker.engine.is_alive, "the engine died of a broken invariant"
    finally:
        worker.engine.stop()
