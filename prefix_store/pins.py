"""Prefixes that were promised to stay: until a time that a hit puts off, or until they are let go.

Knows names, times and where in the index a pin ends. Does not know blocks or
budgets. A pin is `standing → ended`, by `end` or because its time came.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from prefix_store.node import Node


class PinBudgetExceeded(Exception):
    """The blocks to pin do not fit in the share of the pool that may be pinned. Nothing was changed."""

    def __init__(self, *, wanted: int, left: int) -> None:
        super().__init__(f"{wanted} blocks to pin, {left} left in the budget")
        self.wanted = wanted
        self.left = left


@dataclass(slots=True, kw_only=True, eq=False)
class Pin:
    """The first `num_tokens` tokens of a prompt, which stay until `expires_at` on the store's clock."""

    scope: str
    num_tokens: int
    ttl_seconds: float
    expires_at: float
    node: Node = field(repr=False)

    def refresh(self, now: float) -> None:
        """A hit: the time starts again."""
        self.expires_at = now + self.ttl_seconds


_SLACK = 64


class PinBoard:
    """The standing pins, and which of them end first."""

    def __init__(self) -> None:
        self._standing: dict[Pin, None] = {}
        self._due: list[tuple[float, int, Pin]] = []
        self._tickets = count()

    def standing(self) -> list[Pin]:
        """Oldest first."""
        return list(self._standing)

    def add(self, pin: Pin) -> None:
        node = pin.node
        node.pins_ending_here = (*node.pins_ending_here, pin)
        self._standing[pin] = None
        self._push(pin)

    def remove(self, pin: Pin) -> bool:
        """False when the pin had ended before."""
        if pin not in self._standing:
            return False
        del self._standing[pin]
        node = pin.node
        node.pins_ending_here = tuple(other for other in node.pins_ending_here if other is not pin)
        return True

    def next_due(self, now: float) -> Pin | None:
        """A standing pin whose time is over.

        The heap is corrected when met: a pin that was refreshed goes back with its later time.
        """
        due = self._due
        while due and due[0][0] <= now:
            pin = heappop(due)[2]
            if pin not in self._standing:
                continue
            if pin.expires_at <= now:
                return pin
            self._push(pin)
        return None

    def _push(self, pin: Pin) -> None:
        if pin.expires_at == math.inf:
            return
        heappush(self._due, (pin.expires_at, next(self._tickets), pin))
        if len(self._due) > 2 * len(self._standing) + _SLACK:
            self._due = [entry for entry in self._due if entry[2] in self._standing]
            heapify(self._due)
