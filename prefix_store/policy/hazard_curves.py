"""How likely blocks are to be used again, by how often they were used and how long they have been idle.

Knows counts of blocks by class and age. Does not know runs or names.

A block is idle from one use to the next. Each class has a curve: at which rate
(per second) blocks idle for so long were used again. A block that has not come
back yet counts as well, for the time it has been watched (censored observations;
the estimate is uses ÷ time at risk in each bucket of ages, as of a piecewise
exponential survival model).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]

SLOT_SECONDS = 2.0
"""Resolution of ages. The curves are drawn anew once a slot."""
HORIZON_SECONDS = 4096.0
"""Idle blocks are watched for so long."""
BUCKET_RATIO = math.sqrt(2.0)
HALF_LIFE_SECONDS = 3600.0
"""What was seen so long ago counts half."""
POOLED_USES = 1.0
"""Weight of the guess against what was seen in all classes, in uses per bucket."""
CLASS_USES = 30.0
"""Weight of the level of all classes against that of one, in uses."""
BUCKET_USES = 20.0
"""Weight of the scaled common curve against what was seen in one class and bucket, in uses."""
GUESS_PER_LOG_AGE, GUESS_AGE_SECONDS = 0.3, 30.0
"""Guess before anything was seen: 0.3 ÷ (age + 30 s) per second. Then the least recently used goes first."""


def _bucket_edges() -> list[float]:
    edges = [0.0, SLOT_SECONDS]
    while edges[-1] < HORIZON_SECONDS:
        edges.append(min(HORIZON_SECONDS, edges[-1] * BUCKET_RATIO))
    return edges


EDGES = _bucket_edges()
"""Ages, in seconds, at which buckets begin; the last is the horizon, and the last bucket has no end."""
NUM_BUCKETS = len(EDGES) - 1
_NUM_SLOTS = int(HORIZON_SECONDS / SLOT_SECONDS)


class Ranking:
    """Cells, one for each class and bucket, in the order of what a block in them is worth. Never changed."""

    def __init__(self, cells: Iterable[int]) -> None:
        self.cell_at = list(cells)
        self.bit_of = [0] * len(self.cell_at)
        for position, cell in enumerate(self.cell_at):
            self.bit_of[cell] = 1 << position


class ReuseCurves:
    """Uses and time at risk per class and bucket, and what follows from them.

    The time at risk is not added up block by block: blocks last used in the same slot
    of time form a cohort per class, and only its size is kept.
    """

    def __init__(self, *, levels: Sequence[int]) -> None:
        num_classes = len(levels)
        self._is_at_level: Matrix = np.equal.outer(np.unique(levels), levels).astype(np.float64)
        edges = np.array(EDGES)
        self._widths = np.diff(edges)
        middles = np.sqrt(edges[:-1] * edges[1:])
        middles[0] = SLOT_SECONDS / 2.0
        self._guess = GUESS_PER_LOG_AGE / (middles + GUESS_AGE_SECONDS)
        self._uses: Matrix = np.zeros((num_classes, NUM_BUCKETS))
        self._seconds_at_risk: Matrix = np.zeros((num_classes, NUM_BUCKETS))
        self._watched: Matrix = np.zeros((num_classes, _NUM_SLOTS))
        self._slot: int | None = None
        self._overlap_of_one = _overlaps(SLOT_SECONDS)
        self.values: Matrix = np.zeros((num_classes, NUM_BUCKETS))
        """Hits to expect per second that a block of this class and age stays, for as long as is best."""
        self.ranking = Ranking(range(num_classes * NUM_BUCKETS))

    def advance(self, now: float) -> None:
        """Brings the curves up to `now`. They are drawn anew once a slot at most, with a new ranking."""
        slot = math.floor(now / SLOT_SECONDS)
        if self._slot is not None and slot <= self._slot:
            return
        if self._slot is not None:
            self._watch(slot - self._slot)
        self._slot = slot
        self.values = _best_rates(self._rates(), self._widths)
        self.ranking = Ranking(np.argsort(self.values, axis=None, kind="stable").tolist())

    def watch(self, group: int, last_used: float, num_blocks: int) -> None:
        """So many blocks of a class were last used then. A negative number: they are not watched any more."""
        if self.is_watched(last_used):
            self._watched[group, math.floor(last_used / SLOT_SECONDS) % _NUM_SLOTS] += num_blocks

    def use(self, group: int, last_used: float, now: float, num_blocks: int) -> None:
        """Blocks that were watched are used again; they are not watched as what they were any more."""
        self.watch(group, last_used, -num_blocks)
        if now - last_used < HORIZON_SECONDS:
            self._uses[group, bucket_of(now - last_used)] += num_blocks

    def num_watched(self) -> int:
        """Blocks that are being watched: those last used within the horizon."""
        return round(float(self._watched.sum()))

    def is_watched(self, last_used: float) -> bool:
        """Whether blocks last used then still are within the horizon."""
        assert self._slot is not None
        return math.floor(last_used / SLOT_SECONDS) > self._slot - _NUM_SLOTS

    def _watch(self, num_slots: int) -> None:
        """Adds the time that has passed to that at risk, and lets old evidence fade."""
        assert self._slot is not None
        seconds = num_slots * SLOT_SECONDS
        overlap = self._overlap_of_one if num_slots == 1 else _overlaps(seconds)
        youngest = self._slot % _NUM_SLOTS
        by_age = np.concatenate((self._watched[:, youngest::-1], self._watched[:, :youngest:-1]), axis=1)
        # Not a BLAS product: its threads would spin beside those that compute the model.
        self._seconds_at_risk += np.einsum("cs,sb->cb", by_age, overlap)
        fading = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._seconds_at_risk *= fading
        self._uses *= fading
        for step in range(1, min(num_slots, _NUM_SLOTS) + 1):
            self._watched[:, (self._slot + step) % _NUM_SLOTS] = 0.0

    def _rates(self) -> Matrix:
        """Uses per second of each class and bucket.

        Where little was seen of a class it takes the shape of its level, and a level that
        of all together; where nothing was seen at all, the guess.
        """
        uses, at_risk = self._uses, self._seconds_at_risk
        common = (uses.sum(axis=0) + POOLED_USES) / (at_risk.sum(axis=0) + POOLED_USES / self._guess)
        of_levels = _drawn_to(common[None, :], self._is_at_level @ uses, self._is_at_level @ at_risk)
        return _drawn_to(self._is_at_level.T @ of_levels, uses, at_risk)


def _drawn_to(expected: Matrix, uses: Matrix, at_risk: Matrix) -> Matrix:
    """Rates seen in some classes, where little was seen those expected, scaled to the level of the class."""
    scale = (uses.sum(axis=1) + CLASS_USES) / ((at_risk * expected).sum(axis=1) + CLASS_USES)
    rates: Matrix = (uses + BUCKET_USES) / (at_risk + BUCKET_USES / (scale[:, None] * expected))
    return rates


def bucket_of(age: float) -> int:
    """The bucket of an age in seconds, not negative."""
    return min(NUM_BUCKETS, bisect_right(EDGES, age)) - 1


def _overlaps(seconds: float) -> Matrix:
    """[slot, bucket]: of the next so many seconds, those that a cohort of the slot spends in the bucket.

    The cohort of the current slot is half a slot old at its end, on average.
    """
    ages = np.arange(_NUM_SLOTS)[:, None] * SLOT_SECONDS - SLOT_SECONDS / 2.0
    edges = np.array(EDGES)[None, :]
    ends = np.minimum(edges[:, 1:], ages + seconds)
    overlap: Matrix = np.maximum(0.0, ends - np.maximum(edges[:, :-1], ages))
    return overlap


def _best_rates(rates: Matrix, widths: Matrix) -> Matrix:
    """For each class and age, the best of all times to give up: P(used before) ÷ E[seconds kept until then].

    The index of an optimal stopping problem: J. Gittins, "Bandit Processes and Dynamic
    Allocation Indices", Journal of the Royal Statistical Society B 41(2), 1979.
    """
    lasting = np.exp(-rates * widths)
    values = np.empty_like(rates)
    for bucket in range(NUM_BUCKETS):
        alive_after = np.cumprod(lasting[:, bucket:], axis=1)
        alive_before = np.ones_like(alive_after)
        alive_before[:, 1:] = alive_after[:, :-1]
        used = alive_before - alive_after
        seconds = np.cumsum(used / rates[:, bucket:], axis=1)
        values[:, bucket] = (np.cumsum(used, axis=1) / seconds).max(axis=1)
    return values
