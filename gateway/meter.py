"""Every request has an account: opened before dispatch, settled once, whatever happens in between.

Knows the billing meter's calls and how to reach it from an event loop. Does
not know prices, SQL or dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from billing.errors import BudgetExceeded, MeterRefusal, UnpricedModel
from billing.instants import Clock, Microseconds
from billing.limits import RateLimited, Standing
from billing.meter import Meter
from billing.usage import Admission, Estimate, TokenCounts, UsageEvent, UsageKind
from gateway.edge.errors import NO_RETRY, ServiceUnavailable
from gateway.limits import refusal_of
from gateway.phases import Phases
from gateway.relay import Tally

OBSERVE_EVERY_TOKENS: Final = 32
POSTING_SECONDS: Final = 5
UNSUPPORTED_LAYERS: Final = "unsupported_layers"
"""Why a model that keeps more than keys and values misses every prompt."""


class Account:
    """One request's account. States: open → admitted → settled."""

    def __init__(
        self,
        meter: Meter,
        admission: Admission,
        tally: Tally,
        *,
        estimate: Estimate,
        worker: str,
        uncached_reason: str | None,
        started_ns: int,
        clock: Clock,
        phases: Phases,
    ) -> None:
        self._meter = meter
        self._admission = admission
        self._tally = tally
        self._estimate = estimate
        self._worker = worker
        self._uncached_reason = uncached_reason
        self._started_ns = started_ns
        self._clock = clock
        self._phases = phases
        self._observed_total = 0
        self._is_settled = False
        self.worker_epoch: str | None = None

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Standing | None]:
        """Yields how the request's limits stand, if it has any.

        Raises `ServiceUnavailable` when the request cannot be metered: unmetered work is not begun.
        Raises `InsufficientQuota` or `RateLimitExceeded` when a budget or limit has no room for it.
        """
        try:
            with self._phases.timed("admit"):
                # Shielded: the row may be committed although the client left, and then it must be
                # settled too.
                admitting = self._meter.admit(self._admission, self._estimate)
                grant = await asyncio.shield(asyncio.wrap_future(admitting))
        except (BudgetExceeded, RateLimited) as error:
            raise refusal_of(error) from error
        except UnpricedModel as error:
            raise ServiceUnavailable(
                "The model has no price yet.", code="model_not_priced", headers=NO_RETRY
            ) from error
        except MeterRefusal as error:
            raise ServiceUnavailable(
                "The request cannot be metered at the moment.", code="meter_unavailable"
            ) from error
        except asyncio.CancelledError:
            self._settle()
            raise
        try:
            yield grant.standing
        finally:
            self._settle()  # no await: a hang-up cancels every await in this block

    def observe(self) -> None:
        """Leaves evidence of the counts so far, now and then, in case this process dies."""
        if self._observed_total == 0:
            self._narrow()
        total = self._tally.counts.total
        if self._observed_total == 0 or total - self._observed_total >= OBSERVE_EVERY_TOKENS:
            self._meter.observe(self._event(UsageKind.ABORTED))
            self._observed_total = total

    async def conclude(self) -> None:
        """Notes all that was used, before the client is told that the answer is whole.

        In the journal; where that cannot be written, in the database. Raises
        `ServiceUnavailable` when neither can: nothing is told that could be forgotten.
        """
        if self._meter.observe(self._event(UsageKind.ABORTED)):
            return
        self._settle()
        try:
            await asyncio.to_thread(self._meter.flush, timeout_seconds=POSTING_SECONDS)
        except MeterRefusal as error:
            raise ServiceUnavailable(
                "What this request used cannot be written down.", code="meter_unavailable"
            ) from error

    def _narrow(self) -> None:
        """The worker has told what comes from the cache: no more than the rest needs to stay reserved."""
        started = self._tally.started
        if started is not None and started.cached.total > self._estimate.read:
            self._estimate = msgspec.structs.replace(self._estimate, read=started.cached.total)
            self._meter.narrow(self._admission, self._estimate)

    def _settle(self) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        is_final = self._tally.finish_reason is not None
        with self._phases.timed("settle"):
            self._meter.settle(self._event(UsageKind.FINAL if is_final else UsageKind.ABORTED))

    def _event(self, kind: UsageKind) -> UsageEvent:
        tally, counts = self._tally, self._tally.counts
        return UsageEvent(
            admission=self._admission,
            kind=kind,
            counts=TokenCounts(uncached=counts.uncached, read=counts.read, output=counts.output),
            finished_at=Microseconds(self._clock()),
            delivered=tally.delivered,
            finish_reason=tally.finish_reason or (tally.failure.code if tally.failure else None),
            first_token_ns=None if tally.first_token_at is None else tally.first_token_at - self._started_ns,
            worker=self._worker,
            worker_epoch=self.worker_epoch,
            miss_reason=miss_reason(self._tally, self._uncached_reason),
        )


def miss_reason(tally: Tally, uncached_reason: str | None) -> str | None:
    """Why not more was found, in the one vocabulary of all surfaces."""
    started = tally.started
    if started is None or started.missed is None:
        return None
    return UNSUPPORTED_LAYERS if uncached_reason is not None else started.missed.reason
