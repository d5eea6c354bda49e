"""Rates and concurrent requests: reserved, never passed by a burst, freed by every end, on both databases."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from billing import instants, limits, schema
from billing.accounts import KeyHasher, create_key
from billing.errors import InvalidLimit
from billing.limits import PARTS, Limits, RateLimited, limits_of, set_limits
from billing.meter import Meter
from billing.usage import Estimate, UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import count, rows
from tests.unit.billing.builders import T0, final

PATIENCE_SECONDS = 60
SECOND = 1_000_000


def limit(db, account, *, key=None, now=T0, **values):
    set_limits(db, Limits(**values), tenant_id=account.tenant.id, api_key_id=key.id if key else None, now=now)


def admit(meter, admission, **estimate):
    return meter.admit(admission, Estimate(**estimate)).result(PATIENCE_SECONDS)


def refusal(meter, admission, **estimate) -> RateLimited:
    with pytest.raises(RateLimited) as refused:
        admit(meter, admission, **estimate)
    return refused.value


def check_limits(db):
    """Concurrent requests are the holds that are held."""
    held = [row.limit_id for row in rows(db, schema.limit_holds) if row.state == "held"]
    for row in rows(db, schema.limits):
        assert row.open_requests == held.count(row.id)


@pytest.mark.parametrize("what", ["requests_per_minute", "concurrent_requests", "tokens_per_minute"])
def test_a_burst_from_two_meters_gets_exactly_what_fits(db, account, new_meter, what):
    meters = [new_meter(journal="first"), new_meter(journal="second")] * 16
    limit(db, account, **{what: 130 if what == "tokens_per_minute" else 13})
    together = threading.Barrier(len(meters))

    def ask(meter):
        together.wait(PATIENCE_SECONDS)
        try:
            admit(meter, account.admission(), prompt=6, output=4)
        except RateLimited:
            return False
        return True

    with ThreadPoolExecutor(len(meters)) as pool:
        assert sum(pool.map(ask, meters)) == 13
    check_limits(db)
    assert count(db, schema.requests) == 13


def test_the_time_told_is_when_the_next_one_is_let_in(db, account, new_meter):
    meter = new_meter()
    limit(db, account, requests_per_minute=2)
    for _ in range(2):
        admit(meter, account.admission())
    wait = refusal(meter, account.admission(admitted_at=T0 + SECOND)).retry_after_us
    assert wait == 29 * SECOND
    assert refusal(meter, account.admission(admitted_at=T0 + SECOND + wait - 1)).retry_after_us == 1
    admit(meter, account.admission(admitted_at=T0 + SECOND + wait))


def test_tokens_that_were_not_used_can_be_used_by_others(db, account, new_meter):
    meter = new_meter()
    limit(db, account, tokens_per_minute=100, cached_weight_basis_points=1_000)
    admitted = account.admission()
    admit(meter, admitted, prompt=60, output=40)
    assert refusal(meter, account.admission(), prompt=1).retry_after_us == 600_000
    meter.settle(final(admitted, uncached=10, read=50, output=5))
    meter.flush()
    (row,) = rows(db, schema.limits)
    assert row.tokens_level == (10 + 5 + 5) * PARTS
    grant = admit(meter, account.admission(), prompt=80)
    assert grant.standing.tokens.remaining == 0


def test_a_request_narrowed_by_what_is_cached_leaves_the_rest_to_others(db, account, new_meter):
    meter = new_meter()
    limit(db, account, tokens_per_minute=100, cached_weight_basis_points=0)
    admitted = account.admission()
    admit(meter, admitted, prompt=90, output=10)
    meter.narrow(admitted, Estimate(prompt=90, read=70, output=10))
    assert admit(meter, account.admission(), prompt=70).standing.tokens.remaining == 0
    meter.settle(final(admitted, uncached=20, read=70, output=10))
    meter.flush()
    assert refusal(meter, account.admission(), prompt=1).what == "tokens"


@pytest.mark.parametrize("kind", [UsageKind.FINAL, UsageKind.ABORTED])
def test_every_end_frees_a_concurrent_request(db, account, new_meter, kind):
    meter = new_meter()
    limit(db, account, concurrent_requests=1)
    for _ in range(3):
        admitted = account.admission()
        admit(meter, admitted)
        assert refusal(meter, account.admission()).what == "concurrent"
        meter.settle(final(admitted, kind=kind))
        meter.settle(final(admitted, kind=kind))
        meter.flush()
        check_limits(db)


def test_a_crash_frees_its_concurrent_requests_once(db, account, new_meter, tmp_path):
    limit(db, account, concurrent_requests=2)
    crashed = new_meter(journal="crashed")
    for _ in range(2):
        admit(crashed, account.admission())
    crashed.close(timeout_seconds=0)
    took_over = Meter(db, tmp_path.joinpath("crashed"), clock=lambda: T0)
    took_over.start()
    took_over.sweep(T0)
    took_over.flush()
    for _ in range(2):
        admit(took_over, account.admission())
    assert refusal(took_over, account.admission()).what == "concurrent"
    took_over.close()
    check_limits(db)


def test_a_lease_frees_what_nobody_ends(db, account, new_meter):
    meter = new_meter(lease=timedelta(hours=1))
    limit(db, account, concurrent_requests=1)
    admit(meter, account.admission())
    for expected in (1, 0):
        with db.write() as connection:
            assert limits.expire(connection, instants.later(T0, timedelta(hours=1))) == expected
    admit(meter, account.admission())
    check_limits(db)


def test_a_key_with_limits_of_its_own_is_bound_by_those_alone(db, account, new_meter):
    meter = new_meter()
    second, _ = create_key(
        db, tenant_id=account.tenant.id, label="second", hasher=KeyHasher(bytes(32)), now=T0
    )
    limit(db, account, requests_per_minute=1)
    limit(db, account, key=second, requests_per_minute=3)
    of_second = replace(account, key=second)
    for _ in range(3):
        admit(meter, of_second.admission())
    assert refusal(meter, of_second.admission()).standing.requests.limit == 3
    admit(meter, account.admission())
    assert refusal(meter, account.admission()).standing.requests.limit == 1


def test_who_has_no_limits_is_told_nothing(db, account, new_meter):
    meter = new_meter()
    limit(db, account, requests_per_minute=1)
    other = new_account(db, "other")
    for _ in range(3):
        assert admit(meter, other.admission()).standing is None
    assert count(db, schema.limit_holds) == 0


def test_changed_limits_apply_to_what_stands_already(db, account, new_meter):
    meter = new_meter()
    limit(db, account, requests_per_minute=2)
    for _ in range(2):
        admit(meter, account.admission())
    limit(db, account, requests_per_minute=3)
    admit(meter, account.admission())
    assert refusal(meter, account.admission()).retry_after_us == 20 * SECOND
    limit(db, account)
    admit(meter, account.admission())
    assert limits_of(db, tenant_id=account.tenant.id) == {None: Limits()}


def test_the_same_request_told_twice_holds_once(db, account, new_meter):
    meter = new_meter()
    limit(db, account, concurrent_requests=5, requests_per_minute=5)
    admitted = account.admission()
    admit(meter, admitted)
    assert meter.admit(admitted).exception(PATIENCE_SECONDS) is not None
    (row,) = rows(db, schema.limits)
    assert (row.open_requests, row.requests_level) == (1, PARTS)


def test_limits_are_for_ones_own_key(db, account):
    foreign = new_account(db, "other")
    with pytest.raises(InvalidLimit):
        limit(db, account, key=foreign.key, requests_per_minute=1)
