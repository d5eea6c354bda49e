"""One forward pass over packed chunks, and the tokens it chooses.

Knows tensors and the model. Sees sequences only as integers: tokens, block
tables, positions.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from model_worker.attention import PackedSequence, PagedCache, cache_argument, causal_mask
from model_worker.kv_cache import KVCache
from model_worker.models import LoadedModel
from model_worker.sampling import sample_token
from model_worker.scheduler import Chunk, Step


class ModelRunner:
    """Executes steps on one model and one KV pool."""

    def __init__(self, model: LoadedModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._cache_argument = cache_argument(model.network)
        self._group = model.network.config.num_attention_heads // model.num_kv_heads

    @torch.inference_mode()
    def execute(self, step: Step) -> list[int | None]:
        """Computes the step; per chunk the next token, or None where the prompt goes on."""
        self._cache.copy_rows(step.copies)
        logits = self._forward(step.chunks)
        rows = iter(logits)
        return [self._next_token(chunk, next(rows)) if chunk.samples else None for chunk in step.chunks]

    def _forward(self, chunks: Items[Chunk]) -> torch.Tensor:
        """Logits `[chunks that sample, vocab]` in float32."""
        device = self._model.device
        token_ids: list[int] = []
        positions: list[int] = []
        new_slots: list[torch.Tensor] = []
        packed: list[PackedSequence] = []
        last_rows: list[int] = []
        for chunk in chunks:
            lease = chunk.sequence.lease
            assert lease is not None, "a scheduled sequence holds its blocks"
            context = self._cache.slots(lease.block_table, 0, chunk.stop)
            begin = len(token_ids)
            token_ids.extend(chunk.sequence.tokens[chunk.start : chunk.stop])
            positions.extend(range(chunk.start, chunk.stop))
            new_slots.append(context[chunk.start :])
            packed.append(
                PackedSequence(
                    rows=slice(begin, len(token_ids)),
                    context_slots=context,
                    mask=causal_mask(
                        start=chunk.start,
                        stop=chunk.stop,
                        group=self._group,
                        dtype=self._model.dtype,
                        device=device,
                    ),
                )
            )
            if chunk.samples:
                last_rows.append(len(token_ids) - 1)
        paged = PagedCache(self._cache, torch.cat(new_slots), packed)
        output = self._model.network(
            input_ids=torch.tensor([token_ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=True,
            # A step that only continues prompts samples nothing; one row is the least a model accepts.
            logits_to_keep=torch.tensor(last_rows or [0], device=device),
            paged=paged,
            **{self._cache_argument: paged},
        )
        logits: torch.Tensor = output.logits[0, : len(last_rows)]
        return logits.float()

    def _next_token(self, chunk: Chunk, logits: torch.Tensor) -> int:
        sequence = chunk.sequence
        return sample_token(
            logits, sequence.request.sampling, seed=sequence.seed, position=sequence.num_output
        )
