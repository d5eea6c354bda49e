"""One side of the engine benchmark that runs without HTTP: ours in this process, and bare `transformers`.

Knows how to time a suffix on a cached prefix, and a decode step of several sequences. Both sides
live in one process with the same threads; `compare` alternates between them.
"""

from __future__ import annotations

import itertools
import queue
import random
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from model_worker import segments
from model_worker.attention import cache_argument
from model_worker.engine import Engine
from model_worker.models import LoadedModel, load_model, resolve_model_folder
from model_worker.packed_linear import pack_linear_layers
from model_worker.protocol import Event, Failed, Finished, GenerateRequest, SamplingParams, Token
from model_worker.settings import WorkerSettings
from model_worker.wiring import build_worker

SUFFIX_TOKENS = 12
LARGEST_TOKEN = 40_000


def random_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, LARGEST_TOKEN), k=count)


def default_folder() -> Path:
    """Of the model that a worker serves unless told otherwise; converted on first use."""
    settings = WorkerSettings(_cli_parse_args=[])
    return resolve_model_folder(settings.model, settings.models_folder)


def load_packed(folder: Path) -> LoadedModel:
    """A model in float32 on the CPU, its layers packed as a worker's are."""
    model = load_model(name="ours", folder=folder, device=torch.device("cpu"), dtype=torch.float32)
    pack_linear_layers(model.network)
    return model


class BareModel:
    """A plain model with an ordinary contiguous cache of some prefix."""

    def __init__(self, folder: Path, *, packed: bool) -> None:
        self._network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if packed:
            pack_linear_layers(self._network)
        self._cache_argument = cache_argument(self._network)
        self._cache: DynamicCache | None = None

    @torch.inference_mode()
    def prefill(self, prefix: list[int]) -> None:
        self._cache = DynamicCache(config=self._network.config)
        self._forward(prefix)

    @torch.inference_mode()
    def suffix_seconds(self, prefix: list[int], suffix: list[int]) -> float:
        """One forward of `suffix`, greedy token included."""
        assert self._cache is not None
        extra = self._cache.get_seq_length() - len(prefix)
        if extra:
            self._cache.crop(-extra)
        begin = time.perf_counter()
        int(self._forward(suffix).argmax())
        return time.perf_counter() - begin

    def _forward(self, tokens: list[int]) -> torch.Tensor:
        output = self._network(
            torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{self._cache_argument: self._cache}
        )
        return output.logits[0, -1]


class OurEngine:
    """The engine in this process; times are taken where an event reaches the request's own callback."""

    def __init__(self, folder: Path) -> None:
        settings = WorkerSettings(kv_cache_blocks=3000, _cli_parse_args=[])
        self.engine: Engine = build_worker(load_packed(folder), settings).engine
        self.engine.start()
        self._ids = itertools.count()

    def __enter__(self) -> OurEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def submit(self, tokens: list[int], max_tokens: int) -> queue.SimpleQueue[tuple[float, Event]]:
        events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        request = GenerateRequest(
            request_id=f"r{next(self._ids)}",
            scope="aa",
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        self.engine.submit(request, lambda event: events.put((time.perf_counter(), event)))
        return events

    def prefill(self, prefix: list[int]) -> None:
        token_times(self.submit(prefix, 1))

    def suffix_seconds(self, prefix: list[int], suffix: list[int]) -> float:
        begin = time.perf_counter()
        [first] = token_times(self.submit(prefix + suffix, 1))
        return first - begin

    def step_seconds(self, prefix: list[int], *, sequences: int, steps: int, seed: int) -> list[float]:
        """Times of decode steps with `sequences` on one prefix, each with a suffix of its own."""
        open_events = [
            self.submit(prefix + random_tokens(seed + index, SUFFIX_TOKENS), steps + sequences)
            for index in range(sequences)
        ]
        times = [token_times(events) for events in open_events]
        # All decode between the last one's first token and the first one's last.
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        shared = [moment for moment in times[0] if first <= moment <= last]
        return [after - before for before, after in itertools.pairwise(shared)]


def token_times(events: queue.SimpleQueue[tuple[float, Event]]) -> list[float]:
    times = []
    while True:
        moment, event = events.get(timeout=300)
        if isinstance(event, Token):
            times.append(moment)
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            return times


@contextmanager
def without_shared_segments():
    """Every sequence attends to its own whole context, as if nothing were common."""
    kept, segments.MIN_SHARED_BLOCKS = segments.MIN_SHARED_BLOCKS, 2**31
    try:
        yield
    finally:
        segments.MIN_SHARED_BLOCKS = kept


def compare_suffixes(folder: Path, lengths: tuple[int, ...], repeats: int) -> list[dict[str, float]]:
    """Milliseconds of a suffix after a cached prefix: medians, alternating."""
    with OurEngine(folder) as ours:
        bare, packed = BareModel(folder, packed=False), BareModel(folder, packed=True)
        sides = {"ours": ours, "bare": bare, "bare_packed": packed}
        return [_compare_suffix(sides, length, repeats) for length in lengths]


def _compare_suffix(sides: dict[str, OurEngine | BareModel], length: int, repeats: int) -> dict[str, float]:
    prefix = random_tokens(length, length)
    for side in sides.values():
        side.prefill(prefix)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-2, repeats):  # two to warm up
        suffix = random_tokens(10_000 * length + repeat, SUFFIX_TOKENS)
        for name, side in sides.items():
            taken = side.suffix_seconds(prefix, suffix)
            if repeat >= 0:
                seconds[name].append(taken)
    medians = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    return {"cached_tokens": length} | medians


def compare_sharing(folder: Path, *, prefix_tokens: int, sequences: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a decode step of several sequences on one prefix: medians, alternating."""
    shared: list[float] = []
    separate: list[float] = []
    prefix = random_tokens(1, prefix_tokens)
    with OurEngine(folder) as ours:
        ours.prefill(prefix)
        for repeat in range(repeats):
            seed = 1000 * (repeat + 1)
            shared += ours.step_seconds(prefix, sequences=sequences, steps=16, seed=seed)
            with without_shared_segments():
                separate += ours.step_seconds(prefix, sequences=sequences, steps=16, seed=seed + 500)
    return {"shared": 1e3 * statistics.median(shared), "separate": 1e3 * statistics.median(separate)}
