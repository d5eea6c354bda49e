"""Usage as other vendors' APIs report it, as disjoint counts.

Knows the two shapes: OpenAI's, whose prompt includes what was cached and written, and
Anthropic's, whose three input counts are disjoint and come in pieces. Does not know HTTP
or prices. A count of 0 is known to be 0; an absent one is unknown and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from billing.usage import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedUsage:
    """`is_contradictory` calls for a person: a part was larger than the whole, and was cut to fit."""

    counts: TokenCounts
    is_contradictory: bool = False


def openai_usage(usage: Mapping[str, Any]) -> ReportedUsage:
    """Chat completions' `usage`. Raises InvalidUsage for a negative count."""
    details = usage.get("prompt_tokens_details") or {}
    prompt = _count(usage, "prompt_tokens")
    read = min(prompt, asked_read := _count(details, "cached_tokens"))
    written = min(prompt - read, asked_write := _count(details, "cache_write_tokens"))
    return ReportedUsage(
        counts=TokenCounts(
            uncached=prompt - read - written,
            read=read,
            write_auto=written,
            output=_count(usage, "completion_tokens"),
        ),
        is_contradictory=asked_read + asked_write > prompt,
    )


class AnthropicUsage:
    """The usage of one streamed message. What comes later overwrites, and what is absent stays."""

    def __init__(self) -> None:
        self._usage: dict[str, Any] = {}

    def take(self, usage: Mapping[str, Any]) -> None:
        """Of `message_start`, then of each `message_delta`, whose counts are cumulative."""
        self._usage |= {name: value for name, value in usage.items() if value is not None}

    @property
    def counts(self) -> TokenCounts:
        """Raises InvalidUsage for a negative count."""
        by_ttl = self._usage.get("cache_creation") or {}
        hour = _count(by_ttl, "ephemeral_1h_input_tokens")
        return TokenCounts(
            uncached=_count(self._usage, "input_tokens"),
            read=_count(self._usage, "cache_read_input_tokens"),
            # Where the split is not told, all of it was the default: five minutes.
            write_5m=_count(self._usage, "cache_creation_input_tokens") - hour,
            write_1h=hour,
            output=_count(self._usage, "output_tokens"),
        )


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return 0 if value is None else int(value)
