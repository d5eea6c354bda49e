"""LoRA adapters of one model, side by side with it in one worker.

Knows `peft`, adapter folders and which adapter a sequence asks for. Does not
know blocks: the fingerprint of its adapter is part of a sequence's scope.

`peft` puts a low-rank pair of matrices beside the linear layers that an adapter
changes (LoRA: Hu et al. 2021). All adapters are in memory, at most one is active, and
the sequences of a step are computed adapter by adapter. Only adapters that leave
the base as it is are taken: whatever would change the weights, embeddings or
biases that others compute with is refused by name.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from model_worker.models import ModelUnavailable, model_fingerprint
from model_worker.runner import Runner
from model_worker.sampling import Choice, DeadEnd
from model_worker.scheduler import Step
from prefix_store.leases import Lease, RowCopy

CONFIGURATION_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

REFUSED_SETTINGS = (
    # They change what the plain model and other adapters compute with.
    *("modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters"),
    # It depends on where in the prompt it is: a prefix could not be reused.
    "alora_invocation_tokens",
    # More than a low-rank pair beside a layer; the first needs weights that are packed away.
    *("use_dora", "use_qalora", "velora_config", "monteclora_config", "arrow_config", "kasa_config"),
)
PLAIN_BEGINNINGS = (True, False, "gaussian")
"""Of `init_lora_weights`: the other ones take something away from the base's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """`name` is the model name that clients use; `fingerprint` names the exact weights and settings."""

    name: str
    folder: Path
    fingerprint: str


class Adapters:
    """Those loaded on one network. `activate` moves between them and the plain model."""

    def __init__(self, network: Any, adapters: Items[Adapter]) -> None:
        """Loads them, at least one. Raises `ModelUnavailable`."""
        # Module names have no dots: model names may.
        self._modules = {adapter.name: f"adapter_{index}" for index, adapter in enumerate(adapters)}
        self._layers = _load(network, {self._modules[one.name]: one for one in adapters})
        self._active: str | None = None
        self._switch([])

    @property
    def active(self) -> str | None:
        return self._active

    def activate(self, name: str | None) -> None:
        """From now on the network computes with this adapter; with None it is the plain model."""
        if name != self._active:
            self._switch([] if name is None else [self._modules[name]])
            self._active = name

    def _switch(self, modules: list[str]) -> None:
        for layer in self._layers:
            layer.set_adapter(modules, inference_mode=True)


class AdapterRunner:
    """Another runner's steps, adapter by adapter."""

    def __init__(self, runner: Runner, adapters: Adapters) -> None:
        self._runner = runner
        self._adapters = adapters

    def copy(self, copies: Items[RowCopy]) -> None:
        self._runner.copy(copies)

    def fork(self, first: Lease, fork: Lease) -> None:
        self._runner.fork(first, fork)

    def execute(self, step: Step) -> list[list[Choice | DeadEnd]]:
        groups: defaultdict[str | None, list[int]] = defaultdict(list)
        for index, chunk in enumerate(step.chunks):
            groups[chunk.sequence.request.adapter].append(index)
        chosen: list[list[Choice | DeadEnd]] = [[] for _ in step.chunks]
        # The active one goes first: one switch less.
        for name in sorted(groups, key=lambda name: name != self._adapters.active):
            self._adapters.activate(name)
            part = replace(step, chunks=[step.chunks[index] for index in groups[name]])
            for index, choices in zip(groups[name], self._runner.execute(part), strict=True):
                chosen[index] = choices
        return chosen


def adapters_of(setting: str, *, base: str) -> list[Adapter]:
    """From `name=folder,folder,…`; one without a name is called `base:folder's name`.

    Raises `ModelUnavailable`.
    """
    adapters: dict[str, Adapter] = {}
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        given, _, path = entry.rpartition("=")
        folder = Path(path).expanduser()
        name = given.strip() or f"{base}:{folder.resolve().name}"
        for file in (CONFIGURATION_FILE, WEIGHTS_FILE):
            if not (folder / file).is_file():
                raise ModelUnavailable(f"{folder} is not an adapter folder: {file} is missing")
        if name in adapters or name == base:
            raise ModelUnavailable(f"two models would be called {name}: give adapters names of their own")
        fingerprint = model_fingerprint(folder, configuration=CONFIGURATION_FILE)
        adapters[name] = Adapter(name=name, folder=folder, fingerprint=fingerprint)
    return list(adapters.values())


def _load(network: Any, adapters: dict[str, Adapter]) -> list[Any]:
    """Puts adapters on a network, by module name; returns the layers that have them."""
    if importlib.util.find_spec("peft") is None:
        raise ModelUnavailable("adapters need peft: pip install 'headstart[adapters]'")
    from peft import PeftModel  # noqa: PLC0415  (an extra)
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415

    wrapped: Any = None
    for module, adapter in adapters.items():
        _refuse_unsupported(adapter)
        try:
            if wrapped is None:
                wrapped = PeftModel.from_pretrained(network, str(adapter.folder), adapter_name=module)
            else:
                wrapped.load_adapter(str(adapter.folder), adapter_name=module)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ModelUnavailable(f"the adapter {adapter.name} does not fit this model: {error}") from error
    return [module for module in network.modules() if isinstance(module, BaseTunerLayer)]


def _refuse_unsupported(adapter: Adapter) -> None:
    from peft import PeftConfig, PeftType  # noqa: PLC0415

    try:
        config = PeftConfig.from_pretrained(str(adapter.folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelUnavailable(f"{adapter.folder / CONFIGURATION_FILE} cannot be read: {error}") from error
    what = None
    if config.peft_type != PeftType.LORA:
        what = f"it is of the kind {config.peft_type}"
    elif set_ones := [name for name in REFUSED_SETTINGS if getattr(config, name, None)]:
        what = f"it sets {', '.join(set_ones)}"
    elif config.bias != "none":
        what = f"it changes biases ({config.bias})"
    elif config.init_lora_weights not in PLAIN_BEGINNINGS:
        what = f"it begins as {config.init_lora_weights}, which changes the base"
    if what is not None:
        raise ModelUnavailable(f"the adapter {adapter.name} cannot be served beside others: {what}")
