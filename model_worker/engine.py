"""The loop that turns requests into events, one step at a time.

Knows sequences, the scheduler and the runner. Does not know HTTP: an event
goes to the request's own callback, from the engine's thread.

One thread owns scheduler, store and tensors; other threads only append to the
inbox. A failing forward pass ends the requests in it with `Failed` and the
engine goes on; any other error is a defect: the loop ends, every request gets
`Failed`, and the process exits so that its supervisor starts a clean one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import structlog
from tokenizers import Tokenizer

from model_worker.detokenizer import Detokenizer
from model_worker.protocol import (
    CacheStatistics,
    Event,
    Failed,
    FailureCode,
    Finished,
    GenerateRequest,
    Prefilled,
    Refusal,
    Token,
    TokenChance,
    TokenLogprobs,
    WorkerStats,
)
from model_worker.runner import Runner
from model_worker.sampling import Choice, DeadEnd, Sampler
from model_worker.scheduler import Scheduler, Step, StepAbandoned
from model_worker.sequence import Sequence
from model_worker.statistics import cache_statistics
from model_worker.structured import StructureCompiler, StructureRefused, Vocabulary
from prefix_store.blocks import with_adapter
from prefix_store.store import PrefixStore

log = structlog.get_logger(__name__)

EventSink = Callable[[Event], None]
"""Takes one event; called from the engine's thread, must not block or raise."""


class EngineStopped(Exception):
    """The loop has ended, so nobody can look at what it owned."""


class RequestRefused(Exception):
    """The request cannot be served; nothing was computed."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def _refuse_outside(vocab_size: int, field: str, tokens: Iterable[int]) -> None:
    largest = max(tokens, default=0)
    if largest >= vocab_size:
        message = f"{field}: {largest} is outside the vocabulary of {vocab_size}"
        raise RequestRefused(Refusal(code="invalid_request", message=message))


@contextmanager
def _refusing_structures() -> Iterator[None]:
    try:
        yield
    except StructureRefused as error:
        raise RequestRefused(Refusal(code=error.code, message=str(error))) from error


@dataclass(slots=True, kw_only=True)
class Counters:
    """Totals since start; their meaning is `WorkerStats`'."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_recomputed: int = 0
    output_tokens: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    steps: int = 0


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request and those of its texts that have not ended."""

    request: GenerateRequest
    sink: EventSink
    sequences: dict[Sequence, None]


@dataclass(slots=True)
class _Inbox:
    """What other threads ask for, guarded by one condition."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    added: deque[_Live] = field(default_factory=deque)
    cancelled: set[str] = field(default_factory=set)
    looks: deque[Future[CacheStatistics]] = field(default_factory=deque)
    open_ids: set[str] = field(default_factory=set)
    num_open: int = 0
    draining: bool = False
    stopping: bool = False

    @property
    def has_mail(self) -> bool:
        return bool(self.added or self.cancelled or self.looks or self.stopping)


class Engine:
    """Generates for many requests at once. States: new -> running -> stopped."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        store: PrefixStore,
        runner: Runner,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        context_window_tokens: int,
        vocab_size: int,
        kv_bytes_per_token: int,
        max_open: int,
        reuses_prefixes: bool = True,
        adapters: Mapping[str, str] | None = None,
        check_when_idle: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._runner = runner
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._context_window_tokens = context_window_tokens
        self._vocab_size = vocab_size
        self._kv_bytes_per_token = kv_bytes_per_token
        self._vocabulary = Vocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._structures = StructureCompiler(self._vocabulary)
        self._max_open = max_open
        self._reuses_prefixes = reuses_prefixes
        self._adapters = adapters or {}
        self._check_when_idle = check_when_idle
        self._inbox = _Inbox()
        self._live: dict[str, _Live] = {}
        self._counters = Counters()
        self._began_at = time.monotonic()
        self.died = False
        self._thread = threading.Thread(target=self._run, name="engine")
        self._on_death: Callable[[], None] = lambda: None
        self.stats = self._snapshot()

    # Called from any thread.

    def start(self, on_death: Callable[[], None] | None = None) -> None:
        """Starts the loop. `on_death` is called when it ends without having been stopped."""
        if on_death is not None:
            self._on_death = on_death
        self._thread.start()

    def stop(self) -> None:
        """Ends every request with `Failed(shutting_down)` and waits for the loop to end."""
        with self._inbox.changed:
            self._inbox.stopping = True
            self._inbox.changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def drain(self) -> None:
        """Refuses new requests from now on; those under way go on."""
        with self._inbox.changed:
            self._inbox.draining = True

    def wait_until_drained(self, timeout_seconds: float) -> bool:
        """Waits until no request is open; False when the time passed first."""
        with self._inbox.changed:
            return self._inbox.changed.wait_for(lambda: not self._inbox.open_ids, timeout_seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_accepting(self) -> bool:
        return self.is_alive and not self._inbox.draining and not self._inbox.stopping

    def submit(self, request: GenerateRequest, sink: EventSink) -> None:
        """Queues a request. Raises `RequestRefused` when it can never be served or the queue is full.

        A structure is compiled here, in the caller's thread: see `takes_long`.
        """
        self._refuse_impossible(request)
        if not self._reuses_prefixes:
            request = msgspec.structs.replace(request, cache="bypass")
        live = _Live(request=request, sink=sink, sequences=dict.fromkeys(self._texts(request)))
        with self._inbox.changed:
            if self._inbox.draining or self._inbox.stopping or not self.is_alive:
                raise RequestRefused(Refusal(code="draining", message="this worker takes no new requests"))
            if request.request_id in self._inbox.open_ids:
                message = f"request_id: {request.request_id} is already being generated"
                raise RequestRefused(Refusal(code="invalid_request", message=message))
            if self._inbox.num_open + request.n > self._max_open:
                message = f"{self._inbox.num_open} texts are open, and this worker takes {self._max_open}"
                raise RequestRefused(Refusal(code="queue_full", message=message))
            self._inbox.open_ids.add(request.request_id)
            self._inbox.num_open += request.n
            self._inbox.added.append(live)
            self._inbox.changed.notify_all()

    @staticmethod
    def takes_long(request: GenerateRequest) -> bool:
        """Whether `submit` may take a second or wait for others' compilations: nothing for an event loop."""
        sampling = request.sampling
        return request.n > 1 or sampling.structure is not None or sampling.top_logprobs is not None

    def cancel(self, request_id: str) -> None:
        """Stops a request before the next step. An ended id is ignored: hang-ups race with endings."""
        with self._inbox.changed:
            self._inbox.cancelled.add(request_id)
            self._inbox.changed.notify_all()

    def look(self) -> Future[CacheStatistics]:
        """What the cache did and holds, told between two steps. Fails with `EngineStopped`."""
        answer: Future[CacheStatistics] = Future()
        with self._inbox.changed:
            if self._inbox.stopping or not self.is_alive:
                answer.set_exception(EngineStopped())
            else:
                self._inbox.looks.append(answer)
                self._inbox.changed.notify_all()
        return answer

    def _refuse_impossible(self, request: GenerateRequest) -> None:
        num_tokens = len(request.token_ids) + request.sampling.max_tokens
        if num_tokens > self._context_window_tokens:
            message = (
                f"{len(request.token_ids)} prompt tokens and max_tokens {request.sampling.max_tokens} "
                f"exceed the context window of {self._context_window_tokens} tokens"
            )
            raise RequestRefused(Refusal(code="context_length_exceeded", message=message))
        if request.adapter is not None and request.adapter not in self._adapters:
            message = f"adapter: this worker has none called {request.adapter!r}"
            raise RequestRefused(Refusal(code="invalid_request", message=message))
        sampling = request.sampling
        _refuse_outside(self._vocab_size, "token_ids", request.token_ids)
        _refuse_outside(self._vocab_size, "logit_bias", sampling.logit_bias)
        _refuse_outside(self._vocab_size, "stop_token_ids", sampling.stop_token_ids)
        if sampling.min_tokens > sampling.max_tokens:
            message = f"min_tokens: {sampling.min_tokens} is over max_tokens {sampling.max_tokens}"
            raise RequestRefused(Refusal(code="invalid_request", message=message))
        if request.n > self._max_open:
            message = f"n: {request.n} is over the {self._max_open} texts that this worker takes at once"
            raise RequestRefused(Refusal(code="invalid_request", message=message))

    def _texts(self, request: GenerateRequest) -> list[Sequence]:
        """One sequence for each text; the first has the others as its forks."""
        sampling = request.sampling
        if sampling.top_logprobs is not None:
            with _refusing_structures():
                self._vocabulary.load()
        cache_scope = request.scope
        if request.adapter is not None:
            cache_scope = with_adapter(cache_scope, self._adapters[request.adapter])
        first, *forks = (
            Sequence.of(
                request,
                Detokenizer(self._tokenizer, sampling.stop, min_tokens=sampling.min_tokens),
                self._sampler(request, choice),
                choice=choice,
                cache_scope=cache_scope,
            )
            for choice in range(request.n)
        )
        first.forks = forks
        return [first, *forks]

    def _sampler(self, request: GenerateRequest, choice: int) -> Sampler:
        structure = None
        if request.sampling.structure is not None:
            with _refusing_structures():
                structure = self._structures.start(request.scope, request.sampling.structure)
        return Sampler(
            request.sampling,
            prompt=request.token_ids,
            eos_token_ids=self._eos_token_ids,
            structure=structure,
            choice=choice,
        )

    # The engine's own thread, from here on.

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if self._scheduler.has_work:
                    self._step()
                elif self._check_when_idle:
                    self._scheduler.check()
                self.stats = self._snapshot()
            for live in list(self._live.values()):
                self._close(live)
                self._fail(live, "shutting_down", "the worker is shutting down")
            self._scheduler.check()
        finally:
            self._abandon()
            self.stats = self._snapshot()

    def _take_inbox(self) -> bool:
        """Waits for work, takes what came; False when it is time to stop."""
        inbox = self._inbox
        with inbox.changed:
            while not (inbox.has_mail or self._scheduler.has_work):
                inbox.changed.wait()
            added, inbox.added = inbox.added, deque()
            cancelled, inbox.cancelled = inbox.cancelled, set()
            looks, inbox.looks = inbox.looks, deque()
            stopping = inbox.stopping
        for live in added:
            self._live[live.request.request_id] = live
            self._scheduler.add(next(iter(live.sequences)))
        for request_id in cancelled & self._live.keys():
            self._close(self._live[request_id])
            self._counters.requests_cancelled += 1
        self._answer_looks(looks)
        return not stopping

    def _answer_looks(self, looks: Iterable[Future[CacheStatistics]]) -> None:
        """One look for all who asked; who gave up waiting is left out."""
        asking = [answer for answer in looks if answer.set_running_or_notify_cancel()]
        if not asking:
            return
        now = time.monotonic()
        seen = cache_statistics(self._store, self._snapshot(), now=now, uptime_seconds=now - self._began_at)
        for answer in asking:
            answer.set_result(seen)

    def _step(self) -> None:
        step = self._scheduler.schedule()
        for sequence in step.begun:
            assert sequence.started is not None
            self._counters.prompt_tokens_cached += sequence.started.cached.total
            self._live_of(sequence).sink(sequence.started)
        # Not in the `try`: sequences that only follow, and are in no chunk, rely on their copies too.
        self._runner.copy(step.copies)
        if not step.chunks:
            return  # whoever was to begin found no room beside others that wait: it has given up its blocks
        waiting_for_it = {chunk.sequence.request.request_id for chunk in step.chunks}
        # Without the lock: a set that another thread adds to may be looked at, and the next look sees more.
        step.is_abandoned = lambda: waiting_for_it <= self._inbox.cancelled
        try:
            chosen = self._runner.execute(step)
        except StepAbandoned:
            return  # the inbox ends those requests
        except RuntimeError as error:  # what torch raises, running out of memory included
            request_ids = sorted(waiting_for_it)
            log.exception("step_failed", num_chunks=len(step.chunks), request_ids=request_ids)
            self._fail_step(step, f"the forward pass failed: {error}")
            return
        self._scheduler.commit(step)
        self._counters.steps += 1
        for chunk, choices in zip(step.chunks, chosen, strict=True):
            self._count_computed(chunk.sequence, chunk.start, chunk.stop)
            if chunk.sequence.request.request_id not in self._live:
                continue  # another of its texts came to a dead end in this very step
            if choices:
                self._go_on(chunk.sequence, choices)
            elif chunk.sequence.num_output == 0:
                self._emit_progress(chunk.sequence)

    def _fail_step(self, step: Step, message: str) -> None:
        """Ends the requests of a step; what the step wrote of them is not to be found."""
        failed = {id(live): live for live in (self._live_of(chunk.sequence) for chunk in step.chunks)}
        for chunk in step.chunks:
            self._scheduler.abandon(chunk.sequence)
            del self._live_of(chunk.sequence).sequences[chunk.sequence]
        for live in failed.values():
            self._close(live)
            self._fail(live, "engine_failed", message)

    def _go_on(self, sequence: Sequence, choices: list[Choice | DeadEnd]) -> None:
        """Appends what was chosen, to the forks too where the sequence has any: they begin here."""
        live = self._live_of(sequence)
        forks, sequence.forks = sequence.forks, []
        for fork in forks:
            lease = self._scheduler.fork(sequence, fork)
            if lease is not None:
                assert sequence.lease is not None, "it goes on as well"
                self._runner.fork(sequence.lease, lease)
        for text, choice in zip((sequence, *forks), choices, strict=True):
            if isinstance(choice, DeadEnd):
                self._give_up(live, choice)
                return
            self._accept(live, text, choice)

    def _emit_progress(self, sequence: Sequence) -> None:
        """What is computed of the prompt; what a preemption made us repeat was told before."""
        assert sequence.started is not None, "it has begun"
        furthest = max(sequence.num_computed, sequence.num_computed_before)
        told = Prefilled(computed_tokens=furthest - sequence.started.cached.total)
        self._live_of(sequence).sink(told)

    def _count_computed(self, sequence: Sequence, start: int, stop: int) -> None:
        """Splits a computed range into what a preemption repeated and new prompt tokens."""
        first_new = max(start, sequence.num_computed_before)
        self._counters.tokens_recomputed += max(0, min(stop, first_new) - start)
        self._counters.prompt_tokens_computed += max(0, min(stop, sequence.num_prompt) - first_new)

    def _accept(self, live: _Live, sequence: Sequence, choice: Choice) -> None:
        """Appends a chosen token and tells the client, in one event, or two where it is the last."""
        text = sequence.append(choice.token)
        self._counters.output_tokens += 1
        logprobs = None if choice.logprob is None else [self._logprobs(choice, choice.logprob)]
        live.sink(Token(token_ids=[choice.token], text=text, logprobs=logprobs, choice=sequence.choice))
        reason = sequence.finish_reason
        if reason is None:
            return
        held_text = sequence.detokenizer.flush()
        self._scheduler.finish(sequence)
        del live.sequences[sequence]
        if not live.sequences:
            self._close(live)
            self._counters.requests_finished += 1
        live.sink(
            Finished(
                reason=reason,
                text=held_text,
                output_tokens=sequence.num_output,
                matched=sequence.matched,
                choice=sequence.choice,
            )
        )

    def _give_up(self, live: _Live, end: DeadEnd) -> None:
        """Ends a request when its structure does not let one of its texts go on."""
        structure = live.request.sampling.structure
        assert structure is not None
        self._structures.forget(live.request.scope, structure)
        self._close(live)
        self._fail(live, "structure_dead_end", f"structure: {end.message}")

    def _logprobs(self, choice: Choice, logprob: float) -> TokenLogprobs:
        return TokenLogprobs(
            chosen=self._chance(choice.token, logprob), top=[self._chance(*one) for one in choice.top]
        )

    def _chance(self, token: int, logprob: float) -> TokenChance:
        return TokenChance(token_id=token, text_bytes=self._vocabulary.bytes_of(token), logprob=logprob)

    def _live_of(self, sequence: Sequence) -> _Live:
        return self._live[sequence.request.request_id]

    def _fail(self, live: _Live, code: FailureCode, message: str) -> None:
        self._counters.requests_failed += 1
        live.sink(Failed(code=code, message=message))

    def _close(self, live: _Live) -> None:
        """Takes a request off every list; its blocks are back before its client hears of the end."""
        del self._live[live.request.request_id]
        for sequence in live.sequences:
            self._scheduler.finish(sequence)
        with self._inbox.changed:
            self._inbox.open_ids.remove(live.request.request_id)
            self._inbox.num_open -= live.request.n
            self._inbox.changed.notify_all()

    def _abandon(self) -> None:
        """The loop is over. After a defect somebody may still wait: nobody waits for ever."""
        with self._inbox.changed:
            stopped_on_purpose = self._inbox.stopping
            self._inbox.stopping = True
            left = [*self._live.values(), *self._inbox.added]
            self._inbox.added.clear()
            looks, self._inbox.looks = self._inbox.looks, deque()
            self._inbox.open_ids.clear()
            self._inbox.num_open = 0
        self._live.clear()
        for live in left:
            live.sink(Failed(code="engine_failed", message="the engine stopped"))
        for answer in looks:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineStopped())
        if not stopped_on_purpose:
            self.died = True
            self._on_death()

    def _snapshot(self) -> WorkerStats:
        blocks = self._store.counts
        counters = self._counters
        running = len(self._scheduler.running)
        held_bytes = blocks.held * self._store.block_size * self._kv_bytes_per_token
        return WorkerStats(
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_held=blocks.held,
            blocks_total=blocks.total,
            kv_bytes_held=held_bytes,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_bytes_per_conversation=held_bytes // running if running else 0,
            sequences_running=running,
            sequences_waiting=len(self._scheduler.waiting),
            prompt_tokens_computed=counters.prompt_tokens_computed,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            tokens_recomputed=counters.tokens_recomputed,
            output_tokens=counters.output_tokens,
            requests_finished=counters.requests_finished,
            requests_cancelled=counters.requests_cancelled,
            requests_failed=counters.requests_failed,
            preemptions=self._scheduler.preemptions,
            steps=counters.steps,
            step_tokens=self._scheduler.step_tokens,
        )
