"""OpenAI's dialect: what is read, what is refused and by which name, and what is written."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.edge import openai
from gateway.edge.canonical import (
    AnswerHead,
    EndedText,
    Ending,
    FinishReason,
    Message,
    OutputLimit,
    UsageCounts,
)
from gateway.edge.errors import ApiError, InvalidRequest, Unauthenticated

HEAD = AnswerHead(request_id="0190", created=1_700_000_000, model="tiny", fingerprint="ab" * 16)
COUNTS = UsageCounts(uncached=3, read=40, written=0, output=7)


ASK = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}]'


def body(**fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def messages(*wire: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": list(wire)}).encode()


def refusal(raw: bytes) -> ApiError:
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_chat(raw)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_the_smallest_request_gets_the_dialects_defaults():
    request = openai.parse_chat(body())
    assert request.model == "tiny"
    assert request.messages == (Message(role="user", text="hi"),)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, 0)
    assert request.sampling.seed is None
    assert request.sampling.stop == ()
    assert request.limit is None
    assert not request.stream
    assert not request.include_usage


def test_every_sampling_field_is_honoured():
    request = openai.parse_chat(
        body(temperature=0.5, top_p=0.9, top_k=40, seed=-7, stop=["a", "b"], max_tokens=9, stream=True)
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, -7)
    assert sampling.stop == ("a", "b")
    assert request.limit == OutputLimit(tokens=9, param="max_tokens")
    assert request.stream


def test_null_means_absent_for_every_optional_field():
    names = (
        "temperature top_p top_k seed stop max_tokens max_completion_tokens stream stream_options user "
        "metadata store prompt_cache_key n presence_penalty frequency_penalty logit_bias logprobs "
        "top_logprobs tools tool_choice parallel_tool_calls response_format service_tier reasoning_effort "
        "modalities audio functions verbosity"
    )
    assert openai.parse_chat(body(**dict.fromkeys(names.split()))) == openai.parse_chat(body())


def test_values_that_ask_for_nothing_special_are_accepted():
    inert = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "modalities": ["text"],
        "store": False,
        "metadata": {"team": "a"},
        "user": "u1",
    }
    assert openai.parse_chat(body(**inert)).messages == openai.parse_chat(body()).messages


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("logit_bias", {"50256": -100}),
        ("store", True),
        ("service_tier", "priority"),
        ("reasoning_effort", "high"),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("prompt_cache_options", {"mode": "explicit"}),
        ("web_search_options", {}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name, value):
    error = refusal(body(**{name: value}))
    assert error.param == name
    assert error.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": "x" * 300}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"user": 7}, "user"),
        ({"prompt_cache_key": 7}, "prompt_cache_key"),
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": None}, "messages"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_wrong_value_is_refused_with_its_field_named(fields, param):
    assert refusal(body(**fields)).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "hi"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "robot", "content": "hi"}, "messages[0].role"),
        ({"role": "tool", "content": "hi", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "user", "content": "hi", "name": 7}, "messages[0].name"),
        ({"role": "user", "content": "hi", "mood": "good"}, "messages[0].mood"),
        ({"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "text", "text": "hi", "prompt_cache_breakpoint": {}}]},
            "messages[0].content[0].prompt_cache_breakpoint",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(message, param):
    assert refusal(messages(message)).param == param


def test_an_image_is_refused_by_the_path_of_its_part():
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = refusal(messages({"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}))
    assert error.param == "messages[0].content[1]"
    assert "image_url" in error.message


def test_text_parts_are_joined_by_a_line_end():
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    assert openai.parse_chat(messages({"role": "user", "content": parts})).messages[0].text == "Hello\nworld"


def test_an_answer_sent_back_as_the_sdk_dumps_it_is_accepted():
    echoed = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert openai.parse_chat(messages(echoed)).messages == (Message(role="assistant", text="hi"),)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"not json", "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b"null", "body"),
        (b"{}", "model"),
        (b'{"model": "tiny"}', "messages"),
        (body() + b"}", "body"),
        (b"\xef\xbb\xbf" + body(), "body"),
        (body().decode().encode("utf-16"), "body"),
        (b'{"model": "tiny\xff", "messages": []}', "body"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\udc00b"}]}', "messages[0].content"),
        (b'{"model": "\\ud83d", "messages": []}', "model"),
        (b'{"model": "tiny", "\\ud800": 1, "messages": []}', "body"),
        (ASK + b', "temperature": NaN}', "temperature"),
        (ASK + b', "temperature": -Infinity}', "temperature"),
        (ASK + b', "temperature": 1e999}', "temperature"),
        (ASK + b', "seed": ' + b"9" * 5000 + b"}", "seed"),
        (ASK + b', "tools": [0, "a", {}, {"b": [1, NaN]}]}', "tools[3].b[1]"),
        (ASK + b', "tools": [{"c": {"\\ud800": 1}}]}', "tools[0].c"),
        (b'{"model": "tiny", "messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "messages[0]"),
        (ASK + b', "tools": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "body"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "a"),
        (b"[" * 100_000, "body"),
    ],
)
def test_a_body_that_is_not_sound_json_is_refused(raw, param):
    assert refusal(raw).param == param


def test_as_many_messages_as_openai_takes_are_read_and_not_one_more():
    assert len(openai.parse_chat(messages(*[{"role": "user", "content": ""}] * 2048)).messages) == 2048
    assert refusal(messages(*[{"role": "user", "content": ""}] * 2049)).param == "messages"


def test_an_escaped_surrogate_pair_is_a_character():
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert openai.parse_chat(raw).messages[0].text == "\N{GRINNING FACE}"


def test_a_control_character_in_a_text_is_kept():
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "a\\u0000b"}]}'
    assert openai.parse_chat(raw).messages[0].text == "a\0b"


def test_an_empty_nucleus_is_greedy():
    sampling = openai.parse_chat(body(temperature=1.5, top_p=0)).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_top_k_can_be_said_in_two_ways(top_k):
    assert openai.parse_chat(body(top_k=top_k)).sampling.top_k == 0


def test_max_completion_tokens_is_the_newer_name_of_the_limit():
    request = openai.parse_chat(body(max_completion_tokens=5))
    assert request.limit == OutputLimit(tokens=5, param="max_completion_tokens")
    assert openai.parse_chat(body(max_tokens=5, max_completion_tokens=5)).limit == request.limit


def test_a_cache_key_is_an_affinity_and_comes_before_the_user():
    assert openai.parse_chat(body(user="u", prompt_cache_key="k")).affinity == "k"
    assert openai.parse_chat(body(user="u")).affinity == "u"


def test_a_whole_answer_is_what_the_official_types_expect():
    raw = openai.encode_completion(HEAD, texts=[ended("héllo", "stop")], counts=COUNTS)
    answer = ChatCompletion.model_validate_json(raw, strict=True)
    assert answer.choices[0].message.content == "héllo"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        43,
        7,
        50,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 40


def test_a_known_zero_of_cached_tokens_is_sent():
    raw = openai.encode_completion(
        HEAD, texts=[ended("", "length")], counts=UsageCounts(uncached=5, output=1)
    )
    assert json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_choices_are_numbered_in_order():
    raw = openai.encode_completion(HEAD, texts=[ended("a", "stop"), ended("b", "length")], counts=COUNTS)
    answer = ChatCompletion.model_validate_json(raw, strict=True)
    told = [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert told == [(0, "a", "stop"), (1, "b", "length")]


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, 1), ({"n": None}, 1), ({"n": 1}, 1), ({"n": 128}, 128)]
)
def test_as_many_choices_are_asked_for_as_the_client_wants(fields, expected):
    assert openai.parse_chat(body(**fields)).num_choices == expected


STOP = Ending(reason="stop")


def ended(text: str, reason: FinishReason) -> EndedText:
    return EndedText(text=text, ending=Ending(reason=reason))


def end(encoder: openai.ChunkEncoder) -> bytes:
    """The last chunks without what ends every stream."""
    raw = encoder.end(COUNTS)
    assert raw.endswith(openai.DONE_EVENT)
    return raw.removesuffix(openai.DONE_EVENT)


def chunks(raw: bytes) -> list[dict[str, object]]:
    return [json.loads(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n") if event]


def test_usage_is_null_in_every_chunk_but_the_last_when_it_was_asked_for():
    encoder = openai.ChunkEncoder(HEAD, include_usage=True)
    *before, last = chunks(
        encoder.begin(1, COUNTS) + encoder.text(0, "a") + encoder.finish(0, STOP) + end(encoder)
    )
    assert [chunk["usage"] for chunk in before] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
    for chunk in (*before, last):
        ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


def test_usage_is_absent_from_every_chunk_when_it_was_not_asked_for():
    encoder = openai.ChunkEncoder(HEAD, include_usage=False)
    assert all(
        "usage" not in chunk
        for chunk in chunks(
            encoder.begin(1, COUNTS) + encoder.text(0, "a") + encoder.finish(0, STOP) + end(encoder)
        )
    )


def test_an_error_has_all_four_fields():
    error = Unauthenticated("no", param="authorization")
    assert json.loads(openai.encode_error(error)) == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "authorization",
            "code": "invalid_api_key",
        }
    }
    assert openai.encode_error_event(error) == b"data: " + openai.encode_error(error) + b"\n\n"
