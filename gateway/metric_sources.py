"""Parts that count by themselves, read when metrics are scraped: what is computed cannot drift.

Knows the parts' own figures and what each is called. Does not know Prometheus' text. Collectors run
on a thread of their own, so they only look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from billing.meter import Meter
from billing.sealer import Sealer
from gateway.roster import Worker

_METER_COUNTERS: Final = {
    "admitted": "Requests whose row was committed before they were begun.",
    "refused": "Admissions refused: the database is away, a budget or limit is full, no price.",
    "settled": "Requests that ended and are in the journal.",
    "posted": "Events posted to the ledger.",
    "adjusted": "Events that came after their request was swept, posted as adjustments.",
    "duplicates": "Events that the ledger had already.",
    "conflicts": "Events of a request that was posted before with another payload. For a person to look at.",
    "rejected": "Events that can never be posted. For a person to look at.",
    "swept": "Requests that nobody settled, settled by the sweep.",
    "torn_records": "Half-written records of a crash, dropped from the journal.",
    "database_failures": "Transactions that the database did not answer.",
    "journal_failures": "Records that the journal could not take.",
}


class WorkersSource(Collector):
    """What the gateway knows of its workers."""

    def __init__(self, workers: Callable[[], Iterable[Worker]]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        up = _gauge("headstart_worker_up", "1 when the worker answered its last poll.")
        draining = _gauge("headstart_worker_draining", "1 when the worker is given no new requests.")
        load = _gauge("headstart_worker_in_flight", "Requests on the worker, of this gateway.")
        for worker in self._workers():
            up.add_metric([worker.name], worker.away_because is None)
            draining.add_metric([worker.name], worker.is_draining)
            load.add_metric([worker.name], worker.in_flight)
        yield from (up, draining, load)

    def describe(self) -> Iterator[Metric]:
        return iter(())


class BillingSource(Collector):
    """The meter, its journal and the sealer of receipts."""

    def __init__(self, meter: Meter, sealer: Sealer) -> None:
        self._meter = meter
        self._sealer = sealer

    def collect(self) -> Iterator[Metric]:
        stats, backlog = self._meter.stats(), self._meter.backlog()
        for name, text in _METER_COUNTERS.items():
            yield CounterMetricFamily(f"headstart_meter_{name}", text, getattr(stats, name))
        yield GaugeMetricFamily(
            "headstart_meter_in_flight", "Requests admitted and not yet settled.", stats.in_flight
        )
        yield GaugeMetricFamily(
            "headstart_journal_events", "Events settled and not yet posted.", backlog.events
        )
        yield GaugeMetricFamily(
            "headstart_journal_oldest_event_seconds",
            "Age of the oldest event that is not yet posted; 0 when there is none.",
            backlog.oldest_us / 1e6,
        )
        yield GaugeMetricFamily(
            "headstart_journal_bytes", "Size of the journal on disk.", backlog.journal_bytes
        )
        receipts = self._sealer.stats()
        yield CounterMetricFamily("headstart_receipts_sealed", "Receipts issued.", receipts["sealed"])
        yield GaugeMetricFamily("headstart_receipts_due", "Receipts not issued yet.", receipts["due"])

    def describe(self) -> Iterator[Metric]:
        return iter(())


class AboutSource(Collector):
    """Which code runs."""

    def __init__(self, version: str) -> None:
        self._version = version

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headstart_gateway", "The gateway.", {"version": self._version})


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=["worker"])
