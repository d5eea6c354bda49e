"""From settings to a running engine: the one place where a worker's parts meet."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from tokenizers import Tokenizer

from model_worker.adapters import Adapter, AdapterRunner, Adapters, adapters_of
from model_worker.engine import Engine
from model_worker.exact import computes_exactly, tiles_of
from model_worker.kv_codecs import make_pool
from model_worker.kv_shape import CODECS, DTYPES, NumberFormat
from model_worker.models import (
    LoadedModel,
    ModelUnavailable,
    load_model,
    model_label,
    resolve_model_folder,
    tokenizer_files,
)
from model_worker.packed_linear import pack_linear_layers
from model_worker.protocol import WorkerCard
from model_worker.runner import ModelRunner, Runner
from model_worker.scheduler import Scheduler
from model_worker.segments import segments_of
from model_worker.settings import WorkerSettings
from model_worker.uncached import UncachedRunner
from prefix_store.blocks import BlockNamer
from prefix_store.eviction import ScopeQuotas
from prefix_store.store import PrefixStore

NO_CODEC = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """An engine not yet started, its card, and the tokenizer files it serves."""

    engine: Engine
    card: WorkerCard
    files: dict[str, Path]


def load_worker(settings: WorkerSettings) -> Worker:
    """Finds, converts and loads the model, and builds the engine. Raises `ModelUnavailable`.

    In a thread that ends: OpenMP keeps a team for every thread that ever computed, and once there
    are more threads in teams than cores, each sleeps between two products instead of waiting awake.
    Only the engine's own team may be left (libgomp, GOMP_SPINCOUNT).
    """
    with ThreadPool(1) as passing:
        worker = passing.apply(_load, (settings,))
        passing.close()
        passing.join()
    return worker


def _load(settings: WorkerSettings) -> Worker:
    device = _device(settings)
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    folder = resolve_model_folder(settings.model, settings.models_folder)
    model = load_model(
        name=model_label(settings.model, folder),
        folder=folder,
        device=device,
        dtype=_dtype(settings, device),
    )
    return build_worker(model, settings)


def build_worker(model: LoadedModel, settings: WorkerSettings) -> Worker:
    """Builds the engine around a loaded model, whose layers are packed in place if prefixes are reused."""
    adapters = adapters_of(settings.adapters, base=model.name)
    fingerprints = {adapter.name: adapter.fingerprint for adapter in adapters}
    dtype = str(model.dtype).removeprefix("torch.")
    codec = _codec(model, settings)
    kv_codec = codec.name if codec else NO_CODEC
    kv_bytes_per_token = model.kv_shape.bytes_per_token(codec or DTYPES[dtype])
    num_blocks = settings.kv_cache_blocks or _blocks_that_fit(kv_bytes_per_token, settings)
    namer = BlockNamer(
        seed=int(settings.block_seed, 16),
        model_fingerprint=model.fingerprint,
        dtype=dtype,
        kv_codec=kv_codec,
        block_size=settings.block_size,
    )
    store = PrefixStore(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        namer=namer,
        quotas=ScopeQuotas(max_share=settings.max_scope_share),
        max_index_bytes=int(settings.max_index_mib * 2**20),
    )
    # A sequence alone must always fit, or it could wait for ever.
    context_window_tokens = min(model.kv_shape.context_window_tokens, num_blocks * settings.block_size)
    engine = Engine(
        scheduler=Scheduler(
            store,
            step_tokens=settings.step_tokens,
            decode_step_tokens=settings.decode_step_tokens,
            max_running=settings.max_running,
        ),
        store=store,
        runner=_runner(model, adapters, codec, settings, num_blocks),
        tokenizer=Tokenizer.from_file(str(model.folder / "tokenizer.json")),
        eos_token_ids=model.eos_token_ids,
        context_window_tokens=context_window_tokens,
        vocab_size=model.vocab_size,
        kv_bytes_per_token=kv_bytes_per_token,
        max_open=settings.max_open,
        reuses_prefixes=model.uncached_reason is None,
        adapters=fingerprints,
        check_when_idle=settings.check_when_idle,
    )
    card = WorkerCard(
        model=model.name,
        fingerprint=model.fingerprint,
        dtype=dtype,
        device=str(model.device),
        vocab_size=model.vocab_size,
        context_window_tokens=context_window_tokens,
        block_size=settings.block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=kv_bytes_per_token,
        epoch=secrets.token_hex(8),
        uncached_reason=model.uncached_reason,
        adapters=fingerprints,
        kv_codec=kv_codec,
        exact=settings.compute == "exact" and codec is None,
    )
    return Worker(engine=engine, card=card, files=tokenizer_files(model.folder))


def _runner(
    model: LoadedModel,
    adapters: list[Adapter],
    codec: NumberFormat | None,
    settings: WorkerSettings,
    num_blocks: int,
) -> Runner:
    if not adapters:
        return _plain_runner(model, codec, settings, num_blocks)
    if settings.compute == "exact":
        raise ModelUnavailable("HEADSTART_COMPUTE=exact: the layers of adapters cannot be computed exactly")
    # Before layers are packed: `peft` knows the plain ones.
    loaded = Adapters(model.network, adapters)
    return AdapterRunner(_plain_runner(model, codec, settings, num_blocks), loaded)


def _plain_runner(
    model: LoadedModel, codec: NumberFormat | None, settings: WorkerSettings, num_blocks: int
) -> Runner:
    is_exact = settings.compute == "exact"
    if model.uncached_reason is not None:
        if is_exact:
            raise ModelUnavailable(f"HEADSTART_COMPUTE=exact: {model.uncached_reason}")
        return UncachedRunner(model)
    pack_linear_layers(model.network)
    if is_exact and not computes_exactly(model, codec):
        raise ModelUnavailable(
            f"HEADSTART_COMPUTE=exact: on this machine ({model.device}, {model.dtype}, "
            f"{torch.get_num_threads()} threads) a token's bits depend on what is computed beside it"
        )
    pool = make_pool(
        model.kv_shape,
        codec,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    return ModelRunner(model, pool, tiles_of if is_exact else segments_of)


def _device(settings: WorkerSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ModelUnavailable("device cuda was asked for, and torch sees none")
    return torch.device(settings.device)


def _dtype(settings: WorkerSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        # CPUs compute float32 faster; GPUs are made for bfloat16.
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype


def _codec(model: LoadedModel, settings: WorkerSettings) -> NumberFormat | None:
    """How keys and values are packed; None where they are kept as they are, as a model's own state is."""
    codec = None if model.uncached_reason else CODECS.get(settings.kv_dtype)
    head_dim = model.kv_shape.head_dim
    if codec is not None and not codec.fits(head_dim):
        raise ModelUnavailable(
            f"HEADSTART_KV_DTYPE={codec.name} puts several numbers in a byte, and heads have {head_dim}"
        )
    return codec


def _blocks_that_fit(kv_bytes_per_token: int, settings: WorkerSettings) -> int:
    block_bytes = kv_bytes_per_token * settings.block_size
    num_blocks = int(settings.kv_cache_gib * 2**30) // block_bytes
    if num_blocks < 1:
        raise ModelUnavailable(
            f"a KV block of {settings.block_size} tokens needs {block_bytes} bytes; "
            f"kv_cache_gib {settings.kv_cache_gib} holds none"
        )
    return num_blocks
