"""What a sequence holds: the blocks it reads and writes, and how it came by them.

Knows block ids and counts of tokens. Does not know the index or the pool:
only the store changes a lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from prefix_store.blocks import BlockId
from prefix_store.misses import Miss
from prefix_store.node import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """A look at the longest cached prefix of a prompt. Nothing is held: it may be gone by the next call."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCopy:
    """Copy the first `num_rows` tokens' K/V of block `source` to block `target`, over all layers, at once.

    `source` is valid until the next change of the store.
    """

    source: BlockId
    target: BlockId
    num_rows: int


class LeaseState(Enum):
    """`open → ended`, by `release` or `discard`, once."""

    OPEN = "open"
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Lease:
    """A sequence's claim on blocks. The holder reads it; only the store writes it.

    `block_table[i]` is where tokens `i * block_size …` live. The first `num_indexed` of
    its blocks are in the index, findable and read-only; the others are private.
    `cached_tokens` need not be computed once `copies` are done; `miss` says why they
    were not more. An executor may keep what it has for a lease by a weak reference.
    """

    scope: str
    num_prompt_tokens: int
    num_system_tokens: int
    num_public_blocks: int
    node: Node = field(repr=False)
    miss: Miss | None = None
    block_table: list[BlockId] = field(default_factory=list)
    num_indexed: int = 0
    cached_tokens: int = 0
    copies: tuple[RowCopy, ...] = ()
    state: LeaseState = LeaseState.OPEN


class LeaseEnded(Exception):
    """The lease was released or discarded before: its blocks may be another's."""
