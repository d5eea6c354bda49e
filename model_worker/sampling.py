"""Choosing the next token from logits.

Knows sampling parameters and a text's own tokens. Does not know batches,
blocks or models. The randomness of a draw is a function of (seed, position),
so a seeded text is the same whatever shares the batch, after a preemption, and
on another worker.

Logits become a choice in this order: repetition penalty, presence and
frequency penalties, bias, suppressed ends, structure; then temperature, top-k,
top-p, min-p and the draw. Log probabilities are taken before all of that.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from model_worker.protocol import SamplingParams
from model_worker.structured import StructureDeadEnd, StructureState

LOGPROB_FLOOR = -9999.0
"""Stands for a probability of zero: JSON has no infinity."""

_HEADS = (256, 4096)


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token; `logprob` and `top` (token, logprob), falling, where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """There is no next token: the structure asked for cannot be gone on with."""

    message: str


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` and `position` alone."""
    digest = xxhash.xxh3_64_intdigest(position.to_bytes(8, "little"), seed=seed % 2**64)
    return (digest >> 11) * 2.0**-53


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a request's choice number `choice`: streams of draws that have nothing in common."""
    if choice == 0:
        return seed
    return xxhash.xxh3_64_intdigest(b"choice" + choice.to_bytes(8, "little"), seed=seed % 2**64)


def sample_token(logits: torch.Tensor, params: SamplingParams, *, seed: int, position: int) -> int:
    """The next token for one row of logits `[vocab]`.

    Temperature, then top-k, top-p and min-p, then inverse-CDF sampling in
    float64 over tokens in order of falling probability.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    limit = min(params.top_k or logits.numel(), logits.numel())
    draw = uniform_draw(seed, position)
    weights = _Weights(logits, params.temperature)
    mass = weights.sum_of_likeliest(limit)
    # The likeliest few nearly always decide; putting a whole vocabulary in order is 20 times the work.
    for head in (*_HEADS, limit):
        if head <= limit:
            chosen = _draw_among(weights, params, draw, head=head, limit=limit, mass=mass)
            if chosen is not None:
                return chosen
    raise AssertionError("all that can be drawn were looked at")


class _Weights:
    """Probabilities up to a factor, in float64: relative to the likeliest token's, so that none overflows."""

    def __init__(self, logits: torch.Tensor, temperature: float) -> None:
        self._logits = logits
        self._largest = logits.max()
        self._temperature = temperature

    def likeliest(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights and tokens of the `count` likeliest, falling."""
        if count < self._logits.numel():
            values, tokens = self._logits.topk(count)
        else:
            values, tokens = self._logits.sort(descending=True, stable=True)
        return self._of(values), tokens

    def sum_of_likeliest(self, count: int) -> float:
        every = count == self._logits.numel()
        return float(self._of(self._logits if every else self._logits.topk(count).values).sum())

    def _of(self, values: torch.Tensor) -> torch.Tensor:
        return ((values.double() - self._largest) / self._temperature).exp()


def _draw_among(
    weights: _Weights, params: SamplingParams, draw: float, *, head: int, limit: int, mass: float
) -> int | None:
    """The drawn token if the `head` likeliest tell it, of `limit` that weigh `mass` together; else None."""
    shares, tokens = weights.likeliest(head)
    cumulative = shares.cumsum(0)
    # The nucleus is the shortest run that reaches top_p; it always holds at least one token.
    nucleus = int((cumulative < params.top_p * mass).sum()) + 1 if params.top_p < 1.0 else limit
    likely = int((shares >= params.min_p).sum()) if params.min_p > 0.0 else limit
    kept = min(nucleus, limit if likely == head else likely, limit)
    if kept <= head:
        mass = float(cumulative[kept - 1])
    elif params.top_p == 1.0 and params.min_p == 0.0 and draw * mass < float(cumulative[-1]):
        kept = head
    else:
        return None
    chosen = int((cumulative[:kept] <= draw * mass).sum())
    if chosen == kept:  # rounded up: the last one that adds to the sum
        chosen = int((cumulative[:kept] < cumulative[kept - 1]).sum())
    return int(tokens[chosen])


class Sampler:
    """How one text goes on. A function of its parameters and tokens: a preemption changes nothing.

    `choose` looks, `accept` goes on. With nothing asked for, a choice is one argmax.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt: Iterable[int],
        eos_token_ids: frozenset[int],
        structure: StructureState | None = None,
        choice: int = 0,
    ) -> None:
        self._params = params
        self._seed = secrets.randbits(63) if params.seed is None else choice_seed(params.seed, choice)
        self._structure = structure
        self._penalties = _Penalties(params, prompt) if _has_penalties(params) else None
        self._ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ends |= eos_token_ids
        # A structure ends where it is complete; its end-of-text token is no token like any other.
        self._never = eos_token_ids if params.ignore_eos and structure is not None else frozenset()
        self._bias = _Bias(params.logit_bias) if params.logit_bias else None
        self.is_plain = (
            params.temperature == 0.0
            and params.top_logprobs is None
            and structure is None
            and self._penalties is None
            and self._bias is None
            and not (params.min_tokens and self._ends)
        )
        """Whether every choice is the argmax of the model's own logits."""
        self.has_ended = False

    def choose(self, logits: torch.Tensor, *, position: int) -> Choice | DeadEnd:
        """The token at output `position`, from a row of logits `[vocab]` in float32 that stays as it is."""
        if self.is_plain:
            return Choice(int(logits.argmax()))
        try:
            shaped = self._shape(logits, position)
        except StructureDeadEnd as error:
            return DeadEnd(str(error))
        token = sample_token(shaped, self._params, seed=self._seed, position=position)
        if self._params.top_logprobs is None:
            return Choice(token)
        return _with_logprobs(token, logits, self._params.top_logprobs)

    def accept(self, token: int) -> None:
        """Goes on by a token; `has_ended` says whether it ends the text."""
        if self._penalties is not None:
            self._penalties.observe(token)
        if self._structure is not None:
            self._structure.accept(token)
        self.has_ended = self.is_end(token) or (self._structure is not None and self._structure.is_complete)

    def is_end(self, token: int) -> bool:
        """Whether this token ends a text, and is no part of it."""
        return token in self._ends

    def _shape(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """The logits to draw from: the same tensor where nothing changes them, else a copy."""
        shaped = logits
        if self._penalties is not None:
            shaped = self._penalties.applied(shaped)
        if self._bias is not None:
            shaped = self._bias.added(shaped)
        suppressed = self._never | self._ends if position < self._params.min_tokens else self._never
        if self._structure is not None:
            allowed = _without(self._structure.allowed(), suppressed)
            return shaped.masked_fill(torch.from_numpy(~allowed).to(shaped.device), -torch.inf)
        if suppressed:
            return shaped.index_fill(0, torch.tensor(sorted(suppressed), device=shaped.device), -torch.inf)
        return shaped


def _without(allowed: NDArray[np.bool_], suppressed: frozenset[int]) -> NDArray[np.bool_]:
    """What a structure allows less the suppressed ends, unless nothing else is left: an end is due then."""
    if not suppressed:
        return allowed
    narrowed = allowed.copy()
    narrowed[list(suppressed)] = False
    return narrowed if narrowed.any() else allowed


def _with_logprobs(token: int, logits: torch.Tensor, count: int) -> Choice:
    logprobs = logits.log_softmax(0)
    values, tokens = logprobs.topk(min(count, logprobs.numel()))
    top = zip(tokens.tolist(), values.clamp(min=LOGPROB_FLOOR).tolist(), strict=True)
    return Choice(token, max(float(logprobs[token]), LOGPROB_FLOOR), tuple(top))


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


class _Bias:
    """OpenAI's `logit_bias`: numbers added to some tokens' logits."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._tokens = torch.tensor(list(bias))
        self._values = torch.tensor(list(bias.values()))

    def added(self, logits: torch.Tensor) -> torch.Tensor:
        values = self._values.to(logits.device, logits.dtype)
        return logits.index_add(0, self._tokens.to(logits.device), values)


class _Penalties:
    """What a text's tokens take from their own logits. Counts are kept up token by token.

    Repetition is the CTRL paper's (Keskar et al. 2019), as `transformers` has it:
    a positive logit is divided and a negative one multiplied, for every token of
    prompt and text. Presence and frequency are OpenAI's: logits less
    presence x (count > 0) + frequency x count, for tokens of the text alone.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._params = params
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        # Not yet in the tensors, whose size and device the first logits tell.
        self._new_prompt = array("I", prompt if params.repetition_penalty != 1.0 else ())
        self._new = array("I")

    def observe(self, token: int) -> None:
        self._new.append(token)

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        counts, seen = self._caught_up(logits)
        params = self._params
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits < 0, logits * factor, logits / factor), logits)
        if params.presence_penalty or params.frequency_penalty:
            logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        return logits

    def _caught_up(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._new_prompt.tolist(), dtype=torch.long, device=logits.device)] = True
        if self._new:
            new = torch.tensor(self._new.tolist(), dtype=torch.long, device=logits.device)
            self._counts.index_add_(0, new, torch.ones_like(new, dtype=logits.dtype))
            self._seen[new] = True
            del self._new[:]
        return self._counts, self._seen
