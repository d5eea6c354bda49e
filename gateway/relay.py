"""Events in, an answer out, and at every instant the counts of what was seen so far.

Knows the worker's events, the order they must have, and OpenAI's encoders.
Does not know connections to workers, keys, prices or how an answer is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol

from gateway.edge import openai
from gateway.edge.canonical import AnswerHead, UsageCounts
from gateway.edge.errors import ApiError, ServiceUnavailable, UpstreamBroke
from model_worker.protocol import CacheMode, Event, Failed, Finished, FinishReason, Prefilled, Started, Token

CacheStatus = Literal["hit", "partial", "miss", "bypass"]


class ProtocolBroken(Exception):
    """The worker sent events that contradict each other or the request."""


class Tally:
    """What one generation used: a fold of its events. States: waiting → started → finished | failed."""

    def __init__(self, *, prompt_tokens: int, clock: Callable[[], int]) -> None:
        """`clock` gives nanoseconds; the tally remembers when the first token came."""
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._computed = 0
        self._output = 0
        self.started: Started | None = None
        self.finish_reason: FinishReason | None = None
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
                self._first_token(self.started)
                self._output += len(event.token_ids)
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
        return UsageCounts(uncached=self._computed, read=read, written=0, output=self._output)

    def mark_delivered(self) -> None:
        """All output seen so far has been sent to the client."""
        self.delivered = self._output

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
        if event.output_tokens < self._output:
            raise ProtocolBroken(f"Finished counts {event.output_tokens} tokens, but {self._output} came")
        self._computed = started.uncached
        self._output = event.output_tokens
        self.finish_reason = event.reason


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


Observe = Callable[[], None]
Events = AsyncIterator[Event]
Relay = Callable[[Events, Tally, AnswerHead, Sink, Observe], Awaitable[None]]


async def relay_stream(
    events: Events, tally: Tally, head: AnswerHead, sink: Sink, observe: Observe, *, include_usage: bool
) -> None:
    """Sends each event's text as it comes. The last chunks, `[DONE]` included, follow `Finished` alone.

    Raises `ApiError` when the worker gave up and `ProtocolBroken` when it made no sense.
    """
    encoder = openai.ChunkEncoder(head, include_usage=include_usage)
    async for event in events:
        tally.add(event)
        match event:
            case Started():
                observe()
                await sink.begin_stream(event)
                await sink.send(encoder.role())
            case Token(text=text):
                observe()
                if text:
                    await sink.send(encoder.text(text))
                tally.mark_delivered()
            case Finished():
                await sink.end_stream(_last_chunks(encoder, event, tally, include_usage=include_usage))
                tally.mark_delivered()
            case Failed():
                raise failure_of(event)
            case Prefilled():
                observe()


def _last_chunks(
    encoder: openai.ChunkEncoder, event: Finished, tally: Tally, *, include_usage: bool
) -> bytes:
    text = encoder.text(event.text) if event.text else b""
    usage = encoder.usage(tally.counts) if include_usage else b""
    return text + encoder.finish(event.reason) + usage + openai.DONE_EVENT


async def relay_whole(events: Events, tally: Tally, head: AnswerHead, sink: Sink, observe: Observe) -> None:
    """Collects the text and sends one body. Raises as `relay_stream` does."""
    texts: list[str] = []
    async for event in events:
        tally.add(event)
        match event:
            case Token(text=text):
                observe()
                texts.append(text)
            case Finished(reason=reason, text=text):
                texts.append(text)
                body = openai.encode_completion(
                    head, text="".join(texts), finish_reason=reason, counts=tally.counts
                )
                assert tally.started is not None, "the tally takes no Finished before Started"
                await sink.whole(tally.started, body)
                tally.mark_delivered()
            case Failed():
                raise failure_of(event)
            case Started() | Prefilled():
                observe()
