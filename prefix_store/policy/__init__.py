"""Which run of blocks goes first when room is needed: the protocol and its implementations."""

from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy, RunFacts, RunKey

__all__ = ["EvictionPolicy", "LruPolicy", "RunFacts", "RunKey"]
