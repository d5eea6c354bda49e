"""The wire between a gateway and a model worker: what is asked, what is answered.

Knows token ids, sampling settings, counts and reasons. Does not know torch,
tenants, keys or prices: a scope is an opaque string made by the gateway from
an authenticated key. This is the only worker module that a gateway imports.

One generation is one HTTP exchange. `POST /v1/generate` with a
`GenerateRequest` as JSON answers 200 with newline-delimited JSON events:

    Started  Prefilled*  (Token | Finished)*  Failed?

Each of the `n` texts asked for ends with a `Finished` of its own, and the
stream with the last of them, or with the one `Failed` that ends them all.

`Started` carries the input counts before the first token, so usage is known
at every instant as a fold of the events seen so far. A refusal that happens
before `Started` is a non-200 answer with a `Refusal` body. Hanging up cancels
the generation within one engine step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, NewType

import msgspec

Scope = NewType("Scope", str)
"""Isolation boundary of cached blocks, opaque to the worker: lower-case hexadecimal."""

PROTOCOL_VERSION = 1
EVENT_STREAM_TYPE = "application/x-ndjson"
EPOCH_HEADER = "x-headstart-epoch"
"""Of every answer to a `GenerateRequest`: the epoch of the card that the worker has now."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
LogitBias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
StopString = Annotated[str, msgspec.Meta(max_length=256)]

MAX_STRUCTURE_CHARACTERS = 65_536
"""Longest schema, pattern or grammar. What it may cost to compile is limited apart from that."""

MAX_CHOICES = 128
"""Most texts that one request may ask for; OpenAI's limit."""

CacheMode = Literal["automatic", "bypass"]
MissedReason = Literal[
    "below_minimum", "no_shared_prefix", "diverged", "not_yet_written", "expired", "evicted", "bypass"
]
FinishReason = Literal["stop", "length"]
RefusalCode = Literal["invalid_request", "context_length_exceeded", "queue_full", "draining"]
FailureCode = Literal["engine_failed", "out_of_blocks", "shutting_down", "structure_dead_end"]


class JsonObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """The text is one JSON object, of any shape."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """The text is JSON that a schema accepts. `json_schema` is the schema as JSON text."""

    json_schema: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]


class Regex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="regex"):
    """The whole text matches a regular expression, in the syntax of Rust's `regex` (no look-around)."""

    pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grammar"):
    """The whole text is a sentence of a context-free grammar, in Lark's syntax; it begins at `start`."""

    lark: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STRUCTURE_CHARACTERS)]


Structure = JsonObject | JsonSchema | Regex | Grammar


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen, and when to stop. Every default but the temperature's is "off".

    `temperature` 0 is greedy. `top_k` 0 is off. `min_p` drops tokens less likely
    than that share of the likeliest one. `seed` makes a sampled text repeatable.

    `presence_penalty` and `frequency_penalty` are OpenAI's: of the generated
    tokens. `repetition_penalty` is the one of `transformers`: of prompt and
    generated tokens. `logit_bias` is added to the logits of its token ids.

    `stop` strings end the text before the match, which is never sent; so do
    `stop_token_ids`. `min_tokens` come before any end but `max_tokens`.
    `ignore_eos` makes the end-of-text token one like any other.

    `top_logprobs` asks for log probabilities: None is off, 0 is the chosen
    token's alone. They are of the model's own distribution, before temperature,
    penalties, bias and structure, as OpenAI reports them.

    `structure` is what the text must match. It ends where nothing more can follow.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegative = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    seed: int | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: Annotated[dict[TokenId, LogitBias], msgspec.Meta(max_length=1024)] = {}
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=64)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=64)] = ()
    min_tokens: NonNegative = 0
    ignore_eos: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    structure: Structure | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue, as token ids. `cache` "bypass" neither reads nor writes shared blocks.

    A lower `priority` goes first, as in vLLM: it is admitted before others, computed
    before them and preempted after them.

    `adapter` is one of the card's; None is the model itself.

    `n` texts are generated from the prompt, which is computed once. A seeded
    request's choice k is the text of a request of its own whose seed is
    `sampling.choice_seed(seed, k)`; choice 0 has the request's seed.
    """

    request_id: str
    scope: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})+$")]
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling: SamplingParams
    cache: CacheMode = "automatic"
    adapter: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    priority: Annotated[int, msgspec.Meta(ge=-8, le=8)] = 0


class TierTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens found in cache, by the tier that held them."""

    device: NonNegative = 0

    @property
    def total(self) -> int:
        return self.device


class Missed(msgspec.Struct, frozen=True, kw_only=True):
    """The first prompt token that was not found in cache, and why."""

    reason: MissedReason
    token_index: NonNegative


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started", omit_defaults=True):
    """Counts frozen at first admission: `cached.total + uncached` is the prompt.

    `uncached` tokens are computed by this worker, no more and no fewer. `missed` is None where
    nothing that is or was in cache was missed.
    """

    cached: TierTokens
    uncached: NonNegative
    missed: Missed | None = None

    @property
    def prompt(self) -> int:
        return self.cached.total + self.uncached


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """How many of the uncached prompt tokens are computed so far: what a hang-up before the first token cost.

    Sent after each chunk but the last, and never less than before; the first `Token` says that all
    of them are.
    """

    computed_tokens: NonNegative


class TokenChance(msgspec.Struct, frozen=True, kw_only=True):
    """A token and the natural logarithm of its probability.

    `text_bytes` is what the token stands for, which can be a part of a character;
    in JSON it is Base64.
    """

    token_id: TokenId
    text_bytes: bytes
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token's chance and the likeliest ones', falling; the chosen one need not be among them."""

    chosen: TokenChance
    top: list[TokenChance]


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token", omit_defaults=True):
    """Tokens generated since the last event of this choice, and the text they completed.

    `text` can be empty while a character or a possible stop string is incomplete.
    `logprobs` has one entry for each of `token_ids` where the request asked for them.
    """

    token_ids: list[TokenId]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    choice: NonNegative = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished", omit_defaults=True):
    """The normal end of a choice. `text` is what was held back; `output_tokens` is what it generated in all.

    `matched` is the stop string or the one of `stop_token_ids` that ended the
    text; None where the model, a complete structure or a limit did.
    """

    reason: FinishReason
    text: str
    output_tokens: NonNegative
    matched: str | TokenId | None = None
    choice: NonNegative = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The abnormal end of all choices: the texts so far stand, no more comes."""

    code: FailureCode
    message: str


Event = Started | Prefilled | Token | Finished | Failed


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a non-200 answer to `POST /v1/generate`. Nothing was computed."""

    code: RefusalCode
    message: str


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/card`: who this worker is. A new `epoch` means that every block of the old one is gone.

    `uncached_reason` says why no prompt is ever found in cache here; None where prompts can be.
    `adapters` are models of their own beside it: the fingerprint of each, by name. `exact` is whether
    logits, keys and values are the same bits with reuse as without, and none are lost: keys and values
    are kept as they are (`kv_codec` "none") and not packed.
    """

    model: str
    fingerprint: str
    dtype: str
    device: str
    vocab_size: int
    context_window_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    epoch: str
    uncached_reason: str | None = None
    adapters: dict[str, str] = {}
    kv_codec: str = "none"
    exact: bool = False
    protocol_version: int = PROTOCOL_VERSION

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of every model that can be asked for here, by name."""
        return {self.model: self.fingerprint} | self.adapters


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/stats`: counters since start, and the instant's block states (free + cached + held = total).

    `prompt_tokens_computed` counts each prompt token's first computation; what
    a preemption made the worker compute again is in `tokens_recomputed`.
    `kv_bytes_per_conversation` is what a running sequence holds on average, 0
    when none runs; what several share is counted once. `epoch` is the card's: counters begin anew with
    each. `step_tokens` is the most that one step computes.
    """

    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_total: int
    kv_bytes_held: int
    kv_bytes_per_token: int
    kv_bytes_per_conversation: int
    sequences_running: int
    sequences_waiting: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    tokens_recomputed: int
    output_tokens: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    preemptions: int
    steps: int
    epoch: str = ""
    step_tokens: int = 0


class DurationCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by how long: `blocks[i]` took less than `upper_seconds[i]`, and no less than the one before."""

    upper_seconds: list[float]
    blocks: list[NonNegative]
    mean_seconds: float

    @property
    def total(self) -> int:
        return sum(self.blocks)


class ScopeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one scope did to the cache since start. `scope` is as the gateway made it, or `OTHER_SCOPES`.

    A query is one look-up of a prompt. A block is wasted when it left without having been read once.
    """

    scope: str
    queries: NonNegative
    query_tokens: NonNegative
    hit_queries: NonNegative
    hit_tokens: NonNegative
    stored_blocks: NonNegative
    resident_blocks: int
    evicted_blocks: NonNegative
    wasted_blocks: NonNegative
    misses: dict[str, NonNegative]


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix: its name in hexadecimal, its length, and how many prompts found all of it.

    `scope` is empty for a public one, which `num_scopes` scopes go on from.
    """

    name: str
    scope: str
    num_scopes: NonNegative
    num_tokens: NonNegative
    hits: NonNegative
    idle_seconds: float


class StandingPin(msgspec.Struct, frozen=True, kw_only=True):
    """A promise: the first tokens of a prompt stay, until `seconds_left` are over; None is for ever."""

    scope: str
    num_tokens: NonNegative
    ttl_seconds: float | None
    seconds_left: float | None


OTHER_SCOPES = "other"
"""The row of all scopes that have none of their own."""


class CacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/statistics`: what the cache did since start, and what it holds now. Bounded.

    Rows of `scopes` add up to `total`: those that hold the most, then `OTHER_SCOPES`. Tiers are those
    of `TierTokens`; blocks of `block_size` tokens lie in each.
    """

    block_size: int
    kv_bytes_per_token: int
    kv_bytes_held: int
    kv_bytes_per_conversation: int
    sequences_running: int
    uptime_seconds: float
    total: ScopeStatistics
    scopes: list[ScopeStatistics]
    reuse_gap: DurationCounts
    idle_before_eviction: DurationCounts
    prefixes: list[HotPrefix]
    pins: list[StandingPin]
    resident_blocks_by_tier: dict[str, NonNegative]


_EVENT_DECODER = msgspec.json.Decoder(Event)
_ENCODER = msgspec.json.Encoder()


def encode_event(event: Event) -> bytes:
    """One line of the event stream, newline included."""
    return _ENCODER.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Raises `msgspec.DecodeError` or `msgspec.ValidationError` when the line is no event."""
    return _EVENT_DECODER.decode(line)


def decode_events(lines: Iterable[bytes]) -> list[Event]:
    """Decodes complete lines, for tests and tools."""
    return [decode_event(line) for line in lines if line.strip()]


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What `GET /v1/files/{name}` serves: enough to render and tokenise exactly as the model expects."""
