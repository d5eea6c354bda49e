"""Text that the operator declared public: a system prompt that every tenant shares.

Knows prefixes as token bytes, and that no adapter has computed them: they are
the plain model's. The index keeps what follows a public prefix apart by scope.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from prefix_store.blocks import TOKEN_BYTES, TokenView, common_prefix, has_adapter


class PublicPrefixes:
    """Declared once, asked for every prompt."""

    def __init__(self, *, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._prefixes: list[bytes] = []
        self._longest_bytes = 0

    def declare(self, data: TokenView) -> None:
        """The full blocks of `data` are public."""
        prefix = bytes(data[: len(data) // self._block_bytes * self._block_bytes])
        if prefix and prefix not in self._prefixes:
            insort(self._prefixes, prefix)
            self._longest_bytes = max(self._longest_bytes, len(prefix))

    def num_bytes(self, scope: str, data: TokenView) -> int:
        """How much of a prompt is public, in whole blocks: one of two neighbours in byte order says."""
        if not self._prefixes or has_adapter(scope):
            return 0
        front = bytes(data[: self._longest_bytes])
        at = bisect_left(self._prefixes, front)
        common = max(common_prefix(near, front) for near in self._prefixes[max(at - 1, 0) : at + 1])
        return common // self._block_bytes * self._block_bytes
