"""One edge of the radix index, and the order of a node's children.

Knows a run of blocks and its neighbours. Does not know how to search, who may
evict or why: the index and the eviction order read and write these fields.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prefix_store.blocks import NAME_BYTES, BlockIds, BlockName, TokenKind

if TYPE_CHECKING:
    from prefix_store.pins import Pin

FEW_CHILDREN = 4
"""Up to here a search for the nearest child looks at all of them."""

_BUCKET_KEYS = 512

_NOBODY: dict[bytes, Node] = {}
"""Shared by all nodes without children, and never written to."""

_NO_GATES: dict[str, Node] = {}


class Node:
    """A run of blocks; or an entry, which has none: the root of a scope, or its gate behind a public prefix.

    An entry's name is what the names of the scope's own blocks continue from. A
    tail is a run of one incomplete block, without a name.

    `hits` counts the prompts that found all of it, `holders` the leases that end here
    or below, `pins` the pins. A run is exposed, and may be evicted, while nobody holds
    or pins it and nothing follows.
    """

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "exposed",
        "gates",
        "hits",
        "holders",
        "kind",
        "lapsed",
        "last_used",
        "names",
        "order",
        "parent",
        "pins",
        "pins_ending_here",
        "scope",
        "tokens",
    )

    def __init__(
        self,
        *,
        parent: Node | None,
        scope: str,
        tokens: bytes,
        names: bytes,
        blocks: BlockIds,
        depth: int,
        kind: TokenKind,
        now: float,
    ) -> None:
        self.parent = parent
        self.scope = scope
        self.tokens = tokens
        self.names = names
        self.blocks = blocks
        self.depth = depth
        self.kind = kind
        self.last_used = now
        self.children = _NOBODY
        self.gates = _NO_GATES
        self.order: KeyOrder | None = None
        self.hits = 0
        self.holders = 0
        self.pins = 0
        self.pins_ending_here: tuple[Pin, ...] = ()
        self.exposed = False
        self.lapsed = False

    @property
    def is_entry(self) -> bool:
        return not self.blocks

    @property
    def is_tail(self) -> bool:
        return not self.names

    @property
    def is_followed(self) -> bool:
        return bool(self.children or self.gates)

    @property
    def last_name(self) -> BlockName:
        return self.names[-NAME_BYTES:]

    def add_child(self, key: bytes, child: Node) -> None:
        """`key` is the first block of the child, or all of a tail."""
        if not self.children:
            self.children = {}
        self.children[key] = child
        if self.order is not None:
            self.order.add(key)
        elif len(self.children) > FEW_CHILDREN:
            self.order = KeyOrder(self.children)

    def remove_child(self, key: bytes) -> None:
        del self.children[key]
        if self.order is not None:
            self.order.remove(key)
        if not self.children:
            self.children = _NOBODY
            self.order = None

    def add_gate(self, scope: str, gate: Node) -> None:
        if not self.gates:
            self.gates = {}
        self.gates[scope] = gate

    def remove_gate(self, scope: str) -> None:
        del self.gates[scope]
        if not self.gates:
            self.gates = _NO_GATES

    def keys_near(self, key: bytes) -> Iterable[bytes]:
        """Keys of children, among them the one before `key` in byte order and the first not before it.

        One of these two shares the longest prefix with `key`.
        """
        return self.children if self.order is None else self.order.near(key)


class KeyOrder:
    """Many keys in byte order: sorted buckets of bounded size, so that a change moves few of them."""

    __slots__ = ("_buckets", "_firsts")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._buckets: list[list[bytes]] = [sorted(keys)]
        self._firsts: list[bytes] = [self._buckets[0][0]]

    def _bucket_of(self, key: bytes) -> int:
        """The last bucket that begins at or before `key`; the first one when none does."""
        at = bisect_left(self._firsts, key)
        return at if at < len(self._firsts) and self._firsts[at] == key else max(at - 1, 0)

    def add(self, key: bytes) -> None:
        at = self._bucket_of(key)
        bucket = self._buckets[at]
        insort(bucket, key)
        self._firsts[at] = bucket[0]
        if len(bucket) > _BUCKET_KEYS:
            upper = bucket[_BUCKET_KEYS // 2 :]
            del bucket[_BUCKET_KEYS // 2 :]
            self._buckets.insert(at + 1, upper)
            self._firsts.insert(at + 1, upper[0])

    def remove(self, key: bytes) -> None:
        at = self._bucket_of(key)
        bucket = self._buckets[at]
        del bucket[bisect_left(bucket, key)]
        if bucket:
            self._firsts[at] = bucket[0]
        elif len(self._buckets) > 1:
            del self._buckets[at]
            del self._firsts[at]

    def near(self, key: bytes) -> list[bytes]:
        """The key before `key` and the first one not before it, as far as they exist."""
        at = self._bucket_of(key)
        bucket = self._buckets[at]
        place = bisect_left(bucket, key)
        near = bucket[max(place - 1, 0) : place + 1]
        if place == 0 and at > 0:
            near.insert(0, self._buckets[at - 1][-1])
        if place == len(bucket) and at + 1 < len(self._buckets):
            near.append(self._firsts[at + 1])
        return near

    def in_order(self) -> list[bytes]:
        """For checks: O(n)."""
        return [key for bucket in self._buckets for key in bucket]
