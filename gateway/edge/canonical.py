"""What a request asks for and what an answer used, whatever the dialect.

Knows messages, sampling, answer options (all valid) and disjoint counts. Does
not know JSON, token ids or the model's limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "developer", "user", "assistant"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of text. `name` tells speakers of the same role apart, where a template knows it."""

    role: Role
    text: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy, `top_k` 0 is off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """The most tokens the client wants, and the name of the field that said so.

    With `is_upper_bound` a text may also end where the context window does; without, a request for more than
    fits is refused.
    """

    tokens: int
    param: str
    is_upper_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalRequest:
    """A chat request that is well formed; whether it fits the model is decided later.

    No `limit` means up to the end of the context window. `affinity` groups requests that are likely to share
    a prefix; it steers routing and never widens what a request may read. Requests share cached blocks only
    with those of the same `cache_salt` (within their tenant, always). `num_choices` texts are generated.
    With `continues_last` the last message is the assistant's, and what is generated goes on from its end.
    """

    model: str
    messages: tuple[Message, ...]
    sampling: Sampling
    limit: OutputLimit | None
    stream: bool
    include_usage: bool
    affinity: str | None
    cache_salt: bytes = b""
    num_choices: int = 1
    continues_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCounts:
    """Every token is in exactly one class. Totals are derived; each dialect projects its own sums."""

    uncached: int = 0
    read: int = 0
    written: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.uncached + self.read + self.written

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every piece of one answer repeats. `created` is in seconds since 1970 UTC.

    `is_cut_by_window` says that less room was left than the client asked for: a text that ends by its length
    has filled the context window.
    """

    request_id: str
    created: int
    model: str
    fingerprint: str
    is_cut_by_window: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a text ended. `stop_string` is the one of the client's that ended it, if one did."""

    reason: FinishReason
    stop_string: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedText:
    """One whole text of an answer."""

    text: str
    ending: Ending
