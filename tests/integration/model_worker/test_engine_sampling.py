"""What sampling parameters do to whole texts, from request to events."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import msgspec
import pytest
import torch
from starlette.applications import Starlette

from model_worker import structured
from model_worker.engine import RequestRefused
from model_worker.models import LoadedModel
from model_worker.protocol import (
    Failed,
    Finished,
    GenerateRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Refusal,
    Regex,
    SamplingParams,
    Structure,
    Token,
    TokenLogprobs,
    decode_events,
)
from model_worker.server import create_app
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker
from tests.engines import EngineDriver, Generation, prompt_of, running_engine
from tests.near_ties import greedy_of, plain_twin

END = 256
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
    }
)


@pytest.fixture(scope="module")
def plain(tiny_model: LoadedModel) -> LoadedModel:
    """The tiny model with the attention of `transformers`."""
    return plain_twin(tiny_model)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.7, "min_tokens": 9}, {"repetition_penalty": 0.7, "min_new_tokens": 9}),
        ({"logit_bias": {7: 30.0, 9: -80.0}}, {"sequence_bias": [[[7], 30.0], [[9], -80.0]]}),
    ],
)
def test_greedy_texts_are_those_of_transformers(
    driver: EngineDriver, plain: LoadedModel, ours: dict[str, object], theirs: dict[str, object]
) -> None:
    for seed in range(3):
        prompt = prompt_of(20 + seed, seed)
        expected = greedy_of(plain, prompt, 12, **theirs)
        assert driver.generate(prompt, max_tokens=12, **ours).tokens == expected


def logprobs_of(generation: Generation) -> list[TokenLogprobs]:
    return [
        entry for event in generation.events if isinstance(event, Token) for entry in event.logprobs or ()
    ]


def test_log_probabilities_are_those_of_a_plain_forward_pass(
    driver: EngineDriver, plain: LoadedModel
) -> None:
    prompt = prompt_of(25)
    options: dict[str, object] = {"temperature": 1.3, "seed": 4, "max_tokens": 10, "ignore_eos": True}
    generation = driver.generate(prompt, top_logprobs=3, frequency_penalty=0.5, **options)
    with torch.inference_mode():
        logits = plain.network(torch.tensor([prompt + generation.tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(1)
    entries = logprobs_of(generation)
    assert [entry.chosen.token_id for entry in entries] == generation.tokens
    for row, entry in zip(expected, entries, strict=True):
        assert entry.chosen.logprob == pytest.approx(float(row[entry.chosen.token_id]), abs=1e-3)
        assert [one.logprob for one in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
    text = b"".join(entry.chosen.text_bytes for entry in entries).decode(errors="replace")
    assert text.startswith(generation.text)
    assert logprobs_of(driver.generate(prompt, **options)) == []


def test_a_stop_token_ends_the_text_before_it_and_is_named(driver: EngineDriver) -> None:
    prompt = prompt_of(20)
    free = driver.generate(prompt, max_tokens=20, ignore_eos=True)
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    ended = driver.generate(prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(stop, 300 % 257))
    assert ended.tokens == free.tokens[: first + 1]
    assert free.text.startswith(ended.text)
    assert isinstance(ended.end, Finished)
    assert (ended.end.reason, ended.end.matched) == ("stop", stop)
    later = driver.generate(
        prompt, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,), min_tokens=first + 1
    )
    assert len(later.tokens) > first + 1


def test_a_stop_string_is_named_when_it_ends_the_text(driver: EngineDriver) -> None:
    free = driver.generate(prompt_of(20), max_tokens=40, ignore_eos=True)
    stop = free.text[10:13]
    ended = driver.generate(prompt_of(20), max_tokens=40, ignore_eos=True, stop=("never this", stop))
    assert isinstance(ended.end, Finished)
    assert (ended.end.reason, ended.end.matched) == ("stop", stop)


def requests(count: int) -> list[tuple[Structure, dict[str, object]]]:
    kinds: list[Structure] = [
        JsonSchema(json_schema=SCHEMA),
        Regex(pattern=r"[a-d]{3,12}(é|🎉){1,3}-[0-9]{2}"),
        Grammar(lark='start: item ("+" item){1,3}\nitem: /[0-9]{1,4}/ | "(" item ")"'),
    ]
    return [
        (
            kinds[seed % 3],
            {"temperature": 1.5, "seed": seed, "max_tokens": 90, "repetition_penalty": 1.0 + seed % 2 / 5},
        )
        for seed in range(count)
    ]


def assert_matches(structure: Structure, generation: Generation) -> None:
    assert isinstance(generation.end, Finished), generation.end
    assert generation.end.reason == "stop"
    match structure:
        case JsonSchema():
            value = json.loads(generation.text)
            assert set(value) == {"name", "age", "tags"}
            assert len(value["name"]) <= 4
            assert 0 <= value["age"] <= 150
            assert set(value["tags"]) <= {"a", "é"}
        case Regex(pattern=pattern):
            assert re.fullmatch(pattern, generation.text)
        case Grammar():
            assert re.fullmatch(r"[0-9()+]+", generation.text)
            eval(generation.text.replace("0", "1"), {})  # balanced, and a sum
        case JsonObject():
            assert isinstance(json.loads(generation.text), dict)


def test_a_hundred_structured_texts_match_while_others_take_their_blocks(tiny_model: LoadedModel) -> None:
    wanted = requests(100)
    with running_engine(tiny_model, kv_cache_blocks=48, max_running=16) as driver:
        together = [
            driver.submit(prompt_of(40, seed), structure=structure, **options)
            for seed, (structure, options) in enumerate(wanted)
        ]
        for (structure, _), generation in zip(wanted, together, strict=True):
            assert_matches(structure, generation.wait())
        assert driver.idle_stats().preemptions > 0
    with running_engine(tiny_model, kv_cache_blocks=256) as driver:
        for seed in range(0, 100, 19):
            structure, options = wanted[seed]
            alone = driver.generate(prompt_of(40, seed), structure=structure, **options)
            assert alone.tokens == together[seed].tokens, "a preemption changes no text"


def test_a_greedy_structured_text_ends_where_it_is_complete(driver: EngineDriver) -> None:
    for ignore_eos in (False, True):
        generation = driver.generate(
            prompt_of(30), max_tokens=50, structure=Regex(pattern="(yes|no)!{3}"), ignore_eos=ignore_eos
        )
        assert re.fullmatch("(yes|no)!{3}", generation.text)
        assert isinstance(generation.end, Finished)
        assert generation.end.reason == "stop"
        assert END not in generation.tokens


def test_where_the_structure_may_end_the_model_decides_after_min_tokens(driver: EngineDriver) -> None:
    eager = {"structure": Regex(pattern="a*"), "logit_bias": {END: 100.0}, "max_tokens": 9}
    assert driver.generate(prompt_of(30), **eager).text == ""
    assert driver.generate(prompt_of(30), **eager, min_tokens=4).text == "aaaa"
    forced = driver.generate(prompt_of(30), max_tokens=9, min_tokens=6, structure=Regex(pattern="ab"))
    assert forced.text == "ab", "a complete text ends, however short"
    cut = driver.generate(prompt_of(30), max_tokens=3, structure=Regex(pattern="a{9}"))
    assert cut.end == Finished(reason="length", text="", output_tokens=3)


def test_a_dead_end_fails_its_request_and_no_other(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structured._LIMITS, "max_items_in_row", 60)
    ambiguous = Grammar(lark='start: start start | "a"')
    with running_engine(tiny_model) as driver:
        beside = driver.submit(prompt_of(30, 1), max_tokens=60, ignore_eos=True)
        dead = driver.generate(prompt_of(30), max_tokens=200, ignore_eos=True, structure=ambiguous)
        assert isinstance(dead.end, Failed)
        assert dead.end.code == "structure_dead_end"
        assert "items" in dead.end.message
        assert beside.wait().end == Finished(reason="length", text="", output_tokens=60)
        again = driver.generate(prompt_of(30), max_tokens=3, ignore_eos=True, structure=ambiguous)
        assert again.text == "aaa"
        stats = driver.idle_stats()
    assert (stats.blocks_held, stats.requests_failed) == (0, 1)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {257: 1.0}}, "logit_bias: 257 is outside the vocabulary"),
        ({"stop_token_ids": (999,)}, "stop_token_ids: 999 is outside the vocabulary"),
        ({"min_tokens": 9}, "min_tokens: 9 is over max_tokens 8"),
        ({"structure": Regex(pattern="(")}, "structure.pattern: "),
    ],
)
def test_sampling_that_cannot_be_is_refused_and_named(
    driver: EngineDriver, sampling: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestRefused, match=message) as refused:
        driver.submit(prompt_of(5), **sampling)
    assert refused.value.refusal.code == "invalid_request"


def test_old_requests_mean_what_they_meant() -> None:
    decoded = msgspec.json.decode(b'{"max_tokens": 3, "temperature": 0, "stop": ["x"]}', type=SamplingParams)
    assert decoded == SamplingParams(max_tokens=3, temperature=0, stop=("x",))
    assert decode_events([msgspec.json.encode(Token(token_ids=[1], text="a"))])[0] == Token(
        token_ids=[1], text="a"
    )
    assert b"logprobs" not in msgspec.json.encode(Token(token_ids=[1], text="a"))


async def test_a_compilation_holds_up_no_other_request(tiny_model: LoadedModel) -> None:
    worker = build_worker(tiny_model, WorkerSettings(kv_cache_blocks=64))
    worker.engine.start()
    try:
        app = create_app(engine=worker.engine, card=worker.card, files={}, max_body_bytes=2**20)
        with worker.engine._structures._compiling:
            waiting = asyncio.create_task(generate(app, structure=Regex(pattern="ab")))
            plain = await generate(app)
            assert not waiting.done()
        answer = await waiting
        refused = await generate(app, structure=Regex(pattern="("))
    finally:
        worker.engine.stop()
    assert plain.status_code == answer.status_code == 200
    assert [
        event.text for event in decode_events(answer.content.splitlines()) if isinstance(event, Token)
    ] == [
        "a",
        "b",
    ]
    assert refused.status_code == 400
    assert msgspec.json.decode(refused.content, type=Refusal).message.startswith("structure.pattern: ")


async def generate(app: Starlette, **sampling: object) -> httpx.Response:
    request = GenerateRequest(
        request_id=f"request-{sampling}",
        scope="aa",
        token_ids=prompt_of(9),
        sampling=SamplingParams(max_tokens=4, temperature=0.0, **sampling),  # type: ignore[arg-type]
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://worker.example") as client:
        return await client.post("/v1/generate", content=msgspec.json.encode(request))
