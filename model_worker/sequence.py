"""One text being generated: its tokens, its blocks, and how far it is.

States: waiting -> following -> begun -> finished. A follower holds what is
cached of its prompt while another sequence computes its next blocks; most
sequences begin at once. A preempted sequence goes back to waiting and keeps its
tokens.

Of a request for several texts the first computes the prompt and the others are
its `forks`: they begin when its first token is chosen, with their own choice
from the same logits. Only the scheduler moves a sequence between states and touches its
lease; only the engine appends tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from model_worker.detokenizer import Detokenizer
from model_worker.protocol import FinishReason, GenerateRequest, Started
from model_worker.sampling import Sampler
from prefix_store.leases import Lease


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A prompt and what was generated after it.

    `cache_scope` is where its blocks may be found: the request's scope, and its adapter.
    `num_computed` counts tokens whose KV is in the pool. `started` is frozen at
    first beginning: preemption and resumption never turn into customer hits.
    `num_computed_before` is how far it was when it was last preempted. `urgency` is
    the priority it has from its own request or one that waits for its blocks; less is
    more urgent. A follower has seen no progress of `waits_for`, (leader, its
    computed tokens), for `steps_waited` steps.
    """

    request: GenerateRequest
    detokenizer: Detokenizer
    sampler: Sampler
    tokens: array[int]
    num_prompt: int
    cache_scope: str
    lease: Lease | None = None
    has_begun: bool = False
    num_computed: int = 0
    started: Started | None = None
    num_computed_before: int = 0
    arrival: int = 0
    urgency: int = 0
    waits_for: tuple[Lease, int] | None = None
    steps_waited: int = 0
    choice: int = 0
    forks: list[Sequence] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        sampler: Sampler,
        *,
        choice: int = 0,
        cache_scope: str | None = None,
    ) -> Sequence:
        return cls(
            request=request,
            detokenizer=detokenizer,
            sampler=sampler,
            tokens=array("I", request.token_ids),
            num_prompt=len(request.token_ids),
            cache_scope=request.scope if cache_scope is None else cache_scope,
            choice=choice,
        )

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prompt

    @property
    def max_cached_tokens(self) -> int:
        """What may come from the cache: all but the last token, whose logits choose the next one."""
        return len(self.tokens) - 1 if self.shares_cache else 0

    @property
    def shares_cache(self) -> bool:
        return self.request.cache == "automatic"

    def append(self, token: int) -> str:
        """Goes on by a chosen token; returns text that became safe to send. One that ends it has none."""
        self.tokens.append(token)
        self.sampler.accept(token)
        return "" if self.sampler.is_end(token) else self.detokenizer.push(token)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why generation ends after the last token, or None while it goes on."""
        if self.detokenizer.stopped or self.sampler.has_ended:
            return "stop"
        return "length" if self.num_output >= self.request.sampling.max_tokens else None

    @property
    def matched(self) -> str | int | None:
        """The stop string or stop token that ended the text, if one did."""
        if self.detokenizer.matched is not None:
            return self.detokenizer.matched
        last = self.tokens[-1]
        return last if last in self.request.sampling.stop_token_ids else None
