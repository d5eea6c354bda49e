"""The figures that others published of these traces come out of our replay.

Shares of block references found in one pool; exact without a limit, within .005
elsewhere. The whole table is `benchmarks/eviction.py`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from prefix_store.policy import DEFAULT_POLICY, POLICIES
from prefix_store.replay import BeladyPolicy, replay
from prefix_store.simulate import simulate
from prefix_store.text_tokens import load_encode
from prefix_store.traces import Trace, mix_in_scan, read_trace
from tests.llama_tokenizer import llama_tokenizer_path

TRACES = Path(__file__).resolve().parents[2] / "traces"
TOKENS_PER_GB = 8_200
SCAN_BLOCKS = 100


@cache
def mooncake(name: str) -> Trace:
    return read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz")


def rate(trace: Trace, policy: str, capacity: int | None) -> float:
    [outcome] = simulate(trace, [policy], [capacity])
    return outcome.hit_rate


@pytest.mark.parametrize(("name", "share"), [("conversation", 0.3664), ("synthetic", 0.6396)])
def test_without_a_limit_the_share_is_exact(name: str, share: float) -> None:
    assert round(rate(mooncake(name), "lru", None), 4) == share


@pytest.mark.parametrize(
    ("policy", "capacity", "share"),
    [
        ("lru", 10_000, 0.4239),
        ("lru", 3_000, 0.1906),
        ("fifo", 5_859, 0.3010),
        ("lfu", 5_859, 0.2428),
        ("belady", 5_859, 0.5500),
    ],
)
def test_the_published_shares_of_the_synthetic_trace(policy: str, capacity: int, share: float) -> None:
    assert rate(mooncake("synthetic"), policy, capacity) == pytest.approx(share, abs=0.005)


def test_the_published_share_of_the_conversation_trace() -> None:
    assert rate(mooncake("conversation"), "lru", 5_859) == pytest.approx(0.1361, abs=0.005)


@pytest.mark.parametrize(
    ("session", "gigabytes", "share"),
    [
        ("miniswe-063925220f0d", 0.4, 0.201),
        ("miniswe-063925220f0d", 1.0, 0.920),
        ("magagent-46e404f0f6d0", 2.0, 0.515),
    ],
)
def test_the_published_shares_of_agent_sessions(session: str, gigabytes: float, share: float) -> None:
    trace = read_trace(TRACES / f"{session}.jsonl.gz", encode=load_encode(llama_tokenizer_path()))
    assert rate(trace, "request-lru", round(gigabytes * TOKENS_PER_GB)) == pytest.approx(share, abs=0.005)


def test_the_default_policy_finds_more_than_every_plain_one() -> None:
    trace, capacity = mooncake("synthetic"), 5_859
    ours = replay(trace.requests, DEFAULT_POLICY(), capacity=capacity).hit_rate
    plain = {
        name: replay(trace.requests, POLICIES[name](), capacity=capacity).hit_rate
        for name in ("lru", "lfu", "s3-fifo", "w-tinylfu", "gdsf")
    }
    assert ours >= 1.03 * max(plain.values()), plain
    assert ours <= replay(trace.requests, BeladyPolicy(trace.requests), capacity=capacity).hit_rate


def test_the_default_policy_withstands_requests_that_come_once() -> None:
    trace = mooncake("synthetic")
    mixed, originals = mix_in_scan(trace, blocks_per_request=SCAN_BLOCKS, seed=1)
    kept = {}
    for name, policy in (("default", DEFAULT_POLICY()), ("lru", POLICIES["lru"]())):
        undisturbed = sum(replay(trace.requests, POLICIES["lru"](), capacity=10_000).hits)
        hits = replay(mixed.requests, policy, capacity=10_000).hits
        found = sum(number for number, is_original in zip(hits, originals, strict=True) if is_original)
        kept[name] = found / undisturbed
    assert kept["default"] >= 0.9
    assert kept["lru"] < 0.8, "a scan that does not hurt LRU proves nothing"
