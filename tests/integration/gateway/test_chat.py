"""Chat completions through the official client: texts, counts, headers, isolation."""

from collections.abc import AsyncIterator

import msgspec
import pytest
import structlog

from model_worker.protocol import Finished, GenerateRequest, SamplingParams, Started, TierTokens, Token
from tests.integration.gateway.conftest import Stack
from tests.integration.gateway.scripted_worker import ANSWER, MODEL, WINDOW, Step
from tests.unit.gateway.tiny_tokenizer import decoded

TEXT = "".join(ANSWER)
CONVERSATION = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say hello. " * 10},
]
RENDERED = (
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n"
    + "Say hello. " * 10
    + "<|im_end|>\n<|im_start|>assistant\n"
)


async def ask(stack: Stack, key: str | None = None, **fields: object):
    async with stack.client(key) as client:
        return await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=CONVERSATION, **fields
        )


async def test_the_same_conversation_misses_then_hits_and_is_billed_as_told(stack):
    first, second = await ask(stack), await ask(stack)
    cold, warm = first.parse(), second.parse()
    assert cold.choices[0].message.content == warm.choices[0].message.content == TEXT
    assert cold.choices[0].finish_reason == "stop"
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1
    assert (first.headers["x-headstart-cache"], second.headers["x-headstart-cache"]) == ("miss", "hit")
    assert second.headers["x-headstart-cached-tokens"] == str(warm.usage.prompt_tokens - 1)
    for event, usage in zip(await stack.usage_events(), (cold.usage, warm.usage), strict=True):
        assert event.kind == "final"
        assert event.read_tokens == usage.prompt_tokens_details.cached_tokens
        assert event.uncached_tokens + event.read_tokens == usage.prompt_tokens
        assert event.output_tokens == event.delivered_tokens == usage.completion_tokens == len(ANSWER)
        assert event.finish_reason == "stop"
        assert event.first_token_ns > 0
        assert event.worker == "worker-0"
        assert event.miss_reason == (
            None if usage.prompt_tokens_details.cached_tokens else "no_shared_prefix"
        )


async def test_a_longer_conversation_is_a_partial_hit(stack):
    async with stack.client() as client:
        for messages, status in ((CONVERSATION[:1], "miss"), (CONVERSATION, "partial")):
            answer = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
            assert answer.headers["x-headstart-cache"] == status


async def test_every_answer_says_who_and_how_long(stack):
    headers = (await ask(stack)).headers
    events = await stack.usage_events()
    assert headers["x-request-id"] == str(events[0].request_id)
    assert headers["x-headstart-worker"] == "worker-0"
    assert int(headers["openai-processing-ms"]) >= 0
    assert "server" not in headers


async def test_a_stream_is_the_same_text_with_usage_in_the_last_chunk_alone(stack):
    async with stack.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=CONVERSATION, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *texts, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == TEXT
    assert texts[0].choices[0].delta.role == "assistant"
    assert texts[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in texts)
    assert last.choices == []
    assert last.usage.completion_tokens == len(ANSWER)
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_the_option_has_no_usage_but_is_metered_all_the_same(stack):
    async with stack.client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=CONVERSATION, stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    (event,) = await stack.usage_events()
    assert (event.kind, event.output_tokens, event.delivered_tokens) == ("final", 3, 3)


async def test_a_stream_ends_with_done_and_is_marked_as_not_to_be_kept(stack):
    async with stack.http() as http:
        answer = await http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": CONVERSATION, "stream": True}
        )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["x-headstart-cache"] == "miss"


async def test_the_worker_gets_the_rendered_prompt_and_the_sampling(stack):
    await ask(
        stack,
        temperature=0.25,
        top_p=0.5,
        seed=11,
        stop=["\n\n", "END"],
        max_tokens=17,
        extra_body={"top_k": 3},
    )
    await ask(stack)
    full, plain = (exchange.request for exchange in stack.worker.exchanges)
    assert decoded(full.token_ids) == RENDERED
    assert full.sampling == SamplingParams(
        max_tokens=17, temperature=0.25, top_p=0.5, top_k=3, seed=11, stop=("\n\n", "END")
    )
    assert plain.sampling.max_tokens == WINDOW - len(plain.token_ids), "no limit is up to the window"


async def test_tenants_share_nothing_and_a_tenants_keys_share_all(stack):
    other = stack.new_key("rival")
    statuses = [
        (await ask(stack, key)).headers["x-headstart-cache"] for key in (stack.key, other, stack.key, other)
    ]
    assert statuses == ["miss", "miss", "hit", "hit"]
    mine, theirs, mine_again, _ = (exchange.request for exchange in stack.worker.exchanges)
    assert mine.token_ids == theirs.token_ids
    assert mine.scope == mine_again.scope != theirs.scope


async def test_a_body_cannot_choose_its_scope(stack):
    async with stack.client() as client:
        for fields in ({"user": "someone"}, {"prompt_cache_key": "shared"}):
            await client.chat.completions.create(model=MODEL, messages=CONVERSATION, **fields)
    assert len({exchange.request.scope for exchange in stack.worker.exchanges}) == 1


async def test_a_cache_salt_narrows_a_tenants_cache_and_never_opens_anothers(stack):
    other = stack.new_key("salted")
    salted = {"extra_body": {"cache_salt": "blue"}}
    statuses = [
        (await ask(stack, key, **fields)).headers["x-headstart-cache"]
        for key, fields in (
            (stack.key, {}),
            (stack.key, salted),
            (other, salted),
            (stack.key, salted),
            (stack.key, {}),
            (stack.key, {"extra_body": {"cache_salt": "red"}}),
        )
    ]
    assert statuses == ["miss", "miss", "miss", "hit", "hit", "miss"]


async def test_a_client_may_bypass_the_cache(stack):
    await ask(stack)
    answer = await ask(stack, extra_headers={"x-headstart-cache": "bypass"})
    assert answer.headers["x-headstart-cache"] == "bypass"
    assert answer.parse().usage.prompt_tokens_details.cached_tokens == 0
    assert [exchange.request.cache for exchange in stack.worker.exchanges] == ["automatic", "bypass"]


async def test_models_are_listed_and_found(stack):
    async with stack.client() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_an_adapter_is_a_model_of_its_own(stack):
    fingerprint = "ad" * 16
    stack.worker.card = msgspec.structs.replace(stack.worker.card, adapters={"poet": fingerprint})
    async with stack.client() as client:
        answer = await client.chat.completions.create(model="poet", messages=CONVERSATION)
        await client.chat.completions.create(model=MODEL, messages=CONVERSATION)
        assert [model.id async for model in client.models.list()] == sorted([MODEL, "poet"])
    assert (answer.model, answer.system_fingerprint) == ("poet", f"fp_{fingerprint[:16]}")
    assert [exchange.request.adapter for exchange in stack.worker.exchanges] == ["poet", None]
    assert [event.model for event in await stack.usage_events()] == ["poet", MODEL]


@pytest.mark.parametrize("length", [10, 300])
async def test_texts_of_any_length_arrive_whole(stack, length):
    """Short prompts are encoded on the loop, long ones on a thread."""
    text = "é" * length
    stack.worker.card = (
        stack.worker.card.__replace__(context_window_tokens=10_000) if length > 100 else stack.worker.card
    )
    await stack.gateway.roster.refresh()
    async with stack.client() as client:
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text * 10}])
    assert decoded(stack.worker.exchanges[0].request.token_ids).count("é") == length * 10


async def test_a_model_that_is_never_cached_says_why_in_every_answer(stack):
    assert "x-headstart-cache-reason" not in (await ask(stack)).headers
    reason = "mistral attends within a sliding window of 4096 tokens"
    stack.worker.card = msgspec.structs.replace(stack.worker.card, uncached_reason=reason)
    await stack.gateway.roster.refresh()
    assert (await ask(stack)).headers["x-headstart-cache-reason"] == reason


async def test_metrics_tell_what_happened_and_hold_no_text(stack):
    await ask(stack)
    async with stack.http() as http:
        text = (await http.get("/metrics")).text
    assert 'headstart_requests_total{endpoint="chat_completions",outcome="answered"} 1.0' in text
    assert 'headstart_cache_lookups_total{model="tiny-chat",status="miss"} 1.0' in text
    assert 'headstart_requests_in_flight{endpoint="chat_completions"} 0.0' in text
    assert 'headstart_worker_up{worker="worker-0"} 1.0' in text
    assert "headstart_meter_settled_total 1.0" in text
    assert "Say hello" not in text


async def test_the_log_line_has_ids_and_counts_and_no_text(stack):
    with structlog.testing.capture_logs() as lines:
        answer = await ask(stack, extra_headers={"x-request-id": 'evil"} {"level": "error'})
        await ask(stack, extra_headers={"x-request-id": "job-7"})
    first, second = (line for line in lines if line["event"] == "request")
    assert first["request_id"] == answer.headers["x-request-id"]
    assert (first["outcome"], first["status"], first["output_tokens"]) == ("answered", 200, 3)
    assert first["client_request_id"] is None
    assert second["client_request_id"] == "job-7"
    assert "hello" not in str(lines).lower()
    assert stack.key not in str(lines)


async def two_choices(request: GenerateRequest) -> AsyncIterator[Step]:
    """The first ends after two tokens, the second after three."""
    assert request.n == 2
    yield Started(cached=TierTokens(device=0), uncached=len(request.token_ids))
    for choice, text in ((0, "a"), (1, "b"), (1, "c")):
        yield Token(token_ids=[1], text=text, choice=choice)
    yield Finished(reason="stop", text="!", output_tokens=2)
    yield Finished(reason="length", text="?", output_tokens=3, choice=1)


async def test_several_choices_are_one_answer_and_one_usage_event(stack):
    stack.worker.script = two_choices
    whole = (await ask(stack, n=2)).parse()
    assert [choice.message.content for choice in whole.choices] == ["a!", "bc?"]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "length"]
    async with stack.client() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=CONVERSATION, stream=True, n=2)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["a!", "bc?"]
    for event in await stack.usage_events():
        assert (event.kind, event.finish_reason) == ("final", "length")
        assert event.uncached_tokens + event.read_tokens == whole.usage.prompt_tokens
        assert event.output_tokens == event.delivered_tokens == whole.usage.completion_tokens == 5
