"""A real gateway with a dashboard, without a model worker: its ledger is filled through the meter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from billing import instants
from billing.accounts import ApiKey, Role, Tenant, create_key, create_tenant, revoke_key
from billing.ids import new_request_id
from billing.instants import Microseconds
from billing.reports import UsageReport, usage_report
from billing.usage import Admission, TokenCounts, UsageEvent, UsageKind
from gateway.app import Gateway, build_app, build_gateway
from gateway.auth import key_hasher
from gateway.bootstrap import prepare_database
from gateway.serving import listen, serving
from gateway.settings import Settings

NOW = datetime(2026, 3, 12, 15, 40, 12, tzinfo=UTC)
MODEL = "smollm2-135m-instruct"
START_SECONDS = 30.0


class MovableClock:
    """A clock that a test turns forward."""

    def __init__(self, start: datetime = NOW) -> None:
        self._now = instants.from_datetime(start)

    def __call__(self) -> Microseconds:
        return self._now

    def forward(self, by: timedelta) -> None:
        self._now = instants.later(self._now, by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """A tenant and its key, with the secret that nobody else has."""

    tenant: Tenant
    key: ApiKey
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A gateway's parts, and where it can be visited."""

    gateway: Gateway
    clock: MovableClock
    url: str
    loop: asyncio.AbstractEventLoop

    @property
    def dashboard(self) -> str:
        return f"{self.url}/dashboard"

    def add_customer(self, name: str, *, role: Role = Role.TENANT) -> Customer:
        database, now = self.gateway.database, instants.now()
        tenant = create_tenant(database, name=name, now=now)
        key, secret = create_key(
            database,
            tenant_id=tenant.id,
            label="browser",
            hasher=key_hasher(self.gateway.secret),
            now=now,
            role=role,
        )
        return Customer(tenant=tenant, key=key, secret=secret)

    def record(self, customer: Customer, at: datetime, counts: TokenCounts, **more: Any) -> None:
        """One finished request, by the road that every request takes. `more` is of the event."""
        admitted_at = instants.from_datetime(at)
        self.gateway.meter.settle(
            UsageEvent(
                admission=Admission(
                    request_id=new_request_id(),
                    tenant_id=customer.tenant.id,
                    api_key_id=customer.key.id,
                    model=MODEL,
                    admitted_at=admitted_at,
                ),
                kind=UsageKind.FINAL,
                counts=counts,
                finished_at=instants.later(admitted_at, timedelta(seconds=2)),
                delivered=counts.output,
                finish_reason="stop",
                **more,
            )
        )

    def record_day(self, customer: Customer, *, scale: int = 1) -> None:
        """Conversations over the day so far: turns that grow, of which most is reused."""
        for hour, turns in enumerate((0, 0, 1, 0, 0, 0, 2, 3, 5, 7, 6, 4, 2, 6, 8, 3)):
            for turn in range(turns):
                self.record(
                    customer,
                    NOW.replace(hour=hour, minute=(7 * turn) % 40, second=turn),
                    TokenCounts(
                        uncached=(310 if turn % 4 == 0 else 47 + hour) * scale,
                        read=412 * (turn % 4) * scale,
                        output=(96 + 5 * turn) * scale,
                    ),
                )

    def report(self, customer: Customer) -> UsageReport:
        """What billing says about the clock's day."""
        self.gateway.meter.flush()
        start = instants.from_datetime(
            instants.to_datetime(self.clock()).replace(hour=0, minute=0, second=0, microsecond=0)
        )
        return usage_report(
            self.gateway.database,
            tenant_id=customer.tenant.id,
            start=start,
            end=instants.later(start, timedelta(days=1)),
        )

    def point_to(self, *worker_urls: str) -> None:
        """The workers from now on, each of them known when this returns."""

        async def point() -> None:
            self.gateway.roster.point_to(*worker_urls)
            await self.gateway.roster.refresh()

        asyncio.run_coroutine_threadsafe(point(), self.loop).result(START_SECONDS)

    def revoke(self, customer: Customer) -> None:
        revoke_key(self.gateway.database, key_id=customer.key.id, now=instants.now())


@contextmanager
def running_site(home: Path, *, body_timeout_seconds: float = 30.0) -> Iterator[Site]:
    """Serves on a free port, from a thread of its own, until the block ends."""
    settings = Settings(
        home=home,
        database_url=None,
        worker_url=None,
        drain_seconds=0,
        body_timeout_seconds=body_timeout_seconds,
    )
    gateway = build_gateway(settings)
    prepare_database(settings.database, gateway.database)
    clock = MovableClock()
    with listen("127.0.0.1", 0) as listener:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stop = asyncio.Event()
            async with serving(gateway, build_app(gateway, clock=clock), listener):
                started.set_result((asyncio.get_running_loop(), stop))
                await stop.wait()

        thread = threading.Thread(target=asyncio.run, args=(serve(),), name="site")
        thread.start()
        loop, stop = started.result(START_SECONDS)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield Site(gateway=gateway, clock=clock, url=url, loop=loop)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
