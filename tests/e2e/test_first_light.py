"""The main job on the real model, through the official client: computed once, billed once."""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
import subprocess

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from model_worker.protocol import WorkerStats
from tests.e2e.conftest import Product, wait_until

WORDS = [
    "river",
    "stone",
    "cloud",
    "garden",
    "window",
    "letter",
    "bridge",
    "market",
    "forest",
    "engine",
    "paper",
    "island",
]


def long_conversation(seed: int, words: int = 260) -> list[ChatCompletionMessageParam]:
    """A long system prompt and one question; different for each seed from the first word on."""
    rng = random.Random(seed)
    story = " ".join(rng.choice(WORDS) for _ in range(words))
    return [
        {"role": "system", "content": f"{seed}: you answer in one short sentence. Notes: {story}."},
        {"role": "user", "content": "Name one thing from the notes."},
    ]


def complete(
    client: openai.OpenAI, model: str, messages: list[ChatCompletionMessageParam], max_tokens: int = 12
) -> tuple[ChatCompletion, str]:
    """The answer and its request id."""
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, temperature=0, max_tokens=max_tokens
    )
    return raw.parse(), raw.headers["x-request-id"]


def cached_tokens(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    cached = completion.usage.prompt_tokens_details.cached_tokens
    assert cached is not None, "0 is sent, never left out"
    return cached


def prompt_tokens(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    return completion.usage.prompt_tokens


def test_the_second_time_is_a_hit_with_the_same_text_and_a_smaller_bill(product: Product) -> None:
    client, messages = product.client(), long_conversation(1)
    before = product.stats().prompt_tokens_computed
    cold, cold_id = complete(client, product.model, messages)
    between = product.wait_for_stats(lambda stats: not stats.sequences_running).prompt_tokens_computed
    warm, warm_id = complete(client, product.model, messages)
    after = product.wait_for_stats(lambda stats: not stats.sequences_running).prompt_tokens_computed

    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert cold.choices[0].message.content
    assert cached_tokens(warm) > 0.9 * prompt_tokens(warm)
    for completion, computed, request_id in [
        (cold, between - before, cold_id),
        (warm, after - between, warm_id),
    ]:
        assert computed == prompt_tokens(completion) - cached_tokens(completion)
        event = product.event_of(request_id)
        assert event["uncached_tokens"] == computed
        assert event["read_tokens"] == cached_tokens(completion)


def test_several_choices_pay_for_their_prompt_once(product: Product) -> None:
    before = product.stats()
    raw = product.client().chat.completions.with_raw_response.create(
        model=product.model, messages=long_conversation(5), temperature=1, seed=7, max_tokens=8, n=4
    )
    answer, request_id = raw.parse(), raw.headers["x-request-id"]
    after = product.wait_for_stats(lambda stats: not stats.sequences_running)
    assert answer.usage is not None
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
    event = product.event_of(request_id)
    computed = after.prompt_tokens_computed - before.prompt_tokens_computed
    assert event["uncached_tokens"] == computed == prompt_tokens(answer) - cached_tokens(answer)
    generated = after.output_tokens - before.output_tokens
    assert event["output_tokens"] == generated == answer.usage.completion_tokens
    assert generated > 8


def test_a_second_turn_pays_for_what_is_new(product: Product) -> None:
    client, messages = product.client(), long_conversation(2)
    first, _ = complete(client, product.model, messages)
    answer = first.choices[0].message.content or ""
    turn: list[ChatCompletionMessageParam] = [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And another?"},
    ]
    second, _ = complete(client, product.model, turn)
    assert cached_tokens(second) >= prompt_tokens(first)


def test_two_tenants_share_nothing_and_one_tenant_does(product: Product) -> None:
    messages = long_conversation(3)
    mine, others = product.client(), product.client(product.new_tenant("other"))
    complete(mine, product.model, messages)
    stranger, _ = complete(others, product.model, messages)
    same, _ = complete(mine, product.model, messages)
    assert cached_tokens(stranger) == 0
    assert cached_tokens(same) == prompt_tokens(same) - 1


def stream_text(client: openai.OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> str:
    chunks = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts, usages = [], []
    for chunk in chunks:
        usages.append(chunk.usage)
        parts += [choice.delta.content or "" for choice in chunk.choices]
    assert usages[-1] is not None
    assert usages[:-1] == [None] * (len(usages) - 1)
    return "".join(parts)


def test_eight_conversations_stream_at_once_and_each_is_its_text_alone(product: Product) -> None:
    client = product.client()
    conversations = [long_conversation(100 + seed, words=60) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda one: stream_text(client, product.model, one), conversations))
    stats = product.wait_for_stats(lambda stats: stats.blocks_held == 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    alone = [stream_text(client, product.model, one) for one in conversations]
    assert together == alone
    assert len(set(together)) > 1


def hang_up(product: Product, *, stream: bool, after_first_token: bool, seed: int) -> None:
    """Asks for a long answer with curl, and kills curl before or after the first token."""
    body = {
        "model": product.model,
        "messages": long_conversation(seed, words=900),
        "max_tokens": 3000,
        "stream": stream,
    }
    before = product.stats()
    curl = ["curl", "-sN", f"{product.base_url}/chat/completions"]
    curl += ["-H", f"Authorization: Bearer {product.api_key}", "-H", "Content-Type: application/json"]
    process = subprocess.Popen([*curl, "--data-binary", json.dumps(body)], stdout=subprocess.DEVNULL)

    def far_enough(stats: WorkerStats) -> bool:
        if after_first_token:
            return stats.output_tokens >= before.output_tokens + 2
        return stats.sequences_running > 0

    product.wait_for_stats(far_enough)
    process.kill()
    process.wait()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first_token", [True, False])
def test_a_hang_up_stops_the_worker_and_leaves_one_event(
    product: Product, stream: bool, after_first_token: bool
) -> None:
    product.wait_until_posted()
    before, events_before = product.stats(), product.events()
    seed = 200 + 2 * stream + after_first_token
    hang_up(product, stream=stream, after_first_token=after_first_token, seed=seed)
    stats = product.wait_for_stats(lambda stats: stats.requests_cancelled > before.requests_cancelled)
    assert stats.blocks_held == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.output_tokens - before.output_tokens < 100, "3,000 were asked for"
    events = wait_until(product.events, lambda events: len(events) > len(events_before))
    [event] = events[len(events_before) :]
    assert event["kind"] == "aborted"
    assert event["output_tokens"] <= stats.output_tokens - before.output_tokens
    assert (event["output_tokens"] > 0) == after_first_token


def test_the_report_adds_up_to_the_events(product: Product) -> None:
    principal = product.event_of(complete(product.client(), product.model, long_conversation(4))[1])
    tenant = [event for event in product.events() if event["tenant_id"] == principal["tenant_id"]]
    report = product.headstart("usage", "--tenant", "default")
    for row, column in [
        ("uncached", "uncached_tokens"),
        ("cached", "read_tokens"),
        ("output", "output_tokens"),
    ]:
        total = sum(int(event[column]) for event in tenant)
        assert re.search(rf"{row} tokens\W+{total:,} ", report), (row, total, report)
    assert re.search(rf"requests\W+{len(tenant):,} ", report)


def test_the_worker_counted_what_was_billed(product: Product) -> None:
    """After all that came before, hang-ups included."""
    complete(product.client(), product.model, long_conversation(5))
    product.wait_until_posted()
    product.wait_for_stats(lambda stats: stats.sequences_running + stats.sequences_waiting == 0)
    run = json.loads(product.headstart("billing", "reconcile", "--json", "--worker-url", product.worker_url))
    assert (run["differences"], run["not_compared"]) == ([], [])


def test_no_prompt_text_in_the_log(product: Product) -> None:
    assert "Name one thing" not in product.log.read_text(errors="replace")
