"""A small store on a clock that stands still until it is told to go on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from prefix_store.blocks import BlockNamer, TokenIds
from prefix_store.leases import Lease
from prefix_store.policy.lru import LruPolicy
from prefix_store.store import PrefixStore

BLOCK = 4
SCOPE = "aa"
OTHER_SCOPE = "bb"


def make_namer(**changes: Any) -> BlockNamer:
    fields: dict[str, Any] = {
        "seed": 7,
        "model_fingerprint": "model",
        "dtype": "float32",
        "kv_codec": "raw",
        "block_size": BLOCK,
    }
    return BlockNamer(**(fields | changes))


def tokens(*ids: int) -> TokenIds:
    return array("I", ids)


def prompt(seed: int, length: int) -> TokenIds:
    """Different seeds differ in their first token already."""
    return array("I", [1000 * seed + position for position in range(length)])


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Bench:
    """A store, its clock, and the moves that tests repeat."""

    num_blocks: int = 16
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        if "quotas" not in self.options:
            self.options = {"policy": LruPolicy()} | self.options
        self.store = PrefixStore(
            num_blocks=self.num_blocks,
            block_size=BLOCK,
            namer=make_namer(),
            clock=self.clock,
            **self.options,
        )

    def acquire(self, ids: TokenIds, scope: str = SCOPE, limit: int | None = None) -> Lease:
        self.clock.wait(1.0)
        return self.store.acquire(scope, ids, max_cached_tokens=len(ids) if limit is None else limit)

    def serve(self, ids: TokenIds, scope: str = SCOPE, num_prompt: int | None = None) -> int:
        """One request from start to end; returns the tokens that were cached."""
        self.clock.wait(1.0)
        lease = self.store.acquire(scope, ids, max_cached_tokens=len(ids), num_prompt_tokens=num_prompt)
        cached = lease.cached_tokens
        self.store.extend(lease, len(ids))
        self.store.release(lease, ids, len(ids))
        self.store.check()
        return cached

    def cached(self, ids: TokenIds, scope: str = SCOPE) -> int:
        return self.store.match(scope, ids).num_tokens
