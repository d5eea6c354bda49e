"""What a client is told of its budgets and limits: refusals and headers, the same on every route.

Knows billing's refusals and the headers of OpenAI's API. Does not know how anything is
counted or reserved.
"""

from __future__ import annotations

from typing import Final

from billing.errors import BudgetExceeded
from billing.limits import Allowance, RateLimited, Standing
from gateway.edge.errors import NO_RETRY, ApiError, InsufficientQuota, RateLimitExceeded

_SECOND_US: Final = 1_000_000
_MINUTE_US: Final = 60 * _SECOND_US
_HOUR_US: Final = 60 * _MINUTE_US


def refusal_of(error: BudgetExceeded | RateLimited) -> ApiError:
    if isinstance(error, BudgetExceeded):
        return InsufficientQuota(f"You exceeded your current quota: {error}.")
    headers = dict(rate_headers(error.standing))
    if error.is_hopeless:
        headers |= NO_RETRY
    elif error.retry_after_us is not None:
        headers |= retry_headers(error.retry_after_us)
    return RateLimitExceeded(f"Rate limit reached: {error}.", headers=headers)


def retry_headers(wait_us: int) -> dict[str, str]:
    """Rounded up: who waits that long is let in. Seconds are whole (RFC 9110); milliseconds are for the
    official clients.
    """
    return {"retry-after": str(-(-wait_us // _SECOND_US)), "retry-after-ms": str(-(-wait_us // 1_000))}


def rate_headers(standing: Standing | None) -> dict[str, str]:
    if standing is None:
        return {}
    headers: dict[str, str] = {}
    for what, allowance in (("requests", standing.requests), ("tokens", standing.tokens)):
        if allowance is not None:
            headers |= _headers_of(what, allowance)
    return headers


def _headers_of(what: str, allowance: Allowance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{what}": str(allowance.limit),
        f"x-ratelimit-remaining-{what}": str(allowance.remaining),
        f"x-ratelimit-reset-{what}": duration(allowance.reset_after_us),
    }


def duration(wait_us: int) -> str:
    """As OpenAI writes it, rounded up to a millisecond: `6m0s`, `1.5s`, `120ms`."""
    rounded_us = -(-wait_us // 1_000) * 1_000
    if rounded_us < _SECOND_US:
        return f"{rounded_us // 1_000}ms"
    hours, rest = divmod(rounded_us, _HOUR_US)
    minutes, rest = divmod(rest, _MINUTE_US)
    seconds, rest = divmod(rest, _SECOND_US)
    fraction = f".{rest // 1_000:03d}".rstrip("0") if rest else ""
    hour_part = f"{hours}h" if hours else ""
    minute_part = f"{minutes}m" if hours or minutes else ""
    return f"{hour_part}{minute_part}{seconds}{fraction}s"
