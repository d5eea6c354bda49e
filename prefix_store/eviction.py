"""Which run goes next: scopes first, then the kind of tokens, then the policy.

Knows runs, their scopes and their kinds. Does not know why room is needed, nor
how a policy ranks runs.

Two rules stand above any policy. Tokens that were generated and that no prompt
has brought back go before prompts. And with quotas a scope that takes more
than its fair share evicts its own runs, so that none can flush the others: all
that a tenant has, with whatever adapter, counts as one scope here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from prefix_store.blocks import NAME_BYTES, TokenKind, without_adapter
from prefix_store.node import Node
from prefix_store.policy.hazard import learning_together
from prefix_store.policy.lru import LruPolicy
from prefix_store.policy.protocol import EvictionPolicy, RunFacts

GENERATED_AGES_FASTER = 4.0
"""A generated run goes before a prompt that has been idle up to this many times longer.

Not infinity: the last answer of a live conversation comes back with its next
turn, and is worth more than the prompt of one that ended long ago.
"""

_SLACK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeQuotas:
    """Fair shares of the pool, by weight, among the scopes that have blocks in the index.

    `max_share` caps what one scope may keep cached after its requests have ended.
    """

    make_policy: Callable[[], EvictionPolicy] = field(default_factory=learning_together)
    weights: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    max_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.max_share <= 1.0:
            raise ValueError("max_share must be in (0, 1]")
        if any(weight <= 0.0 for weight in self.weights.values()):
            raise ValueError("a scope's weight must be positive")

    def weight(self, scope: str) -> float:
        return self.weights.get(scope, 1.0)


class _Group:
    """Runs that compete with one another."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.prompts = policy
        self.generated: EvictionPolicy = LruPolicy()

    def victim(self, now: float) -> Node | None:
        prompt = self.prompts.victim(now)
        generated = self.generated.victim(now)
        assert prompt is None or isinstance(prompt, Node)
        assert generated is None or isinstance(generated, Node)
        if prompt is None or generated is None:
            return prompt or generated
        idle_for = (now - generated.last_used) * GENERATED_AGES_FASTER
        return generated if idle_for >= now - prompt.last_used else prompt


class EvictionOrder:
    """Keeps every run with the policy that ranks it, and picks whose run goes next."""

    def __init__(self, *, policy: EvictionPolicy, quotas: ScopeQuotas | None, num_blocks: int) -> None:
        self._common = None if quotas else _Group(policy)
        self._quotas = quotas or ScopeQuotas()
        self._num_blocks = num_blocks
        self._groups: dict[str, _Group] = {}
        self._resident: dict[str, int] = {}
        self._weight_total = 0.0
        self._largest: list[tuple[float, str]] = []

    # ---- keeping the policies' books

    def insert(self, node: Node, now: float) -> None:
        self._count(node.scope, len(node.blocks))
        self._policy_of(node).insert(node, _facts(node), now)

    def hit(self, node: Node, now: float) -> None:
        """A prompt brought this run back. A generated one is a prompt from now on."""
        policy = self._policy_of(node)
        if node.kind is TokenKind.GENERATED:
            policy.remove(node)
            node.kind = TokenKind.USER
            policy = self._policy_of(node)
            policy.insert(node, _facts(node), now)
        policy.hit(node, now)

    def grow(self, node: Node, num_added: int) -> None:
        self._count(node.scope, num_added)
        self._policy_of(node).resize(node, len(node.blocks))

    def split(self, node: Node, upper: Node) -> None:
        self._policy_of(node).split(node, upper, len(upper.blocks))

    def merge(self, upper: Node, node: Node) -> None:
        self._policy_of(node).merge(upper, node)

    def expose(self, node: Node) -> None:
        self._policy_of(node).expose(node, node.last_used)

    def cover(self, node: Node) -> None:
        self._policy_of(node).cover(node)

    def evict(self, node: Node, keep: int, now: float) -> None:
        """All but the first `keep` blocks of a run are going."""
        num_gone = len(node.blocks) - keep
        name = node.names[keep * NAME_BYTES : (keep + 1) * NAME_BYTES]
        policy = self._policy_of(node)
        policy.evict(node, name, num_gone, now)
        if not keep:
            policy.remove(node)
        self._count(node.scope, -num_gone)

    def remove(self, node: Node) -> None:
        """A run goes for another reason than need of room."""
        self._policy_of(node).remove(node)
        self._count(node.scope, -len(node.blocks))

    # ---- choosing

    def victim(self, scope: str, now: float) -> Node | None:
        """The run that makes room for `scope`."""
        if self._common is not None:
            return self._common.victim(now)
        scope = without_adapter(scope)
        own = self._groups.get(scope)
        if own is not None and self._share_taken(scope) >= 1.0:
            node = own.victim(now)
            if node is not None:
                return node
        return self._victim_of_largest(now)

    def num_over_cap(self, scope: str) -> int:
        """By how many blocks the scope is over what it may keep; 0 or less when it is not."""
        if self._common is not None:
            return 0
        return self._resident.get(without_adapter(scope), 0) - int(self._quotas.max_share * self._num_blocks)

    def own_victim(self, scope: str, now: float) -> Node | None:
        """A run of `scope` itself, for its cap's sake."""
        group = self._groups.get(without_adapter(scope))
        return None if group is None else group.victim(now)

    def _share_taken(self, scope: str) -> float:
        """Blocks of a scope, as a multiple of its fair share of the pool."""
        fair = self._num_blocks * self._quotas.weight(scope) / self._weight_total
        return self._resident[scope] / fair

    def _victim_of_largest(self, now: float) -> Node | None:
        """From the scope that is the furthest over its share, of those that have something to give.

        The heap holds, for each scope, an entry that is at least its size by weight:
        one that has shrunk since is put back where it belongs when it is met.
        """
        passed: list[tuple[float, str]] = []
        seen: set[str] = set()
        node: Node | None = None
        heap = self._largest
        while heap and node is None:
            entry = heappop(heap)
            scope = entry[1]
            size = self._resident.get(scope, 0) / self._quotas.weight(scope)
            if scope in seen or not size:
                continue
            if -entry[0] != size:
                heappush(heap, (-size, scope))
                continue
            seen.add(scope)
            passed.append(entry)
            node = self._groups[scope].victim(now)
        for entry in passed:
            heappush(heap, entry)
        return node

    # ---- books of our own

    def _policy_of(self, node: Node) -> EvictionPolicy:
        group = self._common or self._groups[without_adapter(node.scope)]
        return group.generated if node.kind is TokenKind.GENERATED else group.prompts

    def _count(self, scope: str, num_blocks: int) -> None:
        if self._common is not None:
            return
        scope = without_adapter(scope)
        before = self._resident.get(scope, 0)
        after = before + num_blocks
        weight = self._quotas.weight(scope)
        if before == 0:
            self._weight_total += weight
            self._groups[scope] = _Group(self._quotas.make_policy())
        if after == 0:
            self._weight_total -= weight
            del self._groups[scope]
            del self._resident[scope]
            return
        self._resident[scope] = after
        if num_blocks > 0:
            self._push_size(scope, after / weight)

    def _push_size(self, scope: str, size: float) -> None:
        heappush(self._largest, (-size, scope))
        if len(self._largest) > 2 * len(self._resident) + _SLACK:
            self._largest = [
                (-count / self._quotas.weight(one), one) for one, count in self._resident.items()
            ]
            heapify(self._largest)


def _facts(node: Node) -> RunFacts:
    return RunFacts(
        name=node.names[:NAME_BYTES], num_blocks=len(node.blocks), depth=node.depth, kind=node.kind
    )
