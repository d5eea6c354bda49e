"""What the gateway counts, for Prometheus.

Knows names, labels and buckets; owns its registry. Does not know where the
numbers come from. Labels hold no tenant and no client text, so their number
is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from gateway.edge.canonical import UsageCounts
from gateway.roster import Worker

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One per gateway: two gateways in one process do not share counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "headstart_requests",
            "Requests answered or abandoned.",
            ["endpoint", "status", "outcome"],
            registry=self.registry,
        )
        self.cache = Counter(
            "headstart_cache_lookups", "Prompts by what the cache held.", ["status"], registry=self.registry
        )
        self.tokens = Counter(
            "headstart_tokens", "Tokens by disjoint class.", ["class"], registry=self.registry
        )
        self.request_seconds = Histogram(
            "headstart_request_seconds",
            "From the request's first byte to the answer's last.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "headstart_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "headstart_requests_in_flight", "Requests being worked on.", ["endpoint"], registry=self.registry
        )

    @contextmanager
    def in_flight(self, endpoint: str) -> Iterator[None]:
        """Counts one request while the block runs."""
        gauge = self._in_flight.labels(endpoint)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def count_tokens(self, counts: UsageCounts) -> None:
        by_class = {
            "uncached": counts.uncached,
            "read": counts.read,
            "written": counts.written,
            "output": counts.output,
        }
        for name, quantity in by_class.items():
            self.tokens.labels(name).inc(quantity)

    def watch_workers(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self.registry.register(_WorkersCollector(workers))

    def watch(self, owner: str, stats: Callable[[], Mapping[str, int]]) -> None:
        """What a part counts by itself, as `headstart_OWNER_NAME`."""
        self.registry.register(_StatsCollector(owner, stats))

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _WorkersCollector(Collector):
    """Read when scraped: a gauge that is computed cannot drift."""

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "headstart_worker_up", "1 when the worker answered its last poll.", labels=["worker"]
        )
        load = GaugeMetricFamily("headstart_worker_in_flight", "Requests on the worker.", labels=["worker"])
        for worker in self._workers():
            up.add_metric([worker.name], 1.0 if worker.away_because is None else 0.0)
            load.add_metric([worker.name], worker.in_flight)
        yield up
        yield load

    def describe(self) -> Iterator[Metric]:
        return iter(())


class _StatsCollector(Collector):
    def __init__(self, owner: str, stats: Callable[[], Mapping[str, int]]) -> None:
        self._owner = owner
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, value in self._stats().items():
            yield GaugeMetricFamily(
                f"headstart_{self._owner}_{name}", f"The {self._owner}'s count of {name}.", value=value
            )

    def describe(self) -> Iterator[Metric]:
        return iter(())
