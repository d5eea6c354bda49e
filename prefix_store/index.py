"""Which prefixes are cached, as a radix tree over blocks of tokens.

Knows token bytes, names and block ids, who holds which path, and what may be
evicted. Does not know the pool's free blocks, leases or tenants: callers pass
ids in and get ids back.

A node is a run of blocks on one edge. Tokens come first: children are found by
the bytes of their first block and runs are compared in bulk, so a match never
trusts a name and hashes nothing. A *tail* is a leaf of one incomplete block,
nameless, left by a sequence that ended there; it is found token by token and
never followed by anything.

A node is held while a lease ends at it or below; `holders` counts those leases.
A node that nobody holds and nothing follows is exposed: eviction takes blocks
from its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from prefix_store.blocks import NAME_BYTES, TOKEN_BYTES, BlockId, BlockName, BlockNamer, TokenKind
from prefix_store.policy.protocol import EvictionPolicy, RunFacts
from prefix_store.pool import BlockPool


class Node:
    """A run of blocks, or the root of a scope, which has none and carries the root's name."""

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "exposed",
        "holders",
        "keys",
        "kind",
        "last_used",
        "names",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        *,
        parent: Node | None,
        tokens: bytes,
        names: bytes,
        blocks: list[BlockId],
        depth: int,
        kind: TokenKind,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.names = names
        self.blocks = blocks
        self.depth = depth
        self.kind = kind
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []
        self.holders = 0
        self.exposed = False
        self.last_used = 0.0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_tail(self) -> bool:
        return not self.names

    @property
    def last_name(self) -> BlockName:
        return self.names[-NAME_BYTES:]


@dataclass(slots=True, kw_only=True)
class IndexMatch:
    """How far a prompt is in the tree. Valid until the next change of the index.

    `path` are the nodes matched whole, root first. `inside` is the next run, of which
    `num_inside` blocks match. After these, `tail_rows` tokens equal the first ones
    of block `tail_block`, of node `tail_node`.
    """

    path: list[Node]
    num_bytes: int
    inside: Node | None = None
    num_inside: int = 0
    tail_node: Node | None = None
    tail_block: BlockId | None = None
    tail_rows: int = 0


class RadixIndex:
    """One tree for each scope. Moves blocks between held and cached in the pool as holders come and go."""

    def __init__(self, *, namer: BlockNamer, pool: BlockPool, policy: EvictionPolicy) -> None:
        self._namer = namer
        self._pool = pool
        self._policy = policy
        self._block_bytes = namer.block_size * TOKEN_BYTES
        self._roots: dict[str, Node] = {}
        self._scope_of_root: dict[Node, str] = {}

    # ---- looks

    def match(self, scope: str, data: bytes, limit_bytes: int) -> IndexMatch | None:
        """The longest cached prefix of the first `limit_bytes` of `data`; None when the scope has nothing."""
        root = self._roots.get(scope)
        return None if root is None else self.match_below(root, data, 0, limit_bytes)

    def match_below(self, start: Node, data: bytes, position: int, limit_bytes: int) -> IndexMatch:
        """Continues a match from the end of `start`, which is at `position` of `data`."""
        node, path = start, [start]
        block_bytes = self._block_bytes
        while position + block_bytes <= limit_bytes:
            child = node.children.get(data[position : position + block_bytes])
            if child is None:
                break
            run = child.tokens
            if position + len(run) > limit_bytes or not data.startswith(run, position):
                return self._match_inside(child, path, data, position, limit_bytes)
            node = child
            path.append(node)
            position += len(run)
        match = IndexMatch(path=path, num_bytes=position)
        if node.children and position < limit_bytes:
            self._match_tail(match, node, data[position : min(position + block_bytes, limit_bytes)])
        return match

    def _match_inside(
        self, child: Node, path: list[Node], data: bytes, position: int, limit_bytes: int
    ) -> IndexMatch:
        """The prompt shares the first block of `child` and leaves it before its end."""
        common = _common_prefix(child.tokens, data[position : min(position + len(child.tokens), limit_bytes)])
        num_inside, tail_bytes = divmod(common, self._block_bytes)
        match = IndexMatch(
            path=path,
            num_bytes=position + num_inside * self._block_bytes,
            inside=child,
            num_inside=num_inside,
        )
        if tail_bytes >= TOKEN_BYTES:
            match.tail_node = child
            match.tail_block = child.blocks[num_inside]
            match.tail_rows = tail_bytes // TOKEN_BYTES
        return match

    def _match_tail(self, match: IndexMatch, node: Node, rest: bytes) -> None:
        """The child whose first block shares the most tokens with `rest`: a neighbour in byte order."""
        keys = node.keys
        at = bisect_left(keys, rest)
        for key in keys[max(at - 1, 0) : at + 1]:
            rows = _common_prefix_short(key, rest) // TOKEN_BYTES
            if rows > match.tail_rows:
                child = node.children[key]
                match.tail_node, match.tail_block, match.tail_rows = child, child.blocks[0], rows

    def nodes(self) -> Iterator[Node]:
        """Every node, roots included, parents first."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    # ---- holding

    def hold(self, match: IndexMatch, now: float) -> Node:
        """A lease ends where the match ends: its path is held. Returns the last node of the path."""
        node = match.path[-1]
        if match.inside is not None and match.num_inside:
            node = self._split(match.inside, match.num_inside)
            match.path.append(node)
            match.inside = None
        for step in match.path:
            self._hold_node(step, now)
            if step.blocks:
                self._policy.hit(step, now)
        return node

    def open_scope(self, scope: str, now: float) -> Node:
        """The root of a scope, held once more."""
        root = self._roots.get(scope)
        if root is None:
            name = self._namer.root(scope)
            root = Node(parent=None, tokens=b"", names=name, blocks=[], depth=0, kind=TokenKind.SYSTEM)
            self._roots[scope] = root
            self._scope_of_root[root] = scope
        self._hold_node(root, now)
        return root

    def hold_node(self, node: Node, now: float) -> None:
        """One more holder of this node alone, whose ancestors are held by the caller already."""
        self._hold_node(node, now)

    def _hold_node(self, node: Node, now: float) -> None:
        node.holders += 1
        node.last_used = now
        if node.holders == 1 and node.blocks:
            self._pool.unpark(len(node.blocks))
            if node.exposed:
                self._cover(node)

    def let_go(self, node: Node, now: float) -> None:
        """A lease that ended at `node` ends. Blocks that nobody holds any more become cached."""
        step: Node | None = node
        while step is not None:
            parent = step.parent
            step.holders -= 1
            step.last_used = now
            assert step.holders >= 0, "more holders let go than held"
            if step.holders == 0:
                if step.blocks:
                    self._pool.park(len(step.blocks))
                self._settle(step)
            step = parent

    def touch(self, node: Node, now: float) -> None:
        """This node was of use just now, without being held."""
        self._hold_node(node, now)
        self.let_go_node(node)

    def let_go_node(self, node: Node) -> None:
        """Undoes `hold_node`."""
        node.holders -= 1
        if node.holders == 0:
            if node.blocks:
                self._pool.park(len(node.blocks))
            self._settle(node)

    def path_of(self, node: Node) -> list[Node]:
        """From `node` up to its root."""
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path

    # ---- growing

    def grow(
        self,
        node: Node,
        data: bytes,
        start: int,
        end: int,
        blocks: list[BlockId],
        kind: TokenKind,
        now: float,
    ) -> tuple[Node, list[BlockId]]:
        """Indexes the full blocks of `data[start:end]`, written in `blocks`, below `node`, for its holder.

        Returns the node where they end, held by the caller in place of `node`, and the
        blocks that stand for them: those found already are taken from the index, and
        the caller's duplicates are no longer needed.
        """
        match = self.match_below(node, data, start, end)
        found: list[BlockId] = []
        for step in match.path[1:]:
            self._hold_node(step, now)
            found.extend(step.blocks)
        last = match.path[-1]
        if match.inside is not None and match.num_inside:
            last = self._split(match.inside, match.num_inside)
            self._hold_node(last, now)
            found.extend(last.blocks)
        if match.num_bytes < end:
            fresh = blocks[len(found) :]
            last = self._append(last, data[match.num_bytes : end], fresh, kind, now)
            found.extend(fresh)
        return last, found

    def _append(self, node: Node, tokens: bytes, blocks: list[BlockId], kind: TokenKind, now: float) -> Node:
        """New blocks after `node`, held once by the caller."""
        names = b"".join(self._namer.chain_bytes(node.last_name, tokens))
        if node.blocks and node.holders == 1 and not node.children and node.kind is kind:
            node.tokens += tokens
            node.names += names
            node.blocks = node.blocks + blocks
            node.last_used = now
            self._policy.resize(node, len(node.blocks))
            return node
        child = self._insert(node, tokens, names, blocks, kind, now)
        child.holders = 1
        return child

    def add_tail(
        self, node: Node, tokens: bytes, block: BlockId, kind: TokenKind, now: float
    ) -> BlockId | None:
        """Indexes an incomplete block after `node`, held by nobody.

        Returns the block when it is not needed, because one that says as much is there already.
        """
        at = bisect_left(node.keys, tokens)
        if at < len(node.keys) and node.keys[at].startswith(tokens):
            self.touch(node.children[node.keys[at]], now)
            return block
        tail = self._insert(node, tokens, b"", [block], kind, now)
        self._pool.park(1)
        self._settle(tail)
        return None

    def _insert(
        self, parent: Node, tokens: bytes, names: bytes, blocks: list[BlockId], kind: TokenKind, now: float
    ) -> Node:
        key = tokens[: self._block_bytes]
        self._supersede_tail(parent, key)
        depth = parent.depth + len(parent.blocks)
        node = Node(parent=parent, tokens=tokens, names=names, blocks=blocks, depth=depth, kind=kind)
        node.last_used = now
        if parent.exposed:
            self._cover(parent)
        parent.children[key] = node
        parent.keys.insert(bisect_left(parent.keys, key), key)
        facts = RunFacts(name=names[:NAME_BYTES], num_blocks=len(blocks), depth=depth, kind=kind)
        self._policy.insert(node, facts, now)
        return node

    def _supersede_tail(self, parent: Node, key: bytes) -> None:
        """Drops the tail that `key` begins with: whatever it says, the newcomer says too.

        Only the key before `key` in byte order can be one, since no tail begins its siblings.
        """
        at = bisect_left(parent.keys, key)
        if at and key.startswith(parent.keys[at - 1]):
            tail = parent.children[parent.keys[at - 1]]
            self._pool.unpark(1)
            self._pool.give_back(tail.blocks)
            self._drop(tail)

    # ---- shrinking

    def evict(self, num_blocks: int, now: float) -> list[BlockId]:
        """One step of the policy: up to `num_blocks` blocks, now held by the caller, from the end of one run.

        Empty when nothing is exposed.
        """
        node = self._policy.victim(now)
        if node is None:
            return []
        assert isinstance(node, Node)
        assert node.exposed, "the policy chose a run that may not go"
        keep = max(len(node.blocks) - num_blocks, 0)
        evicted = node.blocks[keep:]
        self._policy.evict(node, node.names[keep * NAME_BYTES :][:NAME_BYTES], len(evicted), now)
        self._pool.unpark(len(evicted))
        if keep:
            node.blocks = node.blocks[:keep]
            node.names = node.names[: keep * NAME_BYTES]
            node.tokens = node.tokens[: keep * self._block_bytes]
        else:
            parent = node.parent
            self._drop(node)
            assert parent is not None
            self._settle(parent)
        evicted.reverse()
        return evicted

    def clear(self) -> list[BlockId]:
        """Forgets every block that nobody holds; returns them, held by the caller."""
        now_free: list[BlockId] = []
        for node in reversed(list(self.nodes())):
            if node.holders or node.is_root:
                continue
            self._pool.unpark(len(node.blocks))
            now_free.extend(node.blocks)
            self._drop(node)
        for root in list(self._roots.values()):
            self._settle(root)
        return now_free

    def _drop(self, node: Node) -> None:
        """Takes a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children, "something follows this run"
        key = node.tokens[: self._block_bytes]
        del parent.children[key]
        del parent.keys[bisect_left(parent.keys, key)]
        self._policy.remove(node)

    def _split(self, node: Node, num_upper: int) -> Node:
        """Cuts a run in two. `node` stays the lower part, so that leases that end at it still do."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_upper < len(node.blocks), (num_upper, len(node.blocks))
        cut = num_upper * self._block_bytes
        upper = Node(
            parent=parent,
            tokens=node.tokens[:cut],
            names=node.names[: num_upper * NAME_BYTES],
            blocks=node.blocks[:num_upper],
            depth=node.depth,
            kind=node.kind,
        )
        upper.holders = node.holders
        upper.last_used = node.last_used
        parent.children[node.tokens[: self._block_bytes]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:]
        node.names = node.names[num_upper * NAME_BYTES :]
        node.blocks = node.blocks[num_upper:]
        node.depth += num_upper
        key = node.tokens[: self._block_bytes]
        upper.children[key] = node
        upper.keys.append(key)
        self._policy.split(node, upper, num_upper)
        return upper

    # ---- exposure

    def _settle(self, node: Node) -> None:
        """After a holder or a follower went: exposes the node, or drops an empty root."""
        if node.holders or node.children:
            return
        if node.parent is None:
            scope = self._scope_of_root.pop(node)
            del self._roots[scope]
        elif not node.exposed:
            node.exposed = True
            self._policy.expose(node, node.last_used)

    def _cover(self, node: Node) -> None:
        node.exposed = False
        self._policy.cover(node)

    # ---- invariants

    def check(self) -> None:
        """Asserts what must hold between calls. O(blocks)."""
        cached = 0
        for node in self.nodes():
            self._check_node(node)
            if node.holders == 0:
                cached += len(node.blocks)
        assert cached == self._pool.num_cached, (cached, self._pool.num_cached)

    def _check_node(self, node: Node) -> None:
        block_bytes = self._block_bytes
        assert node.keys == sorted(node.children), "keys and children differ"
        assert all(not b.startswith(a) for a, b in zip(node.keys, node.keys[1:], strict=False)), (
            "a stale tail"
        )
        assert node.exposed == (not node.is_root and not node.holders and not node.children)
        assert node.holders >= sum(child.holders for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node
            assert child.tokens[:block_bytes] == key
            assert child.depth == node.depth + len(node.blocks)
        if node.is_root:
            assert not node.blocks
            assert node.holders or node.children, "an empty scope was kept"
        elif node.is_tail:
            assert 0 < len(node.tokens) < block_bytes
            assert len(node.blocks) == 1
            assert not node.children
            assert node.holders == 0
        else:
            parent = node.parent
            assert parent is not None
            assert len(node.tokens) == len(node.blocks) * block_bytes > 0
            names = self._namer.chain_bytes(parent.last_name, node.tokens)
            assert b"".join(names) == node.names, "a name is not the hash of its prefix"


def _common_prefix(left: bytes, right: bytes) -> int:
    """Length of the longest common prefix, by bisection over bulk comparisons."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_prefix_short(left: bytes, right: bytes) -> int:
    """The same for a few words at most: the highest bit that differs."""
    length = min(len(left), len(right))
    differing = int.from_bytes(left[:length], "big") ^ int.from_bytes(right[:length], "big")
    return length - (differing.bit_length() + 7) // 8
