"""What is noted when blocks come, are hit, and go.

Knows statistics, the names of what has gone, and the event log. Decides
nothing: the index reports, and nothing here changes it.
"""

from __future__ import annotations

from prefix_store.blocks import NAME_BYTES, BlockName, split_names
from prefix_store.events import KvEventLog
from prefix_store.misses import Cause, Departure, GhostNames, Miss
from prefix_store.node import Node
from prefix_store.statistics import Statistics


class Books:
    """Three readers of one stream of reports."""

    def __init__(self, *, ghosts: GhostNames, events: KvEventLog | None) -> None:
        self.statistics = Statistics()
        self.ghosts = ghosts
        self.events = events

    def asked(self, scope: str, num_tokens: int, cached_tokens: int, miss: Miss | None) -> None:
        """A prompt was looked up and its cached prefix leased."""
        tally = self.statistics.of(scope)
        tally.queries += 1
        tally.query_tokens += num_tokens
        tally.hit_tokens += cached_tokens
        if cached_tokens:
            tally.hit_queries += 1
        if miss is not None:
            tally.misses[miss.reason] += 1

    def stored(self, node: Node, first: int) -> None:
        """Blocks of `node` from number `first` on are new."""
        self.statistics.of(node.scope).stored_blocks += len(node.blocks) - first
        if self.events is not None and not node.is_tail:
            block_bytes = len(node.tokens) // len(node.blocks)
            self.events.stored(
                parent=block_before(node, first),
                names=node.names[first * NAME_BYTES :],
                tokens=node.tokens[first * block_bytes :],
            )

    def hit(self, node: Node, now: float) -> None:
        """A prompt found `node`, which was last used before."""
        self.statistics.of(node.scope).reuse_gap.add(now - node.last_used, len(node.blocks))

    def removed(self, node: Node, keep: int, cause: Cause, now: float) -> None:
        """All but the first `keep` blocks of `node` are going."""
        if node.lapsed and cause is Cause.PRESSURE:
            cause = Cause.EXPIRED
        num_gone = len(node.blocks) - keep
        tally = self.statistics.of(node.scope)
        tally.removed_blocks += num_gone
        if cause is Cause.SUPERSEDED:
            return
        if not node.hits:
            tally.wasted_blocks += num_gone
        if cause is not Cause.CLEARED:
            tally.evicted_blocks += num_gone
            tally.idle_before_eviction.add(now - node.last_used, num_gone)
        if not node.is_tail:
            names = node.names[keep * NAME_BYTES :]
            self.ghosts.add(split_names(names), Departure(at=now, cause=cause))
            if self.events is not None:
                self.events.removed(names)


def block_before(node: Node, first: int) -> BlockName | None:
    """Name of the block before number `first` of a run; None at the start of a prompt.

    A gate is no block: what is before it counts.
    """
    if first:
        return node.names[(first - 1) * NAME_BYTES : first * NAME_BYTES]
    parent = node.parent
    while parent is not None and parent.is_entry:
        parent = parent.parent
    return None if parent is None else parent.last_name
