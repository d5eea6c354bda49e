"""Which prefixes are cached, as a radix tree over blocks of tokens.

Knows token bytes, names and block ids, who holds or pins which path, and what
may be evicted. Does not know leases, requests or tenants' names: callers pass
ids in and get ids back.

Tokens come first: children are found by the bytes of their first block and
runs are compared in bulk, so a match never trusts a name and hashes nothing.
A *tail* is a leaf of one incomplete block, left by a sequence that ended
there; it is found token by token and nothing ever follows it.

A scope's blocks live under its own root. Where a prompt begins with a public
prefix, that part lives under the deployment's root, and behind it each scope
has a gate, through which nobody else passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from prefix_store.blocks import (
    NAME_BYTES,
    TOKEN_BYTES,
    BlockId,
    BlockIds,
    BlockNamer,
    TokenKind,
    TokenView,
    block_ids,
    common_prefix,
)
from prefix_store.books import Books
from prefix_store.eviction import EvictionOrder
from prefix_store.misses import Cause
from prefix_store.node import Node
from prefix_store.pool import BlockPool

PUBLIC_SCOPE = ""
"""The deployment's own scope. No tenant has it: a tenant's is never empty."""

NODE_BYTES = 900
"""Memory of a run besides its blocks: the node, its place among its parent's children, the policy's record.

Measured by `benchmarks/index.py`, rounded up to hold for every policy.
"""

ID_BYTES = 4
"""Memory of a block id."""


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

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // TOKEN_BYTES + self.tail_rows


class RadixIndex:
    """One tree for each scope. Moves blocks between held, cached and free in the pool as it changes."""

    def __init__(self, *, namer: BlockNamer, pool: BlockPool, order: EvictionOrder, books: Books) -> None:
        self._namer = namer
        self._pool = pool
        self._order = order
        self._books = books
        self._block_bytes = namer.block_size * TOKEN_BYTES
        self._bytes_per_block = self._block_bytes + NAME_BYTES + ID_BYTES
        self._roots: dict[str, Node] = {}
        self.num_nodes = 0
        self.num_blocks = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the index, by count: nodes and blocks times what each costs."""
        return self.num_nodes * NODE_BYTES + self.num_blocks * self._bytes_per_block

    def bytes_to_add(self, num_blocks: int) -> int:
        """What `num_blocks` more may cost: a run, a cut in front of it, and a scope's entry."""
        return 3 * NODE_BYTES + num_blocks * self._bytes_per_block

    # ---- looks

    def match(self, scope: str, data: TokenView, limit_bytes: int, public_bytes: int) -> IndexMatch | None:
        """The longest cached prefix of the first `limit_bytes` of `data`, of which the first
        `public_bytes` are public. None when there is no tree to look in.
        """
        root = self._roots.get(PUBLIC_SCOPE if public_bytes else scope)
        if root is None:
            return None
        if not public_bytes:
            return self.match_below(root, data, 0, limit_bytes)
        match = self.match_below(root, data, 0, min(limit_bytes, public_bytes))
        gate = match.path[-1].gates.get(scope)
        if gate is None or match.num_bytes < public_bytes or match.inside is not None:
            return match
        behind = self.match_below(gate, data, public_bytes, limit_bytes)
        behind.path = match.path + behind.path
        return behind

    def match_below(self, start: Node, data: TokenView, position: int, limit_bytes: int) -> IndexMatch:
        """Continues a match from the end of `start`, which is at `position` of `data`."""
        match = self._descend(start, data, position, limit_bytes)
        end, position = match.path[-1], match.num_bytes
        if match.inside is None and end.children and position + TOKEN_BYTES <= limit_bytes:
            rest = bytes(data[position : min(position + self._block_bytes, limit_bytes)])
            self._match_tail(match, end, rest)
        return match

    def _descend(self, node: Node, data: TokenView, position: int, limit_bytes: int) -> IndexMatch:
        """Full blocks only, and the rows behind them where the match ends inside a run."""
        path = [node]
        block_bytes = self._block_bytes
        while position + block_bytes <= limit_bytes:
            child = node.children.get(bytes(data[position : position + block_bytes]))
            if child is None:
                break
            run = child.tokens
            end = position + len(run)
            if end > limit_bytes or not run.startswith(data[position:end]):
                return self._match_inside(child, path, data, position, limit_bytes)
            node = child
            path.append(node)
            position = end
        return IndexMatch(path=path, num_bytes=position)

    def _match_inside(
        self, child: Node, path: list[Node], data: TokenView, position: int, limit_bytes: int
    ) -> IndexMatch:
        """The prompt shares the first block of `child` and leaves it before its end."""
        common = common_prefix(child.tokens, data[position : min(position + len(child.tokens), limit_bytes)])
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
        """The child whose first block shares the most tokens with `rest`."""
        first_token = rest[:TOKEN_BYTES]
        for key in node.keys_near(rest):
            if not key.startswith(first_token):
                continue
            rows = _common_prefix_short(key, rest) // TOKEN_BYTES
            if rows > match.tail_rows:
                child = node.children[key]
                match.tail_node, match.tail_block, match.tail_rows = child, child.blocks[0], rows

    def roots(self) -> Iterable[Node]:
        """One entry for each scope that something is cached or held for."""
        return self._roots.values()

    def nodes(self) -> Iterator[Node]:
        """Every node, entries included, parents before what follows them."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
            pending.extend(node.gates.values())

    def path_of(self, node: Node) -> list[Node]:
        """From `node` up to its root."""
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path

    # ---- holding

    def hold(self, match: IndexMatch, now: float) -> Node:
        """A lease ends where the full blocks of the match end: its path is held, root to end."""
        self.cut(match)
        for step in match.path:
            self._hit(step, now)
        return match.path[-1]

    def cut(self, match: IndexMatch) -> Node:
        """Makes the match end at a node's end, and its path complete. Returns that node."""
        if match.inside is not None and match.num_inside:
            match.path.append(self._split(match.inside, match.num_inside))
            match.inside, match.num_inside = None, 0
        return match.path[-1]

    def forgo_cut(self, match: IndexMatch) -> None:
        """Makes the match end before the run it ends inside of, so that nothing need be cut."""
        match.num_bytes -= match.num_inside * self._block_bytes
        match.inside, match.num_inside = None, 0
        match.tail_node, match.tail_block, match.tail_rows = None, None, 0

    def hold_further(self, match: IndexMatch, now: float) -> Node:
        """Like `hold`, for a match that continues from a node the caller holds."""
        self.cut(match)
        for step in match.path[1:]:
            self._hit(step, now)
        return match.path[-1]

    def hold_again(self, node: Node, now: float) -> None:
        """One more lease ends where another does: the path that one holds is held once more."""
        for step in self.path_of(node):
            self._hold(step, now)

    def open_scope(self, scope: str, now: float) -> Node:
        """The root of a scope, held once more."""
        root = self._roots.get(scope)
        if root is None:
            root = self._new_entry(None, scope, self._namer.root(scope), now)
            self._roots[scope] = root
        self._hold(root, now)
        return root

    def open_gate(self, node: Node, scope: str, now: float) -> Node:
        """A scope's gate behind public `node`, held once more."""
        gate = node.gates.get(scope)
        if gate is None:
            gate = self._new_entry(node, scope, self._namer.enter_scope(node.last_name, scope), now)
            node.add_gate(scope, gate)
        self._hold(gate, now)
        return gate

    def _new_entry(self, parent: Node | None, scope: str, name: bytes, now: float) -> Node:
        self.num_nodes += 1
        depth = 0 if parent is None else parent.depth + len(parent.blocks)
        return Node(
            parent=parent,
            scope=scope,
            tokens=b"",
            names=name,
            blocks=block_ids(()),
            depth=depth,
            kind=TokenKind.SYSTEM,
            now=now,
        )

    def let_go(self, node: Node, now: float) -> None:
        """A lease that ended at `node` ends. Blocks that nobody holds any more become cached."""
        step: Node | None = node
        while step is not None:
            parent = step.parent
            self._let_go(step, now)
            step = parent

    def shield(self, node: Node) -> None:
        """Keeps a node and all before it from eviction until `unshield`, without counting as use."""
        for step in self.path_of(node):
            self._hold(step, step.last_used)

    def unshield(self, node: Node) -> None:
        """Undoes `shield`."""
        for step in self.path_of(node):
            self._let_go(step, step.last_used)

    def hit_tail(self, node: Node, now: float) -> None:
        """A prompt found a tail, and copies from it without holding it."""
        self._hit(node, now)
        self._let_go(node, now)

    def _hit(self, node: Node, now: float) -> None:
        """A prompt found all of this node, and holds it."""
        if not node.blocks:
            self._hold(node, now)
            return
        self._books.hit(node, now)
        self._hold(node, now)
        self._order.hit(node, now)
        node.hits += 1
        node.lapsed = False
        for pin in node.pins_ending_here:
            pin.refresh(now)

    def _hold(self, node: Node, now: float) -> None:
        node.holders += 1
        node.last_used = now
        if node.holders == 1 and node.blocks:
            if node.exposed:
                self._cover(node)
            if node.pins:
                self._pool.unpin(len(node.blocks))
            self._pool.unpark(len(node.blocks))

    def _let_go(self, node: Node, now: float) -> None:
        assert node.holders > 0, "more holders let go than held"
        node.holders -= 1
        node.last_used = now
        if node.holders == 0:
            if node.blocks:
                self._pool.park(len(node.blocks))
                if node.pins:
                    self._pool.pin(len(node.blocks))
            self._settle(node)

    # ---- pinning

    def num_unpinned(self, path: list[Node]) -> int:
        """How many blocks of a path no pin covers yet."""
        return sum(len(node.blocks) for node in path if not node.pins)

    def pin(self, node: Node) -> None:
        """One more pin ends at `node`: it and what it follows may not be evicted."""
        for step in self.path_of(node):
            step.pins += 1
            if step.pins == 1 and step.blocks and not step.holders:
                self._pool.pin(len(step.blocks))
                if step.exposed:
                    self._cover(step)

    def unpin(self, node: Node) -> None:
        """A pin that ended at `node` ends."""
        for step in self.path_of(node):
            step.pins -= 1
            assert step.pins >= 0, "more pins end than began"
            if not step.pins:
                if step.blocks and not step.holders:
                    self._pool.unpin(len(step.blocks))
                self._settle(step)

    def lapse(self, node: Node) -> None:
        """A pin that ended at `node` ends because its time is over."""
        for step in self.path_of(node):
            step.lapsed = True
        self.unpin(node)

    # ---- growing

    def grow(
        self, node: Node, data: bytes, blocks: BlockIds, kind: TokenKind, now: float
    ) -> tuple[Node, BlockIds]:
        """Indexes the full blocks of `data`, written in `blocks`, below `node`, for its holder.

        Returns the node where they end, held by the caller together with all before it,
        and the blocks that stand for them. Those found already are taken from the index:
        the caller's duplicates of them are no longer needed.
        """
        match = self._descend(node, data, 0, len(data))
        last = self.cut(match)
        if match.num_bytes == 0:
            return self._append(last, data, blocks, kind, now), blocks
        found = block_ids(())
        for step in match.path[1:]:
            self._hold(step, now)
            found += step.blocks
        if match.num_bytes < len(data):
            fresh = blocks[len(found) :]
            last = self._append(last, data[match.num_bytes :], fresh, kind, now)
            found += fresh
        return last, found

    def _append(self, node: Node, tokens: bytes, blocks: BlockIds, kind: TokenKind, now: float) -> Node:
        """New blocks after `node`, held once by the caller."""
        names = self._namer.chain_bytes(node.last_name, tokens)
        extends = (
            node.blocks
            and node.holders == 1
            and node.kind is kind
            and not (node.children or node.gates or node.hits or node.pins)
        )
        if not extends:
            child = self._insert(node, tokens, names, blocks, kind, now)
            child.holders = 1
            return child
        first = len(node.blocks)
        node.tokens += tokens
        node.names += names
        node.blocks = node.blocks + blocks
        node.last_used = now
        self.num_blocks += len(blocks)
        self._order.grow(node, len(blocks))
        self._books.stored(node, first)
        return node

    def add_tail(self, node: Node, tokens: bytes, block: BlockId, kind: TokenKind, now: float) -> bool:
        """Indexes an incomplete block after `node`, held by nobody from now on.

        False, and nothing is changed, when a block that says as much is there already.
        """
        for key in node.keys_near(tokens):
            if key.startswith(tokens):
                if key == tokens:
                    self._touch(node.children[key], now)
                return False
        tail = self._insert(node, tokens, b"", block_ids((block,)), kind, now)
        self._pool.park(1)
        self._settle(tail)
        return True

    def _touch(self, node: Node, now: float) -> None:
        """This node was of use just now."""
        self._hold(node, now)
        self._let_go(node, now)

    def _insert(
        self, parent: Node, tokens: bytes, names: bytes, blocks: BlockIds, kind: TokenKind, now: float
    ) -> Node:
        key = tokens[: self._block_bytes]
        self._supersede_tail(parent, key, now)
        node = Node(
            parent=parent,
            scope=parent.scope,
            tokens=tokens,
            names=names,
            blocks=blocks,
            depth=parent.depth + len(parent.blocks),
            kind=kind,
            now=now,
        )
        if parent.exposed:
            self._cover(parent)
        parent.add_child(key, node)
        self.num_nodes += 1
        self.num_blocks += len(blocks)
        self._order.insert(node, now)
        self._books.stored(node, 0)
        return node

    def _supersede_tail(self, parent: Node, key: bytes, now: float) -> None:
        """Drops the tail that `key` begins with: whatever it says, the newcomer says too.

        There is one at most, since no tail begins its siblings.
        """
        for near in parent.keys_near(key):
            if key.startswith(near):
                self._forget(parent.children[near], Cause.SUPERSEDED, now)
                return

    # ---- shrinking

    def evict(self, victim: Node, num_blocks: int, cause: Cause, now: float) -> BlockIds:
        """Frees up to `num_blocks` blocks from the end of one exposed run, and returns them."""
        assert victim.exposed, "the policy chose a run that may not go"
        keep = max(len(victim.blocks) - num_blocks, 0)
        self._order.evict(victim, keep, now)
        self._books.removed(victim, keep, cause, now)
        evicted = victim.blocks[keep:]
        self._pool.unpark(len(evicted))
        self._pool.give_back(evicted)
        self.num_blocks -= len(evicted)
        if keep:
            victim.blocks = victim.blocks[:keep]
            victim.names = victim.names[: keep * NAME_BYTES]
            victim.tokens = victim.tokens[: keep * self._block_bytes]
        else:
            self._detach(victim)
        return evicted

    def clear(self, now: float) -> None:
        """Frees every block that nobody holds. There are no pins."""
        for node in reversed(list(self.nodes())):
            if node.holders:
                continue
            if node.blocks:
                self._forget(node, Cause.CLEARED, now)
            else:
                self._drop_entry(node)

    def _forget(self, node: Node, cause: Cause, now: float) -> None:
        """Frees a leaf that nobody holds. Its parent is left as it is."""
        assert not node.holders
        assert not node.pins
        self._order.remove(node)
        self._books.removed(node, 0, cause, now)
        self._pool.unpark(len(node.blocks))
        self._pool.give_back(node.blocks)
        self.num_blocks -= len(node.blocks)
        self._unlink(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.is_followed, "something follows this run"
        parent.remove_child(node.tokens[: self._block_bytes])
        self.num_nodes -= 1

    def _detach(self, node: Node) -> None:
        """Takes a leaf without blocks left out of the tree, and lets its parent take stock."""
        parent = node.parent
        assert parent is not None
        self._unlink(node)
        if len(parent.children) == 1 and not parent.gates:
            [child] = parent.children.values()
            if _is_one_run(parent, child):
                self._merge(parent, child)
                return
        self._settle(parent)

    # ---- splitting and merging

    def _split(self, node: Node, num_upper: int) -> Node:
        """Cuts a run in two. `node` stays the lower part, so that leases and pins that end at it still do."""
        parent = node.parent
        assert parent is not None
        assert 0 < num_upper < len(node.blocks), (num_upper, len(node.blocks))
        cut = num_upper * self._block_bytes
        upper = Node(
            parent=parent,
            scope=node.scope,
            tokens=node.tokens[:cut],
            names=node.names[: num_upper * NAME_BYTES],
            blocks=node.blocks[:num_upper],
            depth=node.depth,
            kind=node.kind,
            now=node.last_used,
        )
        upper.holders = node.holders
        upper.pins = node.pins
        upper.hits = node.hits
        upper.lapsed = node.lapsed
        parent.children[upper.tokens[: self._block_bytes]] = upper
        node.parent = upper
        node.tokens = node.tokens[cut:]
        node.names = node.names[num_upper * NAME_BYTES :]
        node.blocks = node.blocks[num_upper:]
        node.depth += num_upper
        upper.add_child(node.tokens[: self._block_bytes], node)
        self.num_nodes += 1
        self._order.split(node, upper)
        return upper

    def _merge(self, upper: Node, node: Node) -> None:
        """Joins a run and the only one that follows it. `node` stays."""
        parent = upper.parent
        assert parent is not None
        parent.children[upper.tokens[: self._block_bytes]] = node
        node.parent = parent
        node.tokens = upper.tokens + node.tokens
        node.names = upper.names + node.names
        node.blocks = upper.blocks + node.blocks
        node.depth = upper.depth
        self.num_nodes -= 1
        self._order.merge(upper, node)

    # ---- exposure

    def _settle(self, node: Node) -> None:
        """After a holder, a pin or a follower went: exposes a run, or drops an entry that leads nowhere."""
        if node.holders or node.pins or node.is_followed or node.exposed:
            return
        if node.blocks:
            node.exposed = True
            self._order.expose(node)
            return
        self._drop_entry(node)
        if node.parent is not None:
            self._settle(node.parent)

    def _drop_entry(self, node: Node) -> None:
        self.num_nodes -= 1
        if node.parent is None:
            del self._roots[node.scope]
        else:
            node.parent.remove_gate(node.scope)

    def _cover(self, node: Node) -> None:
        node.exposed = False
        self._order.cover(node)

    # ---- invariants

    def check(self) -> None:
        """Asserts what must hold between calls. O(blocks)."""
        cached = pinned = num_nodes = num_blocks = 0
        for node in self.nodes():
            self._check_node(node)
            num_nodes += 1
            num_blocks += len(node.blocks)
            if not node.holders:
                cached += len(node.blocks)
                pinned += len(node.blocks) if node.pins else 0
        assert cached == self._pool.num_cached, (cached, self._pool.num_cached)
        assert pinned == self._pool.num_pinned, (pinned, self._pool.num_pinned)
        assert (num_nodes, num_blocks) == (self.num_nodes, self.num_blocks), "nodes or blocks are miscounted"

    def _check_node(self, node: Node) -> None:
        self._check_children(node)
        idle = not (node.holders or node.pins or node.is_followed)
        assert node.exposed == (idle and not node.is_entry)
        assert not (idle and node.is_entry), "an entry that leads nowhere was kept"
        assert node.pins >= len(node.pins_ending_here)
        if node.is_entry:
            assert not node.pins_ending_here
            assert node.tokens == b""
        elif node.is_tail:
            assert 0 < len(node.tokens) < self._block_bytes
            assert len(node.blocks) == 1
            assert not node.is_followed
            assert node.holders == node.pins == 0
        else:
            assert node.parent is not None
            assert len(node.tokens) == len(node.blocks) * self._block_bytes
            names = self._namer.chain_bytes(node.parent.last_name, node.tokens)
            assert names == node.names, "a name is not the hash of its prefix"

    def _check_children(self, node: Node) -> None:
        keys = sorted(node.children)
        assert node.order is None or node.order.in_order() == keys, "keys and children differ"
        assert all(not b.startswith(a) for a, b in pairwise(keys)), "a stale tail"
        for key, child in node.children.items():
            assert child.tokens[: self._block_bytes] == key
            assert child.scope == node.scope, "a scope leads into another"
        for scope, gate in node.gates.items():
            assert node.scope == PUBLIC_SCOPE != scope == gate.scope
            assert gate.is_entry
        for follower in (*node.children.values(), *node.gates.values()):
            assert follower.parent is node
            assert follower.depth == node.depth + len(node.blocks)
            if not follower.holders:
                assert follower.last_used <= node.last_used, "used later than what it follows"


def _is_one_run(upper: Node, lower: Node) -> bool:
    """Nothing tells these apart: no lease or pin ends between them, and they were last used together."""
    return (
        bool(upper.blocks)
        and not lower.is_tail
        and upper.holders == lower.holders
        and upper.pins == lower.pins
        and upper.kind is lower.kind
        and upper.last_used == lower.last_used
        and bool(upper.hits) == bool(lower.hits)
        and upper.lapsed == lower.lapsed
    )


def _common_prefix_short(left: bytes, right: bytes) -> int:
    """The same for one block at most: the highest bit that differs."""
    length = min(len(left), len(right))
    differing = int.from_bytes(left[:length], "big") ^ int.from_bytes(right[:length], "big")
    return length - (differing.bit_length() + 7) // 8
