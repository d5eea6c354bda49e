"""Which models may have their prefixes reused: by configuration, by class and by trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, MistralConfig, Qwen2Config

from model_worker.models import uncached_reason, wrap_network
from model_worker.reuse import why_not_by_class, why_not_by_configuration, why_not_by_trial
from tests.tiny_models import FAMILIES, tiny


def test_a_window_counts_where_it_is_used() -> None:
    assert why_not_by_configuration(MistralConfig(sliding_window=None)) is None
    assert why_not_by_configuration(MistralConfig(sliding_window=64)) is not None
    # Qwen2 states a window that it does not use.
    unused = Qwen2Config(sliding_window=64, use_sliding_window=False)
    used = Qwen2Config(sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert why_not_by_configuration(unused) is None
    assert why_not_by_configuration(used) == "qwen2 has layers of sliding_attention"


def test_a_class_that_computes_its_attention_by_itself_is_named() -> None:
    assert why_not_by_class(LlamaForCausalLM) is None
    assert why_not_by_class(transformers.BloomForCausalLM) is not None
    assert (
        uncached_reason(transformers.FalconConfig()) == "FalconForCausalLM computes its attention by itself"
    )


def with_memory(network: Any) -> None:
    """Its logits depend on how often it was called: state beside keys and values."""
    calls = []

    def add(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        output.logits[..., 0] += 10.0 * len(calls)
        calls.append(inputs)

    network.register_forward_hook(add, with_kwargs=True)


def with_sinks(network: Any) -> None:
    network.register_forward_pre_hook(
        lambda _, args, inputs: (args, inputs | {"s_aux": torch.zeros(4)}), with_kwargs=True
    )


def with_deaf_layers(network: Any) -> None:
    """They do not pass on what they do not know."""
    for layer in network.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, inputs: (args, {name: inputs[name] for name in inputs if name != "paged"}),
            with_kwargs=True,
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_memory, "depends on more than keys and values"),
        (with_sinks, "its attention takes s_aux"),
        (with_deaf_layers, "cannot be given a paged cache"),
    ],
)
def test_the_trial_finds_what_nothing_else_says(
    change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    network = tiny(FAMILIES["llama"], tmp_path).network
    assert why_not_by_trial(network) is None
    change(network)
    model = wrap_network(network, name="changed", folder=tmp_path, fingerprint="")
    assert model.uncached_reason is not None
    assert reason in model.uncached_reason
    assert network.config._attn_implementation == "sdpa", "it has its own attention back"
