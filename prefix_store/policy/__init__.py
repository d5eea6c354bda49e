"""Which run of blocks goes first when room is needed: the protocol and its implementations."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from prefix_store.policy.counted import GdsfPolicy, LfuPolicy
from prefix_store.policy.hazard import HazardPolicy
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy, RunFacts, RunKey
from prefix_store.policy.s3fifo import S3FifoPolicy
from prefix_store.policy.tinylfu import WTinyLfuPolicy

DEFAULT_POLICY: Callable[[], EvictionPolicy] = HazardPolicy
"""The one that does best on the traces of `benchmarks/eviction.py`."""

ATTENTION_DEPTH_COST = 0.02
"""Of a block of 512 tokens, for each such block before it, in a model of about eight billion parameters."""

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "hazard": HazardPolicy,
        "lru": LruPolicy,
        "lfu": LfuPolicy,
        "s3-fifo": S3FifoPolicy,
        "w-tinylfu": WTinyLfuPolicy,
        "gdsf": GdsfPolicy,
        "gdsf-cost": lambda: GdsfPolicy(depth_cost=ATTENTION_DEPTH_COST),
    }
)
"""By the names that `headstart simulate` knows."""

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "EvictionPolicy",
    "GdsfPolicy",
    "HazardPolicy",
    "LfuPolicy",
    "LruPolicy",
    "RunFacts",
    "RunKey",
    "S3FifoPolicy",
    "WTinyLfuPolicy",
]
