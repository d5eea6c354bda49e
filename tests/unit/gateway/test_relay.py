"""The fold of a generation's events, and the two ways an answer is written."""

import json
from collections.abc import AsyncIterator, Iterable
from functools import partial

import pytest

from gateway.edge import openai
from gateway.edge.canonical import AnswerHead, UsageCounts
from gateway.edge.errors import ApiError, ServiceUnavailable, UpstreamBroke
from gateway.relay import ProtocolBroken, Tally, cache_status, relay_stream, relay_whole
from model_worker.protocol import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Prefilled,
    Started,
    TierTokens,
    Token,
)

HEAD = AnswerHead(request_id="0190", created=1, model="tiny", fingerprint="ab" * 16)
STARTED = Started(cached=TierTokens(device=32), uncached=8)


def token(text: str, *ids: int, choice: int = 0) -> Token:
    return Token(token_ids=list(ids or (1,)), text=text, choice=choice)


def finished(text: str, output_tokens: int, *, choice: int = 0, reason: FinishReason = "stop") -> Finished:
    return Finished(reason=reason, text=text, output_tokens=output_tokens, choice=choice)


def tally_of(*events: Event, num_choices: int = 1) -> Tally:
    tally = Tally(prompt_tokens=40, num_choices=num_choices, clock=lambda: 5)
    for event in events:
        tally.add(event)
    return tally


async def replay(events: Iterable[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


def written_by(relay):
    """The relay with OpenAI's encoders."""
    if relay is relay_whole:
        return partial(
            relay_whole,
            encode=lambda texts, counts: openai.encode_completion(HEAD, texts=texts, counts=counts),
        )
    return partial(relay_stream, encoder=openai.ChunkEncoder(HEAD, include_usage=False))


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.sent: list[bytes] = []
        self.ended = False

    async def begin_stream(self, started: Started) -> None:
        self.started = started

    async def send(self, chunk: bytes) -> None:
        self.sent.append(chunk)

    async def end_stream(self, chunk: bytes) -> None:
        self.sent.append(chunk)
        self.ended = True

    async def whole(self, started: Started, body: bytes) -> None:
        self.started, self.ended = started, True
        self.sent.append(body)

    @property
    def events(self) -> list[str]:
        return [event.removeprefix("data: ") for event in b"".join(self.sent).decode().split("\n\n") if event]


class Books:
    """Notes what it is told, and whether the end was noted before it was sent."""

    def __init__(self, tally: Tally, sink: Recorder) -> None:
        self._tally = tally
        self._sink = sink
        self.observed: list[int] = []
        self.concluded: list[int] = []

    def observe(self) -> None:
        self.observed.append(self._tally.counts.total)

    async def conclude(self) -> None:
        assert not self._sink.ended, "written first, acknowledged second"
        self.concluded.append(self._tally.counts.total)


def test_nothing_is_counted_before_the_start():
    assert tally_of().counts == UsageCounts()


def test_before_the_first_token_only_the_prefill_that_was_done_is_counted():
    assert tally_of(STARTED).counts == UsageCounts(read=32)
    assert tally_of(STARTED, Prefilled(computed_tokens=5)).counts == UsageCounts(read=32, uncached=5)


def test_from_the_first_token_on_the_whole_prompt_is_counted():
    tally = tally_of(STARTED, Prefilled(computed_tokens=5), token("a"))
    assert tally.counts == UsageCounts(read=32, uncached=8, output=1)
    assert tally.first_token_at == 5
    assert tally.counts.prompt == 40


def test_the_last_event_says_how_many_tokens_there_were():
    tally = tally_of(STARTED, token("a", 1, 2), Finished(reason="stop", text="", output_tokens=3))
    assert tally.counts.output == 3
    assert tally.finish_reason == "stop"
    assert tally.has_ended


@pytest.mark.parametrize(
    "events",
    [
        [token("a")],
        [Finished(reason="stop", text="", output_tokens=0)],
        [STARTED, STARTED],
        [Started(cached=TierTokens(device=0), uncached=39)],
        [STARTED, Prefilled(computed_tokens=9)],
        [STARTED, Prefilled(computed_tokens=5), Prefilled(computed_tokens=4)],
        [STARTED, token("a", 1, 2), Finished(reason="stop", text="", output_tokens=1)],
        [STARTED, Finished(reason="stop", text="", output_tokens=0), token("a")],
        [STARTED, Failed(code="engine_failed", message=""), token("a")],
        [STARTED, token("a", choice=1)],
        [STARTED, finished("", 0, choice=1)],
    ],
)
def test_events_that_contradict_each_other_are_not_believed(events):
    with pytest.raises(ProtocolBroken):
        tally_of(*events)


@pytest.mark.parametrize(
    ("cached", "uncached", "mode", "status"),
    [
        (0, 40, "automatic", "miss"),
        (32, 8, "automatic", "partial"),
        (39, 1, "automatic", "hit"),
        (0, 1, "automatic", "miss"),
        (0, 40, "bypass", "bypass"),
    ],
)
def test_the_cache_status_is_told_from_the_counts(cached, uncached, mode, status):
    assert cache_status(Started(cached=TierTokens(device=cached), uncached=uncached), mode) == status


async def test_a_stream_is_role_texts_finish_usage_and_done():
    sink, tally = Recorder(), Tally(prompt_tokens=40, clock=lambda: 0)
    events = [
        STARTED,
        Prefilled(computed_tokens=4),
        token("Hel"),
        token(""),
        token("lo", 1, 2),
        Finished(reason="length", text="!", output_tokens=4),
    ]
    books = Books(tally, sink)
    await relay_stream(
        replay(events), tally, sink, books, encoder=openai.ChunkEncoder(HEAD, include_usage=True)
    )
    *chunks, done = sink.events
    parsed = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert sink.ended
    assert [chunk["choices"][0]["delta"] for chunk in parsed[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": "!"},
        {},
    ]
    assert parsed[-2]["choices"][0]["finish_reason"] == "length"
    assert parsed[-1]["usage"]["total_tokens"] == 44
    assert tally.delivered == 4
    assert books.observed == [32, 36, 41, 42, 44]
    assert books.concluded == [44]


async def test_the_end_of_a_stream_without_usage_has_none():
    sink, tally = Recorder(), Tally(prompt_tokens=40, clock=lambda: 0)
    events = [STARTED, Finished(reason="stop", text="", output_tokens=0)]
    await relay_stream(
        replay(events),
        tally,
        sink,
        Books(tally, sink),
        encoder=openai.ChunkEncoder(HEAD, include_usage=False),
    )
    assert len(sink.events) == 3
    assert "usage" not in json.loads(sink.events[1])


async def test_a_whole_answer_joins_every_text():
    sink, tally = Recorder(), Tally(prompt_tokens=40, clock=lambda: 0)
    events = [STARTED, token("Hel"), token("lo"), Finished(reason="stop", text="!", output_tokens=2)]
    await written_by(relay_whole)(replay(events), tally, sink, Books(tally, sink))
    answer = json.loads(b"".join(sink.sent))
    assert answer["choices"][0]["message"]["content"] == "Hello!"
    assert answer["usage"]["prompt_tokens"] == 40
    assert tally.delivered == 2


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("engine_failed", UpstreamBroke),
        ("out_of_blocks", ServiceUnavailable),
        ("shutting_down", ServiceUnavailable),
    ],
)
@pytest.mark.parametrize("relay", [relay_whole, relay_stream])
async def test_a_worker_that_gives_up_ends_the_answer_with_an_error(code, refusal, relay):
    sink, tally = Recorder(), Tally(prompt_tokens=40, clock=lambda: 0)
    events = [STARTED, token("a"), Failed(code=code, message="secret detail")]
    with pytest.raises(refusal) as caught:
        await written_by(relay)(replay(events), tally, sink, Books(tally, sink))
    assert isinstance(caught.value, ApiError)
    assert "secret detail" not in caught.value.message
    assert not sink.ended
    assert tally.counts.output == 1


TWO_CHOICES = [
    STARTED,
    token("a"),
    token("b", choice=1),
    token("c", 1, 2, choice=1),
    finished("!", 2),
    token("d", choice=1),
    finished("?", 4, choice=1, reason="length"),
]


@pytest.mark.parametrize(
    ("seen", "output", "finish_reason"),
    [(3, 2, None), (4, 4, None), (5, 5, None), (6, 6, None), (7, 6, "length")],
)
def test_output_is_counted_over_all_choices_and_the_prompt_once(seen, output, finish_reason):
    tally = tally_of(*TWO_CHOICES[:seen], num_choices=2)
    assert tally.counts == UsageCounts(read=32, uncached=8, output=output)
    assert tally.finish_reason == finish_reason
    assert tally.has_ended == (finish_reason is not None)


@pytest.mark.parametrize("late", [token("x"), finished("", 9), token("x", choice=2)])
def test_a_choice_that_has_ended_or_was_not_asked_for_says_nothing(late):
    tally = tally_of(*TWO_CHOICES[:5], num_choices=2)
    before = tally.counts
    with pytest.raises(ProtocolBroken):
        tally.add(late)
    assert tally.counts == before


def test_a_failure_ends_the_choices_that_are_left_and_nothing_is_final():
    tally = tally_of(*TWO_CHOICES[:5], Failed(code="engine_failed", message=""), num_choices=2)
    assert tally.has_ended
    assert tally.finish_reason is None
    assert tally.counts.output == 5


async def test_a_stream_of_several_choices_numbers_them_and_ends_with_the_last():
    sink, tally = Recorder(), Tally(prompt_tokens=40, num_choices=2, clock=lambda: 0)
    await relay_stream(
        replay(TWO_CHOICES),
        tally,
        sink,
        Books(tally, sink),
        encoder=openai.ChunkEncoder(HEAD, include_usage=True),
    )
    *chunks, last, done = sink.events
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    texts, ends, roles = ["", ""], {}, []
    for choice in choices:
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        if choice["finish_reason"] is not None:
            ends[choice["index"]] = choice["finish_reason"]
    assert (texts, ends, roles) == (["a!", "bcd?"], {0: "stop", 1: "length"}, [0, 1])
    assert json.loads(last)["usage"]["completion_tokens"] == tally.delivered == 6
    assert done == "[DONE]"


async def test_a_whole_answer_has_every_choice_in_order():
    sink, tally = Recorder(), Tally(prompt_tokens=40, num_choices=2, clock=lambda: 0)
    books = Books(tally, sink)
    await written_by(relay_whole)(replay(TWO_CHOICES), tally, sink, books)
    assert books.concluded == [46]
    answer = json.loads(b"".join(sink.sent))
    told = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in answer["choices"]]
    assert told == [(0, "a!", "stop"), (1, "bcd?", "length")]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 6)
    assert tally.delivered == 6
