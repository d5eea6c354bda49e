"""Tiny random models and a byte tokenizer, made on the spot: real architectures, no downloads."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from model_worker.attention import ATTENTION_NAME
from model_worker.models import LoadedModel, wrap_network

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
