"""How requests met the cache: counted with their events, by quarter of an hour."""

import random

import msgspec
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import delete, select, text

from billing import schema
from billing.cache_outcomes import Facet, Outcome, OutcomeTotals, outcomes
from billing.calendar import UTC_ZONE, Span, days, hours, uncut
from billing.db import alembic_config
from billing.instants import BUCKET_MICROSECONDS
from billing.usage import UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import check_deployment_rollups
from tests.unit.billing.builders import T0, admission, final

DAY = 96 * BUCKET_MICROSECONDS


def settle(meter, account, *, at=T0, worker="worker-0", miss_reason=None, waited_ns=5_000_000, **counts):
    event = final(admission(tenant_id=account.tenant.id, api_key_id=account.key.id, admitted_at=at), **counts)
    meter.settle(
        msgspec.structs.replace(event, worker=worker, miss_reason=miss_reason, first_token_ns=waited_ns)
    )


def counted(db, account, by=(), cutter=uncut, end=T0 + DAY):
    tenant_ids = None if account is None else [account.tenant.id]
    return outcomes(db, cutter(T0, end, UTC_ZONE), tenant_ids=tenant_ids, by=by)


def test_a_request_is_a_hit_when_any_token_was_read(db, account, new_meter):
    meter = new_meter()
    settle(meter, account, uncached=100, output=1, miss_reason="no_shared_prefix")
    settle(meter, account, uncached=20, read=80, output=1, miss_reason="diverged", waited_ns=1_000_999)
    settle(meter, account, uncached=1, read=99, output=1, waited_ns=None)
    meter.flush()
    by_outcome = {group.values[0]: group.totals for group in counted(db, account, [Facet.OUTCOME])}
    assert by_outcome == {
        Outcome.MISS: OutcomeTotals(requests=1, prompt_tokens=100, first_tokens=1, first_token_us=5_000),
        Outcome.HIT: OutcomeTotals(
            requests=2, prompt_tokens=200, read_tokens=179, first_tokens=1, first_token_us=1_000
        ),
    }
    by_reason = {group.values: group.totals.requests for group in counted(db, account, [Facet.MISS_REASON])}
    assert by_reason == {("no_shared_prefix",): 1, ("diverged",): 1, ("",): 1}


def test_tenants_are_apart_and_together_they_are_all(db, account, new_meter):
    other, meter = new_account(db, "other"), new_meter()
    settle(meter, account, uncached=1)
    settle(meter, other, read=7)
    meter.flush()
    mine, theirs, everybodys = (counted(db, one)[0].totals for one in (account, other, None))
    assert (mine.requests, mine.read_tokens) == (1, 0)
    assert (theirs.requests, theirs.read_tokens) == (1, 7)
    assert mine + theirs == everybodys


def test_posting_again_counts_once(db, account, new_meter):
    event = final(admission(tenant_id=account.tenant.id, api_key_id=account.key.id), read=5)
    for journal in ("first", "second"):
        meter = new_meter(journal=journal)
        meter.settle(event)
        meter.flush()
    assert counted(db, account)[0].totals.requests == 1


def test_hours_and_days_add_up_to_the_whole_and_the_migration_counts_the_same(db, account, new_meter):
    rng, meter = random.Random(1), new_meter()
    for _ in range(200):
        settle(
            meter,
            account,
            at=T0 + rng.randrange(3 * DAY),
            worker=rng.choice(["worker-0", "worker-1", None]),
            miss_reason=rng.choice([None, "evicted"]),
            waited_ns=rng.choice([None, rng.randrange(10**9)]),
            uncached=rng.randrange(100),
            read=rng.choice([0, rng.randrange(100)]),
            kind=rng.choice(list(UsageKind)),
        )
    meter.flush()
    check_deployment_rollups(db)
    [whole] = counted(db, account, end=T0 + 3 * DAY)
    for cutter in (hours, days):
        parts = counted(db, account, cutter=cutter, end=T0 + 3 * DAY)
        assert sum((part.totals for part in parts), OutcomeTotals()) == whole.totals


def test_the_migration_counts_what_was_posted_before_it(db, account, new_meter):
    meter = new_meter()
    settle(meter, account, uncached=100, worker=None, waited_ns=None)
    settle(meter, account, at=T0 + DAY, uncached=20, read=80, miss_reason="diverged", waited_ns=1_999)
    meter.flush()
    before = counted(db, account, list(Facet), days, T0 + 2 * DAY)
    with db.write() as connection:
        connection.execute(delete(schema.cache_buckets))
        connection.execute(text(filling_statement()))
    assert counted(db, account, list(Facet), days, T0 + 2 * DAY) == before


def filling_statement() -> str:
    """The one of the migration, which runs it with Alembic's `op`."""
    script = next(
        one.module
        for one in ScriptDirectory.from_config(alembic_config()).walk_revisions()
        if hasattr(one.module, "filling")
    )
    return script.filling()


def test_the_migration_adds_up_all_tenants_from_each(db, account, new_meter):
    other, meter = new_account(db, "other"), new_meter()
    for number in range(20):
        settle(meter, (account, other)[number % 2], at=T0 + number * BUCKET_MICROSECONDS // 3, read=number)
    meter.flush()
    script = next(
        one.module
        for one in ScriptDirectory.from_config(alembic_config()).walk_revisions()
        if hasattr(one.module, "fillings")
    )
    with db.write() as connection:
        for table in (
            schema.deployment_request_rollups,
            schema.deployment_class_rollups,
            schema.deployment_cache_buckets,
        ):
            connection.execute(delete(table))
        for statement in script.fillings():
            connection.execute(text(statement))
    check_deployment_rollups(db)


def test_a_span_without_requests_has_no_group(db, account):
    assert counted(db, account) == []
    assert outcomes(db, [], tenant_ids=None) == []
    with db.read() as connection:
        assert connection.execute(select(schema.cache_buckets)).all() == []
    with pytest.raises(AssertionError):
        outcomes(db, [Span(label="", start=T0 + 1, end=T0 + 2)], tenant_ids=None)
