"""A worker's Prometheus metrics: what its requests took, and what its engine and cache hold.

Knows names, labels and buckets, and how to watch one request's events on their way to its
client. Does not know HTTP, tensors or tenants.

Names are vLLM's where the meaning is the same, with `vllm_` for `vllm:`: Prometheus keeps colons for
recording rules, and a scrape can put it back (`deploy/prometheus/prometheus.yml` does).
Ours begin with `headstart_worker_`. `docs/metrics.md` has them all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from model_worker.engine import Engine, EventSink
from model_worker.protocol import (
    CacheStatistics,
    DurationCounts,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Prefilled,
    RefusalCode,
    Started,
    Token,
    WorkerCard,
)

# A second series for every counter and histogram, which says when the process began; that is said once.
disable_created_metrics()  # type: ignore[no-untyped-call]

ENGINE: Final = "0"
"""vLLM numbers its engines, and its dashboards tell them apart; a worker has one."""
ABORTED: Final = "abort"
FAILED: Final = "error"

_LABELS: Final = ("model_name", "engine")
_FIRST_TOKEN_SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
_FIRST_TOKEN_SECONDS_SLOW: Final = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKEN_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST_SECONDS: Final = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0),
    *(15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_CHOICES: Final = (1, 2, 5, 10, 20, 50, 128)

_COUNTERS: Final = {
    "prompt_tokens_computed": "Prompt tokens computed for the first time.",
    "prompt_tokens_cached": "Prompt tokens found in cache.",
    "tokens_recomputed": "Tokens computed again after a preemption.",
    "steps": "Forward passes.",
}
_KV_BYTES: Final = {
    "held": "Memory of the KV blocks that running sequences hold; what several share counts once.",
    "per_conversation": "Memory of held KV blocks by running sequence.",
    "per_token": "Memory of one token's keys and values.",
}
_BLOCK_STATES: Final = ("free", "cached", "held")


class ModelMetrics:
    """What the requests of one model took. Every child is looked up once, here, and never for a token."""

    def __init__(self, families: _Families, model: str) -> None:
        self.queries = families.queries.labels(model, ENGINE)
        self.hits = families.hits.labels(model, ENGINE)
        self.prompt_tokens = families.prompt_tokens.labels(model, ENGINE)
        self.generation_tokens = families.generation_tokens.labels(model, ENGINE)
        self.ended = {
            reason: families.ended.labels(model, ENGINE, reason)
            for reason in ("stop", "length", ABORTED, FAILED)
        }
        self.misses = families.misses
        self.first_token = families.first_token.labels(model, ENGINE)
        self.between_tokens = families.between_tokens.labels(model, ENGINE)
        self.whole = families.whole.labels(model, ENGINE)
        self.queued = families.queued.labels(model, ENGINE)
        self.inference = families.inference.labels(model, ENGINE)
        self.prefill = families.prefill.labels(model, ENGINE)
        self.decode = families.decode.labels(model, ENGINE)
        self.request_prompt = families.request_prompt.labels(model, ENGINE)
        self.request_output = families.request_output.labels(model, ENGINE)
        self.longest_output = families.longest_output.labels(model, ENGINE)
        self.asked_output = families.asked_output.labels(model, ENGINE)
        self.asked_choices = families.asked_choices.labels(model, ENGINE)


class _Families:
    """The metrics that are counted as requests go by. Their names and help are all here."""

    def __init__(self, registry: CollectorRegistry, window: int) -> None:
        self._registry = registry
        tokens = _powers_of_two(window)
        self.queries = self._counter(
            "vllm_prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.hits = self._counter("vllm_prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.prompt_tokens = self._counter("vllm_prompt_tokens", "Prompt tokens prefilled, cached ones too.")
        self.generation_tokens = self._counter("vllm_generation_tokens", "Tokens generated.")
        self.ended = self._counter("vllm_request_success", "Texts ended, by why.", "finished_reason")
        self.misses = Counter(
            "headstart_worker_cache_misses",
            "Prompts that were not wholly cached, by why not.",
            ["reason"],
            registry=registry,
        )
        self.refusals = Counter(
            "headstart_worker_refusals",
            "Requests that were not begun, by why not.",
            ["code"],
            registry=registry,
        )
        first = (*_FIRST_TOKEN_SECONDS, *_FIRST_TOKEN_SECONDS_SLOW)
        self.first_token = self._histogram(
            "vllm_time_to_first_token_seconds", "From arrival to the first token.", first
        )
        self.between_tokens = self._histogram(
            "vllm_inter_token_latency_seconds", "Between two tokens of a text.", _TOKEN_SECONDS
        )
        self.whole = self._histogram(
            "vllm_e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )
        self.queued = self._histogram(
            "vllm_request_queue_time_seconds", "From arrival to the first step.", _REQUEST_SECONDS
        )
        self.inference = self._histogram(
            "vllm_request_inference_time_seconds", "From the first step to the last token.", _REQUEST_SECONDS
        )
        self.prefill = self._histogram(
            "vllm_request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_SECONDS
        )
        self.decode = self._histogram(
            "vllm_request_decode_time_seconds", "From the first token to the last one.", _REQUEST_SECONDS
        )
        self.request_prompt = self._histogram("vllm_request_prompt_tokens", "Prompt tokens.", tokens)
        self.request_output = self._histogram(
            "vllm_request_generation_tokens", "Tokens generated, over all texts of a request.", tokens
        )
        self.longest_output = self._histogram(
            "vllm_request_max_num_generation_tokens", "Tokens of a request's longest text.", tokens
        )
        self.asked_output = self._histogram(
            "vllm_request_params_max_tokens", "The longest text that a request allowed.", tokens
        )
        self.asked_choices = self._histogram(
            "vllm_request_params_n", "Texts that a request asked for.", _CHOICES
        )

    def _counter(self, name: str, text: str, *more_labels: str) -> Counter:
        return Counter(name, text, [*_LABELS, *more_labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)


class ObservedRequest:
    """An event sink that watches one request and passes everything on. States: open → ended.

    Events come from the engine's thread, a hang-up from the server's.
    """

    def __init__(
        self, metrics: ModelMetrics, request: GenerateRequest, sink: EventSink, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._request = request
        self._sink = sink
        self._clock = clock
        self.arrived_at = clock()
        self._outcome: str | None = None
        self._started: Started | None = None
        self._started_at = 0.0
        self._first_token_at: float | None = None
        self._last_token_at: list[float | None] = [None] * request.n
        self._outputs = [0] * request.n
        self._num_open = request.n
        self._ending = threading.Lock()

    def __call__(self, event: Event) -> None:
        match event:
            case Token():
                self._count_token(event, self._clock())
            case Started():
                self._start(event, self._clock())
            case Finished():
                self._finish(event, self._clock())
            case Failed():
                self._end_open(FAILED)
            case Prefilled():
                pass
        self._sink(event)

    def hang_up(self) -> None:
        """Nobody waits any more: texts that have not ended never will."""
        self._end_open(ABORTED)

    def now(self) -> float:
        """On the clock of every time here."""
        return self._clock()

    def phases(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Queue, prefill and decode, as far as the request came: each with its beginning and end."""
        if self._started is None:
            yield "queue", self.arrived_at, now
            return
        yield "queue", self.arrived_at, self._started_at
        if self._first_token_at is None:
            yield "prefill", self._started_at, now
            return
        yield "prefill", self._started_at, self._first_token_at
        yield "decode", self._first_token_at, now

    def span_attributes(self) -> dict[str, str | int]:
        """For a trace: the request's id, how it ended and its counts, and never a token."""
        known: dict[str, str | int | None] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "headstart",
            "gen_ai.usage.input_tokens": len(self._request.token_ids),
            "gen_ai.usage.cache_read.input_tokens": None
            if self._started is None
            else self._started.cached.total,
            "gen_ai.usage.output_tokens": sum(self._outputs),
            "headstart.request_id": self._request.request_id,
            "headstart.outcome": self._outcome,
        }
        return {name: value for name, value in known.items() if value is not None}

    def facts(self) -> dict[str, object]:
        """For a log line: the request's id, how it ended, counts and times, and never a token."""
        started = self._started
        return {
            "request_id": self._request.request_id,
            "outcome": self._outcome,
            "prompt_tokens": len(self._request.token_ids),
            "cached_tokens": None if started is None else started.cached.total,
            "output_tokens": sum(self._outputs),
            "queue_ms": None if started is None else _milliseconds(self._started_at - self.arrived_at),
            "first_token_ms": self._first_token_at and _milliseconds(self._first_token_at - self.arrived_at),
            "elapsed_ms": _milliseconds(self._clock() - self.arrived_at),
        }

    def _start(self, event: Started, now: float) -> None:
        metrics = self._metrics
        self._started, self._started_at = event, now
        metrics.queued.observe(now - self.arrived_at)
        metrics.request_prompt.observe(event.prompt)
        metrics.asked_output.observe(self._request.sampling.max_tokens)
        metrics.asked_choices.observe(self._request.n)
        if event.missed is not None:
            metrics.misses.labels(event.missed.reason).inc()
        if self._request.cache == "automatic":
            metrics.queries.inc(event.prompt)
            metrics.hits.inc(event.cached.total)

    def _count_token(self, event: Token, now: float) -> None:
        metrics, choice = self._metrics, event.choice
        if self._first_token_at is None:
            self._first_token_at = now
            metrics.first_token.observe(now - self.arrived_at)
            metrics.prefill.observe(now - self._started_at)
            metrics.prompt_tokens.inc(len(self._request.token_ids))
        before = self._last_token_at[choice]
        if before is not None:
            metrics.between_tokens.observe(now - before)
        self._last_token_at[choice] = now
        self._outputs[choice] += len(event.token_ids)
        metrics.generation_tokens.inc(len(event.token_ids))

    def _finish(self, event: Finished, now: float) -> None:
        with self._ending:
            if not self._num_open:
                return  # its client has hung up: it is counted
            self._num_open -= 1
            self._outcome = event.reason
            has_ended = not self._num_open
        metrics = self._metrics
        metrics.ended[event.reason].inc()
        if not has_ended:
            return
        metrics.whole.observe(now - self.arrived_at)
        metrics.inference.observe(now - self._started_at)
        if self._first_token_at is not None:
            metrics.decode.observe(now - self._first_token_at)
        metrics.request_output.observe(sum(self._outputs))
        metrics.longest_output.observe(max(self._outputs))

    def _end_open(self, reason: str) -> None:
        with self._ending:
            num_ended, self._num_open = self._num_open, 0
            if num_ended:
                self._outcome = reason
        self._metrics.ended[reason].inc(num_ended)


class WorkerMetrics:
    """One per worker. Owns its registry: two workers in one process do not share counts."""

    def __init__(
        self, engine: Engine, card: WorkerCard, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        families = _Families(self._registry, card.context_window_tokens)
        self._refusals = families.refusals
        self._of_model = {name: ModelMetrics(families, name) for name in card.fingerprints}
        self._base = self._of_model[card.model]
        self._cache = _CacheCollector(card.model)
        self._registry.register(_EngineCollector(engine, card))
        self._registry.register(_OldName(families.between_tokens, "vllm_time_per_output_token_seconds"))
        self._registry.register(self._cache)
        ProcessCollector(registry=self._registry)

    def observe(self, request: GenerateRequest, sink: EventSink) -> ObservedRequest:
        """The request has arrived; its events go to what this returns."""
        metrics = self._of_model.get(request.adapter or "", self._base)
        return ObservedRequest(metrics, request, sink, self._clock)

    def count_refusal(self, code: RefusalCode) -> None:
        self._refusals.labels(code).inc()

    def exposition(self, seen: CacheStatistics | None) -> bytes:
        """`seen` is what the cache tells now; None when it did not in time, and then it is as last seen."""
        if seen is not None:
            self._cache.seen = seen
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns one `WorkerStats` into metric families at each scrape."""

    def __init__(self, engine: Engine, card: WorkerCard) -> None:
        self._engine = engine
        self._card = card

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield from self._about()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"headstart_worker_{name}", text, getattr(stats, name))
        preemptions = CounterMetricFamily(
            "vllm_num_preemptions", "Sequences that gave their blocks to older ones.", labels=_LABELS
        )
        preemptions.add_metric([self._card.model, ENGINE], stats.preemptions)
        yield preemptions
        yield self._gauge("vllm_num_requests_running", "Texts being generated.", stats.sequences_running)
        yield self._gauge("vllm_num_requests_waiting", "Texts that wait.", stats.sequences_waiting)
        used = stats.blocks_held / stats.blocks_total
        yield self._gauge("vllm_kv_cache_usage_perc", "KV blocks that running texts hold; 1 is all.", used)
        blocks = GaugeMetricFamily("headstart_worker_blocks", "KV blocks, by state.", labels=["state"])
        for state in _BLOCK_STATES:
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        for name, text in _KV_BYTES.items():
            value = getattr(stats, f"kv_bytes_{name}")
            yield GaugeMetricFamily(f"headstart_worker_kv_bytes_{name}", text, value)

    def _about(self) -> Iterator[Metric]:
        card = self._card
        yield InfoMetricFamily(
            "headstart_worker",
            "The worker and its model.",
            {"model": card.model, "dtype": card.dtype, "device": card.device, "epoch": card.epoch},
        )
        about_cache = {
            "engine": ENGINE,
            "block_size": str(card.block_size),
            "num_gpu_blocks": str(card.num_blocks),
            "cache_dtype": card.dtype if card.kv_codec == "none" else card.kv_codec,
            "enable_prefix_caching": str(card.uncached_reason is None),
        }
        yield InfoMetricFamily("vllm_cache_config", "How keys and values are cached.", about_cache)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric([self._card.model, ENGINE], value)
        return family


class _CacheCollector(Collector):
    """What the cache told when it was last looked at."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.seen: CacheStatistics | None = None

    def collect(self) -> Iterator[Metric]:
        if (seen := self.seen) is None:
            return
        total = seen.total
        yield CounterMetricFamily(
            "headstart_worker_blocks_stored", "KV blocks that became findable.", total.stored_blocks
        )
        yield CounterMetricFamily(
            "headstart_worker_blocks_evicted", "KV blocks that left to make room.", total.evicted_blocks
        )
        yield CounterMetricFamily(
            "headstart_worker_blocks_wasted", "KV blocks that left without one read.", total.wasted_blocks
        )
        tiers = GaugeMetricFamily(
            "headstart_worker_resident_blocks", "Findable or held KV blocks, by tier.", labels=["tier"]
        )
        for tier, num_blocks in seen.resident_blocks_by_tier.items():
            tiers.add_metric([tier], num_blocks)
        yield tiers
        yield self._durations(
            "vllm_kv_block_reuse_gap_seconds", "Between two reads of a block.", seen.reuse_gap
        )
        yield self._durations(
            "vllm_kv_block_idle_before_evict_seconds",
            "From a block's last read to its eviction.",
            seen.idle_before_eviction,
        )

    def _durations(self, name: str, text: str, durations: DurationCounts) -> HistogramMetricFamily:
        # The last bucket has no end: what is in it took at least as long as the one before.
        bounds = [str(upper) for upper in durations.upper_seconds[:-1]] + ["+Inf"]
        buckets = list(zip(bounds, accumulate(durations.blocks), strict=True))
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        total_seconds = durations.mean_seconds * durations.total
        family.add_metric([self._model, ENGINE], buckets, total_seconds)
        return family

    def describe(self) -> Iterator[Metric]:
        return iter(())


class _OldName(Collector):
    """A histogram once more, under the name that older dashboards know."""

    def __init__(self, histogram: Histogram, name: str) -> None:
        self._histogram = histogram
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for family in self._histogram.collect():
            old = HistogramMetricFamily(self._name, f"{family.documentation} Its older name.")
            for sample in family.samples:
                renamed = sample.name.replace(family.name, self._name, 1)
                old.samples.append(sample._replace(name=renamed))
            yield old


def _milliseconds(seconds: float) -> float:
    return round(1_000 * seconds, 3)


def _powers_of_two(most: int) -> tuple[float, ...]:
    return tuple(2.0**exponent for exponent in range(most.bit_length()))
