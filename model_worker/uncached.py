"""Forward passes of models whose prefixes cannot be reused: each sequence has a cache of the model's own.

Knows tensors, the model and which lease a sequence holds. Does not know
blocks: in such a worker they account for memory and hold nothing.

A sequence's state lives as long as its lease, so that a text that ends, is
cancelled or is preempted leaves nothing; one that resumes is computed again.
Sequences are computed one after another, as `generate` of `transformers` does.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any
from weakref import WeakKeyDictionary

import torch

from model_worker.models import LoadedModel
from model_worker.reuse import relative_distance, trial_tokens
from model_worker.runner import next_tokens
from model_worker.sampling import Choice, DeadEnd
from model_worker.scheduler import Chunk, Step
from prefix_store.leases import Lease, RowCopy

STATE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What models call their cache, as an argument and in what they return; it differs by model and release.
One that has none is computed anew each time."""


CHUNK_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.01}
"""How far logits may be apart in the trial of chunks. Rounding alone that fails it makes slow, not wrong."""


class UncachedRunner:
    """Executes steps sequence by sequence on the model's own cache."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        parameters = inspect.signature(model.network.forward).parameters
        self._state_name = next((name for name in STATE_NAMES if name in parameters), "")
        self._keeps_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._states: WeakKeyDictionary[Lease, Any] = WeakKeyDictionary()
        self._continues_in_chunks = self._try_chunks()

    @property
    def num_states(self) -> int:
        return len(self._states)

    def copy(self, copies: Items[RowCopy]) -> None:
        """Nothing: blocks hold nothing here."""

    @torch.inference_mode()
    def fork(self, first: Lease, fork: Lease) -> None:
        if first in self._states:
            self._states[fork] = copy.deepcopy(self._states[first])

    @torch.inference_mode()
    def execute(self, step: Step) -> list[list[Choice | DeadEnd]]:
        chosen = []
        for chunk in step.chunks:
            step.go_on_or_raise()
            chosen.append(self._execute(chunk))
        return chosen

    def _execute(self, chunk: Chunk) -> list[Choice | DeadEnd]:
        lease = chunk.sequence.lease
        assert lease is not None, "a scheduled sequence holds its blocks"
        state = self._states[lease] if chunk.start and lease in self._states else None
        logits, state = self._compute(chunk.sequence.tokens, chunk.start, chunk.stop, state)
        if state is not None:
            self._states[lease] = state
        return next_tokens(chunk, logits) if chunk.samples else []

    def _compute(self, tokens: Items[int], start: int, stop: int, state: Any) -> tuple[torch.Tensor, Any]:
        """Logits `[vocab]` in float32 after the last token, and the state there."""
        if state is None:
            start = 0
        name = self._state_name
        for first, last in self._pieces(start, stop):
            output = self._model.network(
                input_ids=torch.tensor([list(tokens[first:last])], device=self._model.device),
                use_cache=True,
                **self._keeps_logits,
                **({} if state is None else {name: state}),
            )
            state = output.get(name)
        return output.logits[0, -1].float(), state

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What is computed at once: from a state on, only what the model is known to get right."""
        if start == 0 or self._continues_in_chunks:
            yield start, stop
        else:
            yield from ((position, position + 1) for position in range(start, stop))

    @torch.inference_mode()
    def _try_chunks(self) -> bool:
        """Whether several tokens after a state give what all at once give; not with every state."""
        self._continues_in_chunks = True
        tokens = trial_tokens(self._model.vocab_size)
        whole, _ = self._compute(tokens, 0, len(tokens), None)
        half = len(tokens) // 2
        _, state = self._compute(tokens, 0, half, None)
        try:
            parts, _ = self._compute(tokens, half, len(tokens), state)
        except (RuntimeError, ValueError):
            return False
        return relative_distance(parts, whole) <= CHUNK_TOLERANCES[self._model.dtype]
