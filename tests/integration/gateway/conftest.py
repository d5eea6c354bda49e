"""A real gateway on a free port, on SQLite, in front of a scripted worker. Every counter is back at
the end.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from sqlalchemy import Row, select

from billing import instants, schema
from billing.accounts import Tenant, create_key, create_tenant
from billing.db import open_database
from gateway.app import Gateway, build_app, build_gateway
from gateway.auth import key_hasher
from gateway.bootstrap import prepare_database
from gateway.serving import serving
from gateway.settings import Settings
from tests.integration.gateway.scripted_worker import ScriptedWorker, served

SECRET = "integration-tests-" + "s" * 32


@dataclass(slots=True, kw_only=True)
class Stack:
    """One gateway, its worker and a tenant's key. Events before `since` are another test's."""

    gateway: Gateway
    worker: ScriptedWorker
    address: str
    port: int
    tenant: Tenant
    key: str
    since: int = 0

    def new_key(self, tenant_name: str) -> str:
        """A key of another tenant."""
        tenant = create_tenant(self.gateway.database, name=tenant_name, now=instants.now())
        return make_key(self.gateway, tenant)

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.address}/v1",
            api_key=key or self.key,
            max_retries=0,
            http_client=httpx.AsyncClient(verify=False),  # loading certificates takes longer than a test
            _strict_response_validation=True,
        )

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.address, headers={"authorization": f"Bearer {self.key}"}, verify=False
        )

    async def usage_events(self) -> list[Row]:
        """Every usage event posted so far, oldest first, after all that is settled was posted."""
        await asyncio.to_thread(self.gateway.meter.flush)
        events = schema.usage_events
        with self.gateway.database.read() as connection:
            newer = select(events).where(events.c.admitted_at_us >= self.since)
            return list(connection.execute(newer.order_by(events.c.admitted_at_us)))

    async def settled(self, count: int) -> list[Row]:
        """The usage events, once there are so many: a client knows of its hang-up before the gateway does."""
        await eventually(lambda: self.gateway.drain.num_running == 0)
        events = await self.usage_events()
        assert len(events) == count
        return events

    def in_flight(self) -> float:
        value = self.gateway.metrics.registry.get_sample_value(
            "headstart_requests_in_flight", {"endpoint": "chat_completions"}
        )
        return value or 0.0

    async def come_to_rest(self) -> None:
        """Waits until nothing runs, and checks that nothing is left of any request."""
        await eventually(lambda: self.gateway.drain.num_running == 0)
        await self.usage_events()
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        assert self.in_flight() == 0
        assert self.gateway.drain.num_running == 0
        assert [worker.in_flight for worker in self.gateway.roster.workers] == [0] * len(
            self.gateway.roster.workers
        )
        assert self.gateway.meter.stats().in_flight == 0


async def eventually(claim: Callable[[], bool]) -> None:
    """Waits until the claim holds, for what a client cannot be told of. Fails after ten seconds."""
    async with asyncio.timeout(10):
        while not claim():  # noqa: ASYNC110 — nobody sends an event for it
            await asyncio.sleep(0.005)


def make_key(gateway: Gateway, tenant: Tenant) -> str:
    _, text = create_key(
        gateway.database,
        tenant_id=tenant.id,
        label="test",
        hasher=key_hasher(gateway.secret),
        now=instants.now(),
    )
    return text


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with schema and prices, to copy: migrating takes longer than a test."""
    path = tmp_path_factory.mktemp("database") / "headstart.db"
    with open_database(f"sqlite:///{path}") as database:
        prepare_database(f"sqlite:///{path}", database)
    return path


StartStack = Callable[..., "asyncio._AsyncGeneratorContextManager[Stack]"]


@pytest.fixture(scope="session")
def start_stack(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path):
    """Starts a stack with settings of the test's own."""

    @asynccontextmanager
    async def start(**settings: object) -> AsyncIterator[Stack]:
        tmp_path = tmp_path_factory.mktemp("home")
        shutil.copy(migrated_database, tmp_path / "headstart.db")
        worker = ScriptedWorker()
        with socket.create_server(("127.0.0.1", 0)) as worker_listener:
            worker_url = f"http://127.0.0.1:{worker_listener.getsockname()[1]}"
            chosen = {
                "home": tmp_path,
                "secret": SECRET,
                "worker_url": worker_url,
                "drain_seconds": 0,
                "key_cache_seconds": 0.05,
                **settings,
            }
            gateway = build_gateway(Settings(**chosen))
            tenant = create_tenant(gateway.database, name="acme", now=instants.now())
            key = make_key(gateway, tenant)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
                async with (
                    served(worker.app(), worker_listener),
                    serving(gateway, build_app(gateway), listener),
                ):
                    stack = Stack(
                        gateway=gateway,
                        worker=worker,
                        address=f"http://127.0.0.1:{port}",
                        port=port,
                        tenant=tenant,
                        key=key,
                    )
                    yield stack
                    await stack.come_to_rest()

    return start


@pytest.fixture
async def stack(start_stack: StartStack) -> AsyncIterator[Stack]:
    """A stack of the test's own."""
    async with start_stack() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_stack(start_stack: StartStack) -> AsyncIterator[Stack]:
    async with start_stack() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def shared_stack(module_stack: Stack) -> AsyncIterator[Stack]:
    """The module's stack, as good as new: for tests that leave nothing behind, which is checked."""
    module_stack.worker.reset()
    module_stack.since = instants.now()
    yield module_stack
    await module_stack.come_to_rest()
