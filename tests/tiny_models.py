"""Tiny random models and a byte tokenizer, made on the spot: real architectures, no downloads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.attention import ATTENTION_NAME
from model_worker.models import LoadedModel, uncached_reason, wrap_network

END_OF_TEXT = "<|end|>"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Every byte is a token (ids 0 to 255); 256 ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def tiny_llama_config(**changes: object) -> LlamaConfig:
    """Two layers, grouped-query attention, a vocabulary of 257."""
    settings: dict[str, object] = {
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": None,
        "initializer_range": 0.4,  # wide enough that greedy texts differ from prompt to prompt
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(settings | changes))


def tiny_llama(
    folder: Path, *, seed: int = 0, attention: str = ATTENTION_NAME, **changes: object
) -> LoadedModel:
    """A random Llama in memory; `folder` gets the tokenizer that the engine loads."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    config = tiny_llama_config(**changes)
    config._attn_implementation = attention
    network = LlamaForCausalLM(config).eval()
    return wrap_network(network, name="tiny-llama", folder=folder, fingerprint=f"tiny-{seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of model in `transformers`, and what its tiny one is told beyond the usual settings."""

    config: str
    network: str
    settings: dict[str, object] = field(default_factory=dict)


USUAL: dict[str, object] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
GROUPED: dict[str, object] = {"num_key_value_heads": 2, "head_dim": 16}
NO_DROPOUT: dict[str, object] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

FAMILIES = {
    "llama": Family(config="LlamaConfig", network="LlamaForCausalLM", settings=GROUPED),
    "llama, one key head": Family(
        config="LlamaConfig", network="LlamaForCausalLM", settings={"num_key_value_heads": 1}
    ),
    "llama, all key heads": Family(
        config="LlamaConfig", network="LlamaForCausalLM", settings={"num_key_value_heads": 4}
    ),
    "qwen2": Family(config="Qwen2Config", network="Qwen2ForCausalLM", settings=GROUPED),
    "qwen3": Family(config="Qwen3Config", network="Qwen3ForCausalLM", settings=GROUPED),
    "mistral": Family(
        config="MistralConfig", network="MistralForCausalLM", settings=GROUPED | {"sliding_window": None}
    ),
    "mixtral": Family(
        config="MixtralConfig",
        network="MixtralForCausalLM",
        settings=GROUPED | {"sliding_window": None, "num_local_experts": 4},
    ),
    "gemma": Family(
        config="GemmaConfig", network="GemmaForCausalLM", settings={"num_key_value_heads": 1, "head_dim": 32}
    ),
    "gemma2": Family(
        config="Gemma2Config",
        network="Gemma2ForCausalLM",
        settings=GROUPED
        | {
            "layer_types": ["full_attention", "full_attention"],
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt-neox": Family(config="GPTNeoXConfig", network="GPTNeoXForCausalLM"),
    "gpt2": Family(config="GPT2Config", network="GPT2LMHeadModel", settings=NO_DROPOUT),
    "gpt-bigcode": Family(
        config="GPTBigCodeConfig",
        network="GPTBigCodeForCausalLM",
        settings=NO_DROPOUT | {"multi_query": True},
    ),
    "phi": Family(config="PhiConfig", network="PhiForCausalLM"),
    "phi3": Family(config="Phi3Config", network="Phi3ForCausalLM", settings={"num_key_value_heads": 2}),
    "olmo2": Family(config="Olmo2Config", network="Olmo2ForCausalLM", settings={"num_key_value_heads": 2}),
}
"""Full attention through the attention interface: prefixes are reused."""

WINDOW = 24
"""Tokens that a windowed tiny model sees: fewer than a test's prompts have."""

UNCACHED_FAMILIES = {
    "mistral, windowed": Family(
        config="MistralConfig", network="MistralForCausalLM", settings=GROUPED | {"sliding_window": WINDOW}
    ),
    "gemma2, every other layer windowed": Family(
        config="Gemma2Config",
        network="Gemma2ForCausalLM",
        settings=GROUPED | {"sliding_window": WINDOW, "attn_logit_softcapping": 4.0},
    ),
    "gemma3": Family(
        config="Gemma3TextConfig",
        network="Gemma3ForCausalLM",
        settings=GROUPED
        | {
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    ),
    "gpt-oss, with sinks": Family(
        config="GptOssConfig",
        network="GptOssForCausalLM",
        settings=GROUPED
        | {"layer_types": ["full_attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba": Family(config="MambaConfig", network="MambaForCausalLM"),
    "mamba2": Family(
        config="Mamba2Config",
        network="Mamba2ForCausalLM",
        settings={"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 16},
    ),
    "lfm2": Family(
        config="Lfm2Config",
        network="Lfm2ForCausalLM",
        settings={"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    ),
    "qwen3-next": Family(
        config="Qwen3NextConfig",
        network="Qwen3NextForCausalLM",
        settings=GROUPED
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon": Family(config="FalconConfig", network="FalconForCausalLM"),
}
"""Each for another reason: no prefix of theirs is reused."""


def tiny(
    family: Family,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = ATTENTION_NAME,
    seed: int = 0,
    **changes: object,
) -> LoadedModel:
    """A random network of a family in memory, the same for the same seed whatever its attention."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    config: Any = getattr(transformers, family.config)(**(USUAL | family.settings | changes))
    fits = attention != ATTENTION_NAME or uncached_reason(config) is None
    config._attn_implementation = attention if fits else None
    network = getattr(transformers, family.network)(config).eval().to(dtype)
    return wrap_network(network, name=family.network, folder=folder, fingerprint=f"{family.network}-{seed}")
