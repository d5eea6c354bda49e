"""Traffic of every kind over a pool that is too small: nothing fails, nobody waits for ever, nothing leaks.

Half an hour of the same: `make bench-churn`.
"""

from __future__ import annotations

from model_worker.models import LoadedModel
from tests.churn import BLOCK_SIZE, POOL_BLOCKS, Churn
from tests.engines import running_engine


def test_a_thousand_mixed_requests_with_hang_ups_leave_nothing_behind(tiny_model: LoadedModel) -> None:
    with running_engine(
        tiny_model, kv_cache_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, step_tokens=64
    ) as driver:
        churn = Churn(driver, seed=1)
        for _ in range(4):
            churn.send(250)
            stats = churn.lull()
    assert churn.num_sent == 1000
    assert churn.num_hung_up > 100, "no claim about hang-ups without any"
    assert churn.cached_tokens > 20_000, "no claim about reuse without hits"
    assert stats.preemptions > 20, "no claim about a small pool without pressure"
