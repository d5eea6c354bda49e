"""The product as its users start it: `headstart serve` on the real model, with SQLite in a fresh home."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai
import pytest
from sqlalchemy import func, select

from billing import schema
from billing.db import open_database
from model_worker.protocol import WorkerStats
from tests.processes import ProcessFailed, clean_environment, running_process

Value = TypeVar("Value")

READY_SECONDS = 300.0
WITHIN_SECONDS = 60.0


@dataclass(slots=True)
class Product:
    """A running `headstart serve`, seen from outside."""

    process: subprocess.Popen[bytes]
    home: Path
    log: Path
    base_url: str
    api_key: str
    worker_url: str
    model: str
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, api_key: str | None = None) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=self.base_url, api_key=api_key or self.api_key, max_retries=0, timeout=WITHIN_SECONDS * 3
        )
        self.clients.append(client)
        return client

    def headstart(self, *arguments: str) -> str:
        """What the command line prints for this deployment."""
        completed = subprocess.run(
            [sys.executable, "-m", "gateway", *arguments],
            env=clean_environment({"HEADSTART_HOME": str(self.home)}),
            capture_output=True,
            text=True,
            check=True,
        )
        return completed.stdout

    def new_tenant(self, name: str) -> str:
        """A key of a new tenant."""
        self.headstart("tenants", "create", name)
        return self.headstart("keys", "create", "--tenant", name, "--label", "test").strip()

    def stats(self) -> WorkerStats:
        return msgspec.json.decode(httpx.get(f"{self.worker_url}/v1/stats").content, type=WorkerStats)

    def wait_for_stats(self, holds: Callable[[WorkerStats], bool]) -> WorkerStats:
        return wait_until(self.stats, holds)

    def events(self) -> list[dict[str, Any]]:
        """Every usage event, oldest first, straight from the database."""
        query = select(schema.usage_events).order_by(schema.usage_events.c.posted_at_us)
        with (
            open_database(f"sqlite:///{self.home / 'headstart.db'}") as database,
            database.read() as connection,
        ):
            return [dict(row) for row in connection.execute(query).mappings()]

    def wait_until_posted(self) -> None:
        """Every request that was begun has its event: what is settled waits a moment for others."""
        query = select(func.count()).select_from(schema.requests).where(schema.requests.c.state == "admitted")

        def num_open() -> int:
            with (
                open_database(f"sqlite:///{self.home / 'headstart.db'}") as database,
                database.read() as connection,
            ):
                return int(connection.execute(query).scalar_one())

        wait_until(num_open, lambda count: count == 0)

    def event_of(self, request_id: str) -> dict[str, Any]:
        """The one usage event of a request, once it is posted."""

        def of_request() -> list[dict[str, Any]]:
            return [event for event in self.events() if str(event["request_id"]) == request_id]

        [event] = wait_until(of_request, bool)
        return event


def wait_until(look: Callable[[], Value], holds: Callable[[Value], bool]) -> Value:
    """Looks again until it holds; fails with the last look."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while not holds(value := look()):
        assert time.monotonic() < deadline, value
        time.sleep(0.02)
    return value


def logged(log: Path, event: str) -> dict[str, object] | None:
    """The first JSON line of that name in the log."""
    for line in log.read_text(errors="replace").splitlines():
        if f'"{event}"' in line and line.startswith("{"):
            entry: dict[str, object] = json.loads(line)
            if entry.get("event") == event and "url" in entry:
                return entry
    return None


@pytest.fixture(scope="session")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    log, home = folder / "serve.log", folder / "home"
    environment = {
        "HEADSTART_HOME": str(home),
        "HEADSTART_PORT": "0",
        "HEADSTART_CHECK_WHEN_IDLE": "true",
        "HEADSTART_KV_CACHE_GIB": "1",
    }
    with running_process("-m", "gateway", "serve", log=log, environment=environment) as process:
        deadline = time.monotonic() + READY_SECONDS
        while "curl " not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed(log.read_text(errors="replace"))
            time.sleep(0.1)
        text = log.read_text(errors="replace")
        ready = logged(log, "worker_ready")
        assert ready is not None
        started = Product(
            process=process,
            home=home,
            log=log,
            base_url=re.search(r"OPENAI_BASE_URL=(\S+)", text)[1],  # type: ignore[index]
            api_key=re.search(r"OPENAI_API_KEY=(\S+)", text)[1],  # type: ignore[index]
            worker_url=str(ready["url"]),
            model=str(ready["model"]),
        )
        yield started
        for client in started.clients:
            client.close()
