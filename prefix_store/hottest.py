"""Which cached prefixes were found most often.

Knows runs and how often each was hit. Changes nothing. A prompt that finds a run has found all that is
before it, so what follows is never hotter: the hottest are found from the roots down,
without a walk over the whole index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import Final

from prefix_store.blocks import BlockName
from prefix_store.node import Node

MAX_LOOKS: Final = 20_000
"""Runs looked at, at most: the engine waits meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """The prompt up to the end of a run. `num_scopes` go on from a public one; else it is its own scope's."""

    name: BlockName
    scope: str
    num_blocks: int
    num_scopes: int
    hits: int
    last_used: float


def hottest(roots: Iterable[Node], *, limit: int, max_looks: int = MAX_LOOKS) -> list[HotPrefix]:
    """At most `limit`, the hottest first; of equally hot ones the shorter. Never hit: left out."""
    found: list[HotPrefix] = []
    tickets = count()
    due: list[tuple[int, int, Node]] = []
    waiting = list(islice(roots, max_looks))
    num_looks = len(waiting)
    while len(found) < limit:
        while waiting:
            node = waiting.pop()
            if node.is_entry:
                waiting.extend(islice(_followers(node), max(max_looks - num_looks, 0)))
                num_looks += len(node.children) + len(node.gates)
            elif node.hits and not node.is_tail:
                heappush(due, (-node.hits, next(tickets), node))
        if not due:
            break
        node = heappop(due)[2]
        found.append(_seen(node))
        waiting.extend(islice(_followers(node), max(max_looks - num_looks, 0)))
        num_looks += len(node.children) + len(node.gates)
    return found


def _followers(node: Node) -> Iterable[Node]:
    yield from node.children.values()
    yield from node.gates.values()


def _seen(node: Node) -> HotPrefix:
    return HotPrefix(
        name=node.last_name,
        scope=node.scope,
        num_blocks=node.depth + len(node.blocks),
        num_scopes=len(node.gates),
        hits=node.hits,
        last_used=node.last_used,
    )
