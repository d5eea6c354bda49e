"""Events in, an answer out, and at every instant the counts of what was seen so far.

Knows the worker's events and the order they must have. Does not know dialects,
connections to workers, keys, prices or how an answer is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

from gateway.edge.canonical import EndedText, Ending, UsageCounts
from gateway.edge.dialect import StreamEncoder
from gateway.edge.errors import ApiError, ServiceUnavailable, UpstreamBroke
from model_worker.protocol import CacheMode, Event, Failed, Finished, FinishReason, Prefilled, Started, Token

CacheStatus = Literal["hit", "partial", "miss", "bypass"]


class ProtocolBroken(Exception):
    """The worker sent events that contradict each other or the request."""


class Tally:
    """What one generation used: a fold of its events. States: waiting → started → finished | failed.

    It is finished when each of its choices is; the prompt counts once, output over all choices.
    """

    def __init__(self, *, prompt_tokens: int, clock: Callable[[], int], num_choices: int = 1) -> None:
        """`clock` gives nanoseconds; the tally remembers when the first token came."""
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._computed = 0
        self._outputs = [0] * num_choices
        self._reasons: list[FinishReason | None] = [None] * num_choices
        self.started: Started | None = None
        self.failure: Failed | None = None
        self.first_token_at: int | None = None
        self.delivered = 0

    def add(self, event: Event) -> None:
        """Raises `ProtocolBroken`, and then counts nothing of the event."""
        if isinstance(event, Started):
            self._start(event)
            return
        if self.started is None or self.has_ended:
            raise ProtocolBroken(f"{type(event).__name__} came out of order")
        match event:
            case Prefilled():
                self._prefill(event, self.started)
            case Token():
                self._require_open(event.choice)
                self._first_token(self.started)
                self._outputs[event.choice] += len(event.token_ids)
            case Finished():
                self._finish(event, self.started)
            case Failed():
                self.failure = event

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    @property
    def counts(self) -> UsageCounts:
        """Cached tokens as frozen at admission; uncached ones as far as they were computed; output
        as generated.
        """
        read = 0 if self.started is None else self.started.cached.total
        return UsageCounts(uncached=self._computed, read=read, written=0, output=sum(self._outputs))

    @property
    def promised(self) -> UsageCounts:
        """All of the prompt, computed or not, and no output: what is known from `Started` on."""
        assert self.started is not None, "nothing is known before Started"
        return UsageCounts(uncached=self.started.uncached, read=self.started.cached.total)

    @property
    def num_choices(self) -> int:
        return len(self._reasons)

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Why each choice ended. None is missing once the generation is finished."""
        return [reason for reason in self._reasons if reason is not None]

    @property
    def is_finished(self) -> bool:
        """Every choice came to its normal end."""
        return None not in self._reasons

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why a finished generation ended: "length" where that cut any of its choices."""
        if not self.is_finished:
            return None
        return "length" if "length" in self._reasons else "stop"

    def mark_delivered(self) -> None:
        """All output seen so far has been sent to the client."""
        self.delivered = sum(self._outputs)

    def _start(self, event: Started) -> None:
        if self.started is not None:
            raise ProtocolBroken("Started came twice")
        if event.prompt != self._prompt_tokens:
            raise ProtocolBroken(
                f"Started counts {event.prompt} prompt tokens, but {self._prompt_tokens} were sent"
            )
        self.started = event

    def _prefill(self, event: Prefilled, started: Started) -> None:
        if not self._computed <= event.computed_tokens <= started.uncached:
            raise ProtocolBroken("Prefilled counts more than the uncached prompt, or runs backwards")
        self._computed = event.computed_tokens

    def _first_token(self, started: Started) -> None:
        if self.first_token_at is None:
            self.first_token_at = self._clock()
            self._computed = started.uncached

    def _finish(self, event: Finished, started: Started) -> None:
        self._require_open(event.choice)
        came = self._outputs[event.choice]
        if event.output_tokens < came:
            raise ProtocolBroken(f"Finished counts {event.output_tokens} tokens, but {came} came")
        self._computed = started.uncached
        self._outputs[event.choice] = event.output_tokens
        self._reasons[event.choice] = event.reason

    def _require_open(self, choice: int) -> None:
        if choice >= self.num_choices or self._reasons[choice] is not None:
            raise ProtocolBroken(f"choice {choice} was not asked for, or has ended")


def cache_status(started: Started, mode: CacheMode) -> CacheStatus:
    """A hit is all that can be had: the last prompt token is always computed, because the first
    answer needs it.
    """
    if mode == "bypass":
        return "bypass"
    if started.cached.total == 0:
        return "miss"
    return "hit" if started.uncached <= 1 else "partial"


def failure_of(event: Failed) -> ApiError:
    """What the client is told when the worker gave up."""
    if event.code == "engine_failed":
        return UpstreamBroke("The model worker failed while it answered.", code=event.code)
    return ServiceUnavailable("The model worker could not finish this request.", code=event.code)


class Sink(Protocol):
    """Where an answer goes. Every method may take as long as the client reads slowly."""

    async def begin_stream(self, started: Started) -> None: ...
    async def send(self, chunk: bytes) -> None: ...
    async def end_stream(self, chunk: bytes) -> None: ...
    async def whole(self, started: Started, body: bytes) -> None: ...


class Bookkeeper(Protocol):
    """Who notes what was used, while it is used."""

    def observe(self) -> None:
        """Now and then, in case this process dies."""

    async def conclude(self) -> None:
        """Before the client is told that the answer is whole: write first, acknowledge second."""


Events = AsyncIterator[Event]
Relay = Callable[[Events, Tally, Sink, Bookkeeper], Awaitable[None]]
EncodeWhole = Callable[[Sequence[EndedText], UsageCounts], bytes]


async def relay_stream(
    events: Events, tally: Tally, sink: Sink, books: Bookkeeper, *, encoder: StreamEncoder
) -> None:
    """Sends each event's text as it comes. The dialect's end follows the last choice's `Finished` alone.

    Raises `ApiError` when the worker gave up and `ProtocolBroken` when it made no sense.
    """
    async for event in events:
        tally.add(event)
        match event:
            case Started():
                books.observe()
                await sink.begin_stream(event)
                await _send(sink, encoder.begin(tally.num_choices, tally.promised))
            case Token(text=text, choice=choice):
                books.observe()
                if text:
                    await _send(sink, encoder.text(choice, text))
                tally.mark_delivered()
            case Finished() if tally.is_finished:
                await books.conclude()
                await sink.end_stream(_end_of_choice(encoder, event) + encoder.end(tally.counts))
                tally.mark_delivered()
            case Finished():
                books.observe()
                await _send(sink, _end_of_choice(encoder, event))
                tally.mark_delivered()
            case Failed():
                raise failure_of(event)
            case Prefilled():
                books.observe()
                await _send(sink, encoder.progress())


async def _send(sink: Sink, chunk: bytes) -> None:
    if chunk:
        await sink.send(chunk)


def _end_of_choice(encoder: StreamEncoder, event: Finished) -> bytes:
    text = encoder.text(event.choice, event.text) if event.text else b""
    return text + encoder.finish(event.choice, _ending_of(event))


def _ending_of(event: Finished) -> Ending:
    return Ending(reason=event.reason, stop_string=event.matched if isinstance(event.matched, str) else None)


async def relay_whole(
    events: Events, tally: Tally, sink: Sink, books: Bookkeeper, *, encode: EncodeWhole
) -> None:
    """Collects the texts and sends one body. Raises as `relay_stream` does."""
    texts: list[list[str]] = [[] for _ in range(tally.num_choices)]
    endings: list[Ending | None] = [None] * tally.num_choices
    async for event in events:
        tally.add(event)
        match event:
            case Token(text=text, choice=choice):
                books.observe()
                texts[choice].append(text)
            case Finished(text=text, choice=choice):
                texts[choice].append(text)
                endings[choice] = _ending_of(event)
                if not tally.is_finished:
                    books.observe()
                    continue
                await books.conclude()
                assert tally.started is not None, "the tally takes no Finished before Started"
                await sink.whole(tally.started, encode(_ended(texts, endings), tally.counts))
                tally.mark_delivered()
            case Failed():
                raise failure_of(event)
            case Started() | Prefilled():
                books.observe()


def _ended(texts: Sequence[Sequence[str]], endings: Sequence[Ending | None]) -> list[EndedText]:
    return [
        EndedText(text="".join(pieces), ending=ending)
        for pieces, ending in zip(texts, endings, strict=True)
        if ending is not None
    ]
