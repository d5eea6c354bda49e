"""A short one of `make bench-billing-chaos`: what is killed while it works bills what clients received."""

import pytest

from tests.chaos import load, world

FAULTS = 12


@pytest.mark.slow
def test_whatever_is_killed_clients_events_ledger_rollups_and_statements_agree():
    with world(seed=5) as made:
        with load(made, num_clients=6, seed=5):
            for _ in range(FAULTS):
                made.strike()
        made.settle()
        balance = made.balance()
    assert balance.differences == []
    assert balance.figures["answers completed"] > 0
    assert balance.figures["answers broken off"] > 0
    assert balance.figures["events"] == balance.figures["requests admitted"]
