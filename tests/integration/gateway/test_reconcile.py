"""`headstart billing reconcile` beside a real gateway and a worker that counts."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from billing.errors import InvalidPeriod, UnknownTenant, UnknownZone
from gateway.cli import app
from gateway.terminal import CommandRefused

MESSAGES = [{"role": "user", "content": "How many?"}]


@pytest.fixture
def headstart(stack):
    """The command, for the stack's home and worker; its exit status and output."""
    settings = stack.gateway.settings
    environment = {
        "HEADSTART_HOME": str(settings.home),
        "HEADSTART_DATABASE_URL": "",
        "HEADSTART_WORKER_URL": settings.worker_url,
    }

    async def run(*arguments: str) -> tuple[int, str]:
        runner = CliRunner(env=environment)
        result = await asyncio.to_thread(runner.invoke, app, arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    return run


async def ask(stack, times: int = 1) -> None:
    async with stack.client() as client:
        for _ in range(times):
            await client.chat.completions.create(model=stack.worker.card.model, messages=MESSAGES)
    await stack.usage_events()


async def test_what_a_worker_counted_is_what_was_billed(stack, headstart):
    await ask(stack, 3)
    [event, *_] = await stack.usage_events()
    assert event.worker_epoch == stack.worker.card.epoch
    status, shown = await headstart("billing", "reconcile")
    assert status == 0, shown
    assert "difference 0" in shown
    assert "not compared" not in shown
    assert stack.worker.counted["output_tokens"] > 0


async def test_a_worker_that_counted_more_is_named_and_the_status_is_1(stack, headstart):
    await ask(stack)
    stack.worker.counted["output_tokens"] += 5
    status, shown = await headstart("billing", "reconcile")
    assert status == 1
    assert "events and workers" in shown
    assert "+5" in shown
    status, answer = await headstart("billing", "reconcile", "--json")
    assert status == 1
    [difference] = json.loads(answer)["differences"]
    assert (difference["check"], difference["tokens"]) == ("events_workers", 5)


async def test_a_worker_that_started_anew_is_said_not_to_be_comparable(stack, headstart):
    await ask(stack)
    stack.worker.card = msgspec.structs.replace(stack.worker.card, epoch="2")
    stack.worker.counted.clear()
    status, shown = await headstart("billing", "reconcile")
    assert status == 0
    assert "not compared: worker worker-0, epoch 1: 1 events" in shown


async def test_planted_differences_are_shown_with_their_place(stack, headstart):
    await ask(stack)
    with stack.gateway.database.write() as connection:
        # The quarter that is open is not compared: as if it were long ago.
        for table in ("class_rollups", "request_rollups"):
            connection.execute(text(f"UPDATE {table} SET bucket_start_us = 1772323200000000"))
    status, shown = await headstart("billing", "reconcile", "--tenant", "acme")
    assert status == 1
    assert "2026-03-01 00:00:00 to 2026-03-01 00:15:00" in shown
    assert "ledger and rollups" in shown
    status, runs = await headstart("billing", "reconciliations")
    assert status == 0
    assert "2026-03-01 00:00:00" in runs


async def test_what_cannot_be_compared_is_refused(stack, headstart):
    with pytest.raises(UnknownTenant):
        await headstart("billing", "reconcile", "--tenant", "nobody")
    with pytest.raises(UnknownZone):
        await headstart("billing", "reconcile", "--zone", "Mars/Olympus")
    with pytest.raises(InvalidPeriod, match="quarter"):
        await headstart("billing", "reconcile", "--since", "2026-03-01T00:01:00")
    with pytest.raises(InvalidPeriod, match="ends before"):
        await headstart("billing", "reconcile", "--since", "2026-03-02", "--until", "2026-03-01")
    with pytest.raises(CommandRefused, match="counters"):
        await headstart("billing", "reconcile", "--worker-url", "http://127.0.0.1:1")
