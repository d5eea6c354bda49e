"""OpenAI's chat completions dialect: bytes to a `CanonicalRequest`, events to bytes.

Pure functions. Knows the dialect's fields, which of them are honoured, and its
JSON shapes. Does not know HTTP, keys, token ids or the model's limits. A field
that cannot be honoured is refused by name, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.edge import dialect, json_body
from gateway.edge.canonical import (
    AnswerHead,
    CanonicalRequest,
    EndedText,
    Ending,
    FinishReason,
    Message,
    OutputLimit,
    Role,
    Sampling,
    UsageCounts,
)
from gateway.edge.dialect import ErrorAnswer
from gateway.edge.errors import ApiError, InvalidRequest, UnknownParameter, UnsupportedParameter

JSON_TYPE: Final = dialect.JSON_TYPE
DONE_EVENT: Final = b"data: [DONE]\n\n"
MAX_CHOICES: Final = 128
MAX_MESSAGES: Final = 2048
MAX_STOP_STRINGS: Final = 4
MAX_STOP_CHARACTERS: Final = 256

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Limit = Annotated[int, Meta(ge=1, le=2**63 - 1)]
ShortText = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)]


# --- requests -------------------------------------------------------------------------------------


class _StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    """`annotations` never reach a model, so whatever a client echoes there is accepted."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: ShortText | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    refusal: Any = None
    tool_call_id: Any = None
    tool_calls: Any = None


class _ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=MAX_MESSAGES)]

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    metadata: Metadata | None = None

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    logit_bias: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_CHAT_DECODER: Final = msgspec.json.Decoder(_ChatRequest)

# Values that ask for what happens anyway; `null` is one everywhere. Any other value is refused by
# the field's name.
_INERT_VALUES: Final[dict[str, tuple[object, ...]]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "store": (False,),
    "parallel_tool_calls": (),
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_UNSUPPORTED_MESSAGE_FIELDS: Final = ("audio", "function_call", "refusal", "tool_call_id", "tool_calls")
_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}


def parse_chat(body: bytes) -> CanonicalRequest:
    """Reads `POST /v1/chat/completions`. Raises `InvalidRequest` (or a subclass) that names the
    field at fault.
    """
    wire = _decode(body)
    _refuse_unsupported(wire)
    stream = wire.stream is True
    if wire.stream_options is not None and not stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )
    return CanonicalRequest(
        model=wire.model,
        messages=tuple(
            _message(f"messages[{index}]", message) for index, message in enumerate(wire.messages)
        ),
        sampling=_sampling(wire),
        limit=_limit(wire),
        stream=stream,
        include_usage=wire.stream_options is not None and wire.stream_options.include_usage is True,
        affinity=wire.prompt_cache_key or wire.user,
        cache_salt=(wire.cache_salt or "").encode(),
        num_choices=wire.n or 1,
    )


def _decode(body: bytes) -> _ChatRequest:
    try:
        return _CHAT_DECODER.decode(body)
    except msgspec.ValidationError as error:
        refuse_invalid(str(error))
    except msgspec.DecodeError:
        raise json_body.explain_malformed(body) from None
    except RecursionError:
        raise json_body.too_deep() from None


def refuse_invalid(text: str) -> NoReturn:
    """What a validation message of msgspec says, as an `InvalidRequest` that names the field."""
    sentence, path = json_body.split_validation_message(text)
    if (name := json_body.field_named_by(sentence, "unknown")) is not None:
        path = f"{path}.{name}" if path else name
        raise UnknownParameter(f"Unknown parameter: '{path}'.", param=path) from None
    if (name := json_body.field_named_by(sentence, "missing")) is not None:
        path = f"{path}.{name}" if path else name
        raise InvalidRequest(
            f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter"
        ) from None
    path = path or json_body.WHOLE_BODY
    raise InvalidRequest(
        f"Invalid value for '{path}': {sentence}.", param=path, code="invalid_value"
    ) from None


def _refuse_unsupported(wire: _ChatRequest) -> None:
    for name, inert in _INERT_VALUES.items():
        value = getattr(wire, name)
        if value is not None and value not in inert:
            raise UnsupportedParameter(f"'{name}' is not supported with this value.", param=name)


def _message(path: str, wire: _Message) -> Message:
    role = _ROLES.get(wire.role)
    if role is None:
        known = ", ".join(f"'{name}'" for name in _ROLES)
        raise InvalidRequest(
            f"Invalid value for '{path}.role': supported roles are {known}.",
            param=f"{path}.role",
            code="invalid_value",
        )
    for name in _UNSUPPORTED_MESSAGE_FIELDS:
        if getattr(wire, name) not in (None, []):
            raise UnsupportedParameter(f"'{path}.{name}' is not supported.", param=f"{path}.{name}")
    return Message(role=role, text=_text(f"{path}.content", wire.content), name=wire.name)


def _text(path: str, content: str | list[dict[str, Any]] | None) -> str:
    """Parts are separate texts, so they are joined by a line end: "Hello" and "world" do not become
    one word.
    """
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(
            f"'{path}' must be a text or a list of text parts.", param=path, code="invalid_value"
        )
    return "\n".join(_part_text(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part_text(path: str, part: dict[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"'{path}.type' must be a text.", param=f"{path}.type", code="invalid_value")
    if kind != "text":
        raise UnsupportedParameter(
            f"This model reads text only: '{path}' is of type '{kind[:64]}'.", param=path
        )
    for name, value in part.items():
        if name not in ("type", "text") and value is not None:
            raise UnsupportedParameter(f"'{path}.{name[:64]}' is not supported.", param=f"{path}.{name[:64]}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{path}.text' must be a text.", param=f"{path}.text", code="invalid_value")
    return text


def _sampling(wire: _ChatRequest) -> Sampling:
    temperature = 1.0 if wire.temperature is None else wire.temperature
    top_p = 1.0 if wire.top_p is None else wire.top_p
    if top_p == 0.0:
        # An empty nucleus keeps the likeliest token alone, which is what greedy means.
        temperature, top_p = 0.0, 1.0
    top_k = wire.top_k if wire.top_k is not None and wire.top_k > 0 else 0
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=wire.seed, stop=_stop(wire.stop))


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"'stop' holds more than {MAX_STOP_STRINGS} strings.", param="stop", code="invalid_value"
        )
    for index, text in enumerate(strings):
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            path = "stop" if isinstance(stop, str) else f"stop[{index}]"
            raise InvalidRequest(
                f"'{path}' must have 1 to {MAX_STOP_CHARACTERS} characters.", param=path, code="invalid_value"
            )
    return strings


def _limit(wire: _ChatRequest) -> OutputLimit | None:
    old, new = wire.max_tokens, wire.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' disagree: send only the latter.", param="max_tokens"
        )
    if new is not None:
        return OutputLimit(tokens=new, param="max_completion_tokens")
    return OutputLimit(tokens=old, param="max_tokens") if old is not None else None


# --- answers --------------------------------------------------------------------------------------


class _PromptDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int
    audio_tokens: int = 0


class _CompletionDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class _Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails
    completion_tokens_details: _CompletionDetails = _CompletionDetails()


class _AnswerMessage(Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None
    annotations: tuple[()] = ()


class _Choice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: _AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason


class _Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str = "default"
    choices: tuple[_Choice, ...]
    usage: _Usage


class _Delta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChunkChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    delta: _Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class _Chunk(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str = "default"
    choices: tuple[_ChunkChoice, ...]
    usage: _Usage | UnsetType | None


class _Error(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(Struct, frozen=True, kw_only=True):
    error: _Error


class _Model(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "headstart"


class _ModelList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[_Model]


_ENCODER: Final = msgspec.json.Encoder()


def _usage(counts: UsageCounts) -> _Usage:
    """OpenAI's counts are inclusive: cached and written tokens are parts of `prompt_tokens`."""
    return _Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.output,
        total_tokens=counts.total,
        prompt_tokens_details=_PromptDetails(cached_tokens=counts.read, cache_write_tokens=counts.written),
    )


def encode_completion(head: AnswerHead, *, texts: Sequence[EndedText], counts: UsageCounts) -> bytes:
    """The whole answer of a request without `stream`: each choice's text and why it ended, in order."""
    return _ENCODER.encode(
        _Completion(
            id=_completion_id(head),
            created=head.created,
            model=head.model,
            system_fingerprint=_system_fingerprint(head),
            choices=tuple(
                _Choice(
                    index=index,
                    message=_AnswerMessage(content=ended.text),
                    finish_reason=ended.ending.reason,
                )
                for index, ended in enumerate(texts)
            ),
            usage=_usage(counts),
        )
    )


class ChunkEncoder:
    """The server-sent events of one streamed answer: for each choice role, texts and finish, then usage
    when it was asked for.
    """

    __slots__ = ("_absent_usage", "_head", "_include_usage")

    def __init__(self, head: AnswerHead, *, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._absent_usage: UnsetType | None = None if include_usage else UNSET

    def begin(self, num_choices: int, promised: UsageCounts) -> bytes:
        return b"".join(
            self._chunk(_ChunkChoice(index=choice, delta=_Delta(role="assistant", content="")))
            for choice in range(num_choices)
        )

    def progress(self) -> bytes:
        return b""

    def text(self, choice: int, text: str) -> bytes:
        return self._chunk(_ChunkChoice(index=choice, delta=_Delta(content=text)))

    def finish(self, choice: int, ending: Ending) -> bytes:
        return self._chunk(_ChunkChoice(index=choice, delta=_Delta(), finish_reason=ending.reason))

    def end(self, counts: UsageCounts) -> bytes:
        usage = self._event((), _usage(counts)) if self._include_usage else b""
        return usage + DONE_EVENT

    def _chunk(self, choice: _ChunkChoice) -> bytes:
        return self._event((choice,), self._absent_usage)

    def _event(self, choices: tuple[_ChunkChoice, ...], usage: _Usage | UnsetType | None) -> bytes:
        chunk = _Chunk(
            id=_completion_id(self._head),
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=_system_fingerprint(self._head),
            choices=choices,
            usage=usage,
        )
        return b"data: " + _ENCODER.encode(chunk) + b"\n\n"


def encode_error(error: ApiError) -> bytes:
    body = _Error(message=error.message, type=error.type, param=error.param, code=error.code)
    return _ENCODER.encode(_ErrorBody(error=body))


def encode_error_event(error: ApiError) -> bytes:
    """Ends a stream that has begun: the official clients raise on it, and no `[DONE]` follows."""
    return b"data: " + encode_error(error) + b"\n\n"


class ChatCompletions:
    """`POST /v1/chat/completions`."""

    endpoint: Final = "chat_completions"

    def parse(self, body: bytes, headers: Mapping[str, str]) -> CanonicalRequest:
        return parse_chat(body)

    def stream(self, head: AnswerHead, request: CanonicalRequest) -> ChunkEncoder:
        return ChunkEncoder(head, include_usage=request.include_usage)

    def whole(self, head: AnswerHead, texts: Sequence[EndedText], counts: UsageCounts) -> bytes:
        return encode_completion(head, texts=texts, counts=counts)

    def headers(self, request_id: str, elapsed_ms: float) -> dict[str, str]:
        return {"x-request-id": request_id, "openai-processing-ms": str(round(elapsed_ms))}

    def error(self, error: ApiError, request_id: str) -> ErrorAnswer:
        headers = {"x-request-id": request_id, **error.headers}
        return ErrorAnswer(status=error.status, headers=headers, body=encode_error(error))

    def error_event(self, error: ApiError, request_id: str) -> bytes:
        return encode_error_event(error)


def encode_model(name: str, *, created: int) -> bytes:
    return _ENCODER.encode(_Model(id=name, created=created))


def encode_models(names: list[str], *, created: int) -> bytes:
    return _ENCODER.encode(_ModelList(data=[_Model(id=name, created=created) for name in names]))


def _completion_id(head: AnswerHead) -> str:
    return f"chatcmpl-{head.request_id}"


def _system_fingerprint(head: AnswerHead) -> str:
    return f"fp_{head.fingerprint[:16]}"
