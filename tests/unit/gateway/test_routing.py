"""Which worker gets a request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.edge.errors import ServiceUnavailable
from gateway.roster import Roster, UnknownWorker, Worker
from gateway.routing import Router
from gateway.workers import PhaseTimeouts
from model_worker.protocol import WorkerCard

TIMEOUTS = PhaseTimeouts(connect_seconds=1, first_event_seconds=1, between_events_seconds=1)
MODEL = "small"


def ready(name: str, model: str = MODEL) -> Worker:
    """A worker that was asked and answered; nobody speaks to it here."""
    unspoken: Any = None
    worker = Worker(name, unspoken)
    worker.card = WorkerCard(
        model=model,
        fingerprint="fe",
        dtype="float32",
        device="cpu",
        vocab_size=1,
        context_window_tokens=1,
        block_size=1,
        num_blocks=1,
        kv_bytes_per_token=1,
        epoch="1",
    )
    worker.encoder = object()  # type: ignore[assignment]
    worker.away_because = None
    return worker


@pytest.fixture
def roster() -> Roster:
    roster = Roster(timeouts=TIMEOUTS, executor=ThreadPoolExecutor(1), poll_seconds=60)
    roster.workers = (ready("worker-0"), ready("worker-1"), ready("worker-2", "large"))
    return roster


async def chosen(roster: Roster, model: str = MODEL) -> str:
    return (await Router(roster).choose(model)).worker.name


async def test_the_one_with_the_fewest_requests_gets_it(roster: Roster) -> None:
    roster.workers[0].in_flight = 2
    assert await chosen(roster) == "worker-1"


async def test_a_draining_worker_gets_no_request_until_it_is_open_again(roster: Roster) -> None:
    roster.workers[1].in_flight = 9
    roster.drain("worker-0")
    assert await chosen(roster) == "worker-1"
    roster.undrain("worker-0")
    assert await chosen(roster) == "worker-0"


async def test_when_all_of_a_model_drain_it_is_refused_and_others_go_on(roster: Roster) -> None:
    roster.drain("worker-0")
    roster.drain("worker-1")
    with pytest.raises(ServiceUnavailable) as refusal:
        await chosen(roster)
    assert refusal.value.code == "worker_draining"
    assert await chosen(roster, "large") == "worker-2"
    assert await Router(roster).models() == ["large", MODEL], "it comes back"


def test_a_worker_that_is_not_there_cannot_be_drained(roster: Roster) -> None:
    with pytest.raises(UnknownWorker):
        roster.drain("worker-9")
