"""How the prompts being computed share a step's tokens.

Knows sequences, their urgency, scope and what is left of each. Does not know
blocks or who is admitted.

The most urgent take what they can use. Scopes of one urgency share evenly, and
what one cannot use the others get. Within a scope the prompt with the least
left goes first, which makes the mean wait shortest. The prompt admitted first
always gets `1 / OLDEST_SHARE` of the step, so that all are done in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import groupby

from model_worker.sequence import Sequence

OLDEST_SHARE = 8


def split(budget: int, prefills: Items[Sequence]) -> dict[Sequence, int]:
    """Tokens for each of `prefills`, which come in the order of their admission; none gets 0."""
    if not prefills or budget <= 0:
        return {}
    oldest = prefills[0]
    granted = {oldest: min(oldest.num_pending, max(1, budget // OLDEST_SHARE))}
    left = budget - granted[oldest]
    by_urgency = sorted(prefills, key=lambda one: one.urgency)
    for _, level in groupby(by_urgency, key=lambda one: one.urgency):
        left -= _share(left, level, granted)
    return granted


def _share(budget: int, level: Iterable[Sequence], granted: dict[Sequence, int]) -> int:
    """Grants up to `budget` tokens to sequences of one urgency; returns how many."""
    scopes: dict[str, list[Sequence]] = {}
    for sequence in sorted(level, key=lambda one: one.num_pending):
        scopes.setdefault(sequence.request.scope, []).append(sequence)
    needs = {
        scope: sum(one.num_pending - granted.get(one, 0) for one in sequences)
        for scope, sequences in scopes.items()
    }
    left = budget
    # The least needy first: what it leaves over is shared by the others.
    for place, scope in enumerate(sorted(scopes, key=needs.__getitem__)):
        # Rounded up: a token that nobody gets is a token less computed.
        grant = min(needs[scope], -(-left // (len(scopes) - place)))
        left -= grant
        for sequence in scopes[scope]:
            got = min(grant, sequence.num_pending - granted.get(sequence, 0))
            if got:
                granted[sequence] = granted.get(sequence, 0) + got
                grant -= got
    return budget - left
