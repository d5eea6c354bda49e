"""What the gateway counts, for Prometheus.

Knows names, labels and buckets; owns its registry. Does not know where the numbers come from.

Labels hold no client text. Their values are the operator's (models, workers), this code's own (codes,
reasons, phases), or tenants, of which so many are told apart as `max_tenants` says and no more: see
`TenantLabels`. So the number of series is bounded. `docs/metrics.md` has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, get_args

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from billing.accounts import Principal
from billing.ids import TenantId
from billing.money import PICODOLLARS_PER_DOLLAR
from gateway.edge.canonical import UsageCounts
from gateway.phases import PHASES, Timing
from gateway.relay import CacheStatus

# A second series for every counter and histogram, which says when the process began; that is said once.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
OTHER: Final = "other"
"""The tenants that have no label of their own, together."""
Outcome = Literal["answered", "refused", "failed", "hung_up"]
"""How a request ended: with an answer, a 4xx, a 5xx or a broken answer, or nobody there to read it."""
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PHASE_SECONDS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
_LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was begun on a worker for a request; of one that was never begun there is none.

    `cache_status` and `cached_by_tier` are as frozen at admission, and missing before that.
    """

    model: str
    counts: UsageCounts
    cache_status: CacheStatus | None
    cached_by_tier: Mapping[str, int]
    miss_reason: str | None
    first_token_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """One request that is over. `status` is None where no answer was begun, and `refusal` is the code of
    the error that its client was told.
    """

    endpoint: str
    status: int | None
    outcome: Outcome
    seconds: float
    timings: Iterable[Timing]
    principal: Principal | None
    refusal: str | None
    generated: Generated | None


class TenantLabels:
    """Which tenants have a label of their own: the first `limit` that send a request, by name.

    All others are `other` until the process ends. No place is taken away and nobody is promoted, so no
    counter ever goes down or ends. Busy tenants come first, with hardly an exception, and how much
    `other` hides is in plain sight.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._labels: dict[TenantId, str] = {}

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, principal: Principal) -> str:
        known = self._labels.get(principal.tenant_id)
        if known is not None:
            return known
        if len(self._labels) >= self._limit:
            return OTHER
        # Names are unique, and one could be the word that stands for all others.
        name = principal.tenant_name
        label = self._labels[principal.tenant_id] = str(principal.tenant_id) if name == OTHER else name
        return label


class Metrics:
    """One per gateway: two gateways in one process do not share counts."""

    def __init__(self, *, max_tenants: int) -> None:
        self.registry = CollectorRegistry()
        self._tenants = TenantLabels(max_tenants)
        self._requests = self._counter(
            "headstart_requests", "Requests that ended, by how.", "endpoint", "outcome"
        )
        self._responses = self._counter(
            "headstart_responses", "Answers that were begun, by HTTP status.", "endpoint", "status"
        )
        self._refusals = self._counter(
            "headstart_refusals", "Requests that were told an error, by its code.", "endpoint", "code"
        )
        self._seconds = self._histogram(
            "headstart_request_seconds",
            "From the request's first byte to the answer's last.",
            _SECONDS,
            "endpoint",
        )
        self._in_flight = Gauge(
            "headstart_requests_in_flight", "Requests being worked on.", ["endpoint"], registry=self.registry
        )
        phases = self._histogram(
            "headstart_phase_seconds", "What each phase of a request took.", _PHASE_SECONDS, "phase"
        )
        self._phases = {phase: phases.labels(phase) for phase in PHASES}
        self._lookups = self._counter(
            "headstart_cache_lookups", "Prompts by what the cache held.", "model", "status"
        )
        self._misses = self._counter(
            "headstart_cache_misses", "Prompts that were not wholly cached, by why not.", "model", "reason"
        )
        self._tokens = self._counter("headstart_tokens", "Tokens by disjoint class.", "model", "class")
        self._cached_tokens = self._counter(
            "headstart_cached_tokens", "Prompt tokens found in cache, by tier.", "model", "tier"
        )
        self._first_token = self._histogram(
            "headstart_time_to_first_token_seconds",
            "From the request to its first token, by what the cache held.",
            _SECONDS,
            *("model", "cache"),
        )
        self._tenant_requests = self._counter(
            "headstart_tenant_requests", "Requests by tenant.", "tenant", "outcome"
        )
        self._tenant_tokens = self._counter(
            "headstart_tenant_tokens", "Tokens by tenant and disjoint class.", "tenant", "class"
        )
        self._tenants_named = Gauge(
            "headstart_tenants_named", "Tenants with a label of their own.", registry=self.registry
        )
        self._database_up = Gauge(
            "headstart_database_up", "1 when the database answered this scrape.", registry=self.registry
        )
        self._credits = self._counter("headstart_credits", "Broken promises that were credited.")
        self._credited = self._counter("headstart_credited_dollars", "What was credited for them.")
        self._loop_lag = Histogram(
            "headstart_event_loop_lag_seconds",
            "How much later than asked for the event loop woke a sleeper.",
            buckets=_LAG_SECONDS,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)
        self._show_tenant(OTHER)

    @contextmanager
    def in_flight(self, endpoint: str) -> Iterator[None]:
        """Counts one request while the block runs."""
        for outcome in OUTCOMES:
            self._requests.labels(endpoint, outcome)
        gauge = self._in_flight.labels(endpoint)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def count_request(self, facts: RequestFacts) -> None:
        """All that is counted of a request, once, when it is over."""
        self._requests.labels(facts.endpoint, facts.outcome).inc()
        if facts.status is not None:
            self._responses.labels(facts.endpoint, str(facts.status)).inc()
        self._seconds.labels(facts.endpoint).observe(facts.seconds)
        for timing in facts.timings:
            self._phases[timing.phase].observe(timing.seconds)
        if facts.refusal is not None:
            self._refusals.labels(facts.endpoint, facts.refusal).inc()
        if facts.generated is not None:
            self._count_generated(facts.generated)
        if facts.principal is not None:
            self._count_tenant(facts.principal, facts)

    def count_credit(self, amount_pusd: int) -> None:
        """Credits are negative amounts."""
        self._credits.inc()
        self._credited.inc(-amount_pusd / PICODOLLARS_PER_DOLLAR)

    def observe_loop_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def set_database_up(self, is_up: bool) -> None:
        self._database_up.set(is_up)

    def watch(self, source: Collector) -> None:
        """A part that is asked when metrics are scraped."""
        self.registry.register(source)

    def exposition(self) -> bytes:
        """Takes a while where there is much to tell: for a thread, not an event loop."""
        return generate_latest(self.registry)

    def _count_generated(self, generated: Generated) -> None:
        model = generated.model
        for name, quantity in _by_class(generated.counts):
            self._tokens.labels(model, name).inc(quantity)
        if generated.cache_status is None:
            return
        self._lookups.labels(model, generated.cache_status).inc()
        for tier, quantity in generated.cached_by_tier.items():
            self._cached_tokens.labels(model, tier).inc(quantity)
        if generated.miss_reason is not None:
            self._misses.labels(model, generated.miss_reason).inc()
        if generated.first_token_seconds is not None:
            self._first_token.labels(model, generated.cache_status).observe(generated.first_token_seconds)

    def _count_tenant(self, principal: Principal, facts: RequestFacts) -> None:
        num_named = len(self._tenants)
        tenant = self._tenants.label(principal)
        if len(self._tenants) > num_named:
            self._tenants_named.set(len(self._tenants))
            self._show_tenant(tenant)
        self._tenant_requests.labels(tenant, facts.outcome).inc()
        if facts.generated is not None:
            for name, quantity in _by_class(facts.generated.counts):
                self._tenant_tokens.labels(tenant, name).inc(quantity)

    def _show_tenant(self, tenant: str) -> None:
        """From 0 on: of a counter that begins with 1, the first one is never seen in a rate."""
        for outcome in OUTCOMES:
            self._tenant_requests.labels(tenant, outcome)
        for name, _ in _by_class(UsageCounts()):
            self._tenant_tokens.labels(tenant, name)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def _by_class(counts: UsageCounts) -> Iterator[tuple[str, int]]:
    """A class that only some models or dialects have begins with its first token."""
    yield "uncached", counts.uncached
    yield "read", counts.read
    yield "output", counts.output
    if counts.written:
        yield "written", counts.written
