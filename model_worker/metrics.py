"""A worker's Prometheus metrics, read from the engine's last snapshot.

Names follow vLLM's where the meaning is the same, with our prefix.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from model_worker.engine import Engine
from model_worker.protocol import WorkerCard

_COUNTERS = {
    "prompt_tokens_computed": "Prompt tokens computed for the first time.",
    "prompt_tokens_cached": "Prompt tokens found in cache.",
    "tokens_recomputed": "Tokens computed again after a preemption.",
    "output_tokens": "Tokens generated.",
    "preemptions": "Sequences that gave their blocks to older ones.",
    "steps": "Forward passes.",
}
_KV_BYTES = {
    "held": "Memory of the KV blocks that running sequences hold; what several share counts once.",
    "per_conversation": "Memory of held KV blocks by running sequence.",
    "per_token": "Memory of one token's keys and values.",
}
_REQUEST_OUTCOMES = ("finished", "cancelled", "failed")
_BLOCK_STATES = ("free", "cached", "held")


class EngineCollector(Collector):
    """Turns one `WorkerStats` into metric families at each scrape."""

    def __init__(self, engine: Engine, card: WorkerCard) -> None:
        self._engine = engine
        self._card = card

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        card = self._card
        yield InfoMetricFamily(
            "headstart_worker",
            "The worker and its model.",
            {"model": card.model, "dtype": card.dtype, "device": card.device, "epoch": card.epoch},
        )
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"headstart_worker_{name}", text, getattr(stats, name))
        requests = CounterMetricFamily(
            "headstart_worker_requests", "Requests ended, by outcome.", labels=["outcome"]
        )
        for outcome in _REQUEST_OUTCOMES:
            requests.add_metric([outcome], getattr(stats, f"requests_{outcome}"))
        yield requests
        blocks = GaugeMetricFamily("headstart_worker_blocks", "KV blocks, by state.", labels=["state"])
        for state in _BLOCK_STATES:
            blocks.add_metric([state], getattr(stats, f"blocks_{state}"))
        yield blocks
        for name, text in _KV_BYTES.items():
            value = getattr(stats, f"kv_bytes_{name}")
            yield GaugeMetricFamily(f"headstart_worker_kv_bytes_{name}", text, value)
        sequences = GaugeMetricFamily("headstart_worker_sequences", "Sequences, by state.", labels=["state"])
        sequences.add_metric(["running"], stats.sequences_running)
        sequences.add_metric(["waiting"], stats.sequences_waiting)
        yield sequences
