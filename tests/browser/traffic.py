"""Some days of traffic for a site, and the worker that served it.

The store is the real one, on the traffic's own clock: what was read, why not more, what is resident and
what had to go are its own words. Only the model is missing. The meter gets what a gateway would
have settled, and the worker tells what a worker would.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage import TokenCounts
from gateway.auth import scope_of
from model_worker.protocol import CacheStatistics, WorkerCard, WorkerStats
from model_worker.statistics import cache_statistics
from prefix_store.blocks import BlockNamer
from prefix_store.store import PrefixStore
from tests.browser.site import MODEL, NOW, START_SECONDS, Customer, Site
from tests.integration.gateway.scripted_worker import served
from tests.unit.gateway.tiny_tokenizer import prompt_files

BLOCK_SIZE = 16
NUM_BLOCKS = 300
KV_BYTES_PER_TOKEN = 46_080
NUM_DAYS = 9
NS_PER_TOKEN = 220_000
NS_BEFORE = 35_000_000


@dataclass(slots=True)
class Traffic:
    """Requests one after another, in order of time."""

    site: Site
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    now: float = 0.0
    store: PrefixStore = field(init=False)
    first: datetime = field(init=False)

    def __post_init__(self) -> None:
        self.first = NOW - timedelta(days=NUM_DAYS)
        self.store = PrefixStore(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            namer=BlockNamer(
                seed=7, model_fingerprint="fe" * 16, dtype="float32", kv_codec="none", block_size=BLOCK_SIZE
            ),
            clock=lambda: self.now,
        )

    def serve(self, customer: Customer, prompt: list[int], at: datetime, *, num_output: int) -> None:
        """One request from admission to its end."""
        self.now = (at - self.first).total_seconds()
        scope = scope_of(self.site.gateway.secret, customer.tenant.id)
        tokens = array("I", prompt)
        lease = self.store.acquire(scope, tokens, max_cached_tokens=len(tokens) - 1)
        read, miss = lease.cached_tokens, lease.miss
        self.store.extend(lease, len(tokens))
        self.store.release(lease, tokens, len(tokens))
        computed = len(tokens) - read
        self.site.record(
            customer,
            at,
            TokenCounts(uncached=computed, read=read, output=num_output),
            worker="worker-0",
            miss_reason=None if miss is None else miss.reason.value,
            first_token_ns=NS_BEFORE + computed * NS_PER_TOKEN,
        )

    def converse(self, customer: Customer, system: list[int], at: datetime, *, turns: int) -> None:
        """A conversation over a system prompt: each turn sends all before it again."""
        prompt = list(system)
        for turn in range(turns):
            prompt += [self.rng.randrange(1, 250) for _ in range(self.rng.randrange(20, 90))]
            output = self.rng.randrange(20, 120)
            self.serve(customer, prompt, at + timedelta(seconds=40 * turn), num_output=output)
            prompt += [self.rng.randrange(1, 250) for _ in range(output)]

    def strange(self) -> list[int]:
        """A prompt like no other; some of them too short to be kept."""
        return [self.rng.randrange(1, 250) for _ in range(self.rng.choice([1, 30, 180]))]

    def fill(self, customers: list[Customer]) -> None:
        """Days of conversations; a customer's system prompt is its own."""
        systems = {one.tenant.id: [self.rng.randrange(1, 250) for _ in range(400)] for one in customers}
        for day in range(NUM_DAYS + 1):
            for hour in range(1, 15, 2):
                for place, customer in enumerate(customers):
                    at = NOW - timedelta(days=NUM_DAYS - day, hours=15 - hour, minutes=7 * place)
                    if at < NOW:
                        self.serve(customer, self.strange(), at - timedelta(seconds=90), num_output=12)
                        turns = 1 + (day + hour + place) % 4
                        self.converse(customer, systems[customer.tenant.id], at, turns=turns)

    def statistics(self) -> CacheStatistics:
        blocks = self.store.counts
        stats = WorkerStats(
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_held=blocks.held,
            blocks_total=blocks.total,
            kv_bytes_held=3 * 1_000 * KV_BYTES_PER_TOKEN,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            kv_bytes_per_conversation=1_000 * KV_BYTES_PER_TOKEN,
            sequences_running=3,
            sequences_waiting=0,
            prompt_tokens_computed=0,
            prompt_tokens_cached=0,
            tokens_recomputed=0,
            output_tokens=0,
            requests_finished=0,
            requests_cancelled=0,
            requests_failed=0,
            preemptions=0,
            steps=0,
        )
        return cache_statistics(self.store, stats, now=self.now, uptime_seconds=self.now)

    def pin(self, customer: Customer, prompt: list[int], *, ttl_seconds: float) -> None:
        scope = scope_of(self.site.gateway.secret, customer.tenant.id)
        assert self.store.pin(scope, array("I", prompt), ttl_seconds=ttl_seconds) is not None


@contextmanager
def running_worker(statistics: Callable[[], CacheStatistics]) -> Iterator[str]:
    """The worker's read-only half over real HTTP, until the block ends; its address."""
    card = WorkerCard(
        model=MODEL,
        fingerprint="fe" * 16,
        dtype="float32",
        device="cpu",
        vocab_size=259,
        context_window_tokens=4_096,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        epoch="1",
    )
    files = prompt_files()

    async def show_card(_: Request) -> Response:
        return Response(msgspec.json.encode(card), media_type="application/json")

    async def show_statistics(_: Request) -> Response:
        return Response(msgspec.json.encode(statistics()), media_type="application/json")

    async def show_file(request: Request) -> Response:
        content = files.get(request.path_params["name"])
        return Response(content) if content is not None else Response(status_code=404)

    async def be_ready(_: Request) -> Response:
        return Response(status_code=200)

    app = Starlette(
        routes=[
            Route("/v1/card", show_card),
            Route("/v1/statistics", show_statistics),
            Route("/v1/files/{name}", show_file),
            Route("/health/readiness", be_ready),
        ]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stop = asyncio.Event()
            async with served(app, listener):
                started.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="worker")
        thread.start()
        loop, stop = started.result(START_SECONDS)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
