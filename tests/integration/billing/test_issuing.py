"""Statements from the ledger: closed months alone, in order, once, and to the last picodollar."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from hashlib import sha256

import pytest
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from billing import rollups, schema
from billing.accounts import KeyHasher, create_key
from billing.calendar import month, zone_named
from billing.errors import (
    DatabaseUnavailable,
    InvalidPeriod,
    PeriodOpen,
    StatementOutOfOrder,
    UnknownStatement,
    UnknownTenant,
)
from billing.ids import ProjectId, TenantId, new_id
from billing.instants import Microseconds, from_datetime
from billing.issuing import find_statement, issue_statement, list_statements, preview_statement
from billing.money import PICODOLLARS_PER_CENT
from billing.prices import price_in_force
from billing.rating import rate_quantities
from billing.reports import usage_report
from billing.statements import LineKind, Status
from billing.usage import TokenClass
from tests.integration.billing.conftest import Account, new_account
from tests.unit.billing.builders import final

MARCH = "2026-03"
INPUT_PUSD = 3_000_000


def at(zone: str, *wall: int) -> Microseconds:
    return from_datetime(datetime(*wall, tzinfo=zone_named(zone)))


AFTER_MARCH = at("UTC", 2026, 4, 2)
AFTER_APRIL = at("UTC", 2026, 5, 2)


def account_with_key_of(db, account, project_id: ProjectId) -> Account:
    """The same tenant, with a key that belongs to a project."""
    key, _ = create_key(
        db, tenant_id=account.tenant.id, label="search", hasher=KeyHasher(bytes(32)), now=Microseconds(0)
    )
    with db.write() as connection:
        moved = update(schema.api_keys).where(schema.api_keys.c.id == key.id)
        connection.execute(moved.values(project_id=project_id))
    return Account(tenant=account.tenant, key=key)


def use(meter, account, when, **counts):
    """One settled request; returns its event."""
    event = final(account.admission(admitted_at=when), **counts)
    meter.settle(event)
    meter.flush()
    return event


def issue(db, account, period=MARCH, now=AFTER_MARCH):
    return issue_statement(db, tenant_id=account.tenant.id, period=period, now=now).statement


def correct(db, event, *, kind: str, accounted_at: Microseconds, quantity: int) -> None:
    """A signed row that points at the event's, with a line of input tokens, and its roll-up."""
    price = price_in_force(db, model=event.admission.model, at=event.admission.admitted_at)
    (line,) = rate_quantities([(TokenClass.INPUT, quantity)], price)
    with db.write() as connection:
        posted = select(schema.usage_events).where(text(schema.TERMINAL))
        original = connection.execute(
            posted.where(schema.usage_events.c.request_id == event.request_id)
        ).one()
        correction_id = new_id()
        changed = {
            "id": correction_id,
            "payload_digest": correction_id.bytes * 2,
            "kind": kind,
            "original_id": original.id,
            "accounted_at_us": accounted_at,
            **dict.fromkeys(schema.COUNT_COLUMNS, 0),
            "uncached_tokens": quantity,
            "delivered_tokens": 0,
        }
        connection.execute(insert(schema.usage_events).values(original._asdict() | changed))
        connection.execute(
            insert(schema.ledger_lines).values(
                id=new_id(),
                event_id=correction_id,
                token_class=line.token_class.value,
                quantity_tokens=line.quantity,
                list_unit_pusd=line.list_unit_pusd,
                discount_basis_points=line.discount_basis_points,
                unit_pusd=line.unit_pusd,
                amount_pusd=line.amount_pusd,
                amount_without_cache_pusd=line.amount_without_cache_pusd,
                price_version_id=line.price_version_id,
            )
        )
        posted_correction = rollups.PostedEvent(
            admission=event.admission,
            accounted_at=accounted_at,
            requests=0,
            aborted=0,
            usage_missing=0,
            delivered=0,
            lines=[line],
        )
        rollups.add(connection, [posted_correction])


def test_a_statement_has_a_line_for_every_project_key_model_and_class(db, account, new_meter):
    project_id = ProjectId(new_id())
    with db.write() as connection:
        connection.execute(
            insert(schema.projects).values(
                id=project_id, tenant_id=account.tenant.id, name="search", created_at_us=0
            )
        )
    searching = account_with_key_of(db, account, project_id)
    meter = new_meter()
    use(meter, account, at("UTC", 2026, 3, 3), uncached=1_000, read=9_000, output=50)
    use(meter, account, at("UTC", 2026, 3, 4), uncached=500)
    use(meter, searching, at("UTC", 2026, 3, 5), write_5m=800, output=1)
    use(meter, account, at("UTC", 2026, 4, 1), uncached=77)
    one = issue(db, account)
    shown = [(line.project, line.token_class, line.quantity, line.amount_pusd) for line in one.lines]
    assert shown == [
        (None, TokenClass.INPUT, 1_500, 1_500 * 3_000_000),
        (None, TokenClass.READ, 9_000, 9_000 * 300_000),
        (None, TokenClass.OUTPUT, 50, 50 * 15_000_000),
        ("search", TokenClass.WRITE_5M, 800, 800 * 3_750_000),
        ("search", TokenClass.OUTPUT, 1, 15_000_000),
    ]
    assert {line.kind for line in one.lines} == {LineKind.USAGE}
    assert {line.api_key for line in one.lines} == {
        f"first ({account.key.prefix}…)",
        f"search ({searching.key.prefix}…)",
    }
    assert one.requests == 3
    assert one.savings.net_pusd == 9_000 * 2_700_000 - 800 * 750_000
    assert one.reconciliation.agrees
    report = usage_report(db, tenant_id=account.tenant.id, start=one.start, end=one.end)
    assert one.amount_pusd == report.totals.amount_pusd


def test_a_month_is_one_of_the_tenants_zone(db, account, new_meter):
    with db.write() as connection:
        connection.execute(update(schema.tenants).values(time_zone="Asia/Kolkata"))
    meter = new_meter()
    for when, tokens in (
        (at("Asia/Kolkata", 2026, 3, 1), 1),
        (Microseconds(at("Asia/Kolkata", 2026, 4, 1) - 1), 10),
        (at("Asia/Kolkata", 2026, 4, 1), 100),
    ):
        use(meter, account, when, uncached=tokens)
    one = issue(db, account)
    assert one.time_zone == "Asia/Kolkata"
    assert [line.quantity for line in one.lines] == [11]
    assert (one.start, one.end) == (at("UTC", 2026, 2, 28, 18, 30), at("UTC", 2026, 3, 31, 18, 30))


def test_an_open_month_has_a_preview_and_no_statement(db, account, new_meter):
    use(new_meter(), account, at("UTC", 2026, 3, 3), uncached=1)
    now = Microseconds(at("UTC", 2026, 4, 1) - 1)
    with pytest.raises(PeriodOpen, match=MARCH):
        issue(db, account, now=now)
    preview = preview_statement(db, tenant_id=account.tenant.id, period=MARCH, now=now)
    assert preview.status is Status.PREVIEW
    assert preview.amount_pusd == INPUT_PUSD
    assert list_statements(db, tenant_id=account.tenant.id) == []
    with pytest.raises(PeriodOpen):
        find_statement(db, tenant_id=account.tenant.id, period=MARCH, now=now)
    with pytest.raises(UnknownStatement):
        find_statement(db, tenant_id=account.tenant.id, period=MARCH, now=AFTER_MARCH)


def test_a_statement_is_issued_once_and_never_changes(db, account, new_meter):
    meter = new_meter()
    use(meter, account, at("UTC", 2026, 3, 3), uncached=1)
    first = issue_statement(db, tenant_id=account.tenant.id, period=MARCH, now=AFTER_MARCH)
    again = issue_statement(db, tenant_id=account.tenant.id, period=MARCH, now=AFTER_APRIL)
    found = find_statement(db, tenant_id=account.tenant.id, period=MARCH, now=AFTER_MARCH)
    assert again == first == found
    assert first.digest == sha256(first.document.encode()).digest()
    assert first.statement.status is Status.FINAL
    assert first.statement.number == f"HS-2026-03-{account.tenant.id.hex[-8:].upper()}"
    for change in (update(schema.statements).values(document="{}"), delete(schema.statements)):
        with pytest.raises((DBAPIError, DatabaseUnavailable), match="append-only"), db.write() as connection:
            connection.execute(change)


def test_two_who_issue_at_once_have_the_same_statement(db, account, new_meter):
    use(new_meter(), account, at("UTC", 2026, 3, 3), uncached=1)
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(
                issue_statement, db, tenant_id=account.tenant.id, period=MARCH, now=AFTER_MARCH + number
            )
            for number in range(4)
        ]
    assert len({one.result().digest for one in asked}) == 1


def test_statements_follow_each_other(db, account, new_meter):
    meter = new_meter()
    use(meter, account, at("UTC", 2026, 3, 3), uncached=1)
    use(meter, account, at("UTC", 2026, 4, 3), uncached=1)
    with pytest.raises(StatementOutOfOrder, match="2026-03 has usage and no statement"):
        issue(db, account, "2026-04", AFTER_APRIL)
    issue(db, account, MARCH, AFTER_APRIL)
    issue(db, account, "2026-04", AFTER_APRIL)
    with pytest.raises(StatementOutOfOrder, match="too late"):
        issue(db, account, "2026-02", AFTER_APRIL)
    issued = list_statements(db, tenant_id=account.tenant.id)
    assert [one.statement.period for one in issued] == ["2026-04", MARCH]


def test_the_residual_of_a_month_is_part_of_the_next(db, account, new_meter):
    meter, due, amount = new_meter(), 0, 0
    for number in range(3, 9):
        use(meter, account, at("UTC", 2026, number, 3), uncached=1_100 + number)
        one = issue(db, account, f"2026-{number:02d}", at("UTC", 2026, number + 1, 2))
        due += one.due_cents
        amount += one.amount_pusd
    assert due * PICODOLLARS_PER_CENT + one.residual_kept_pusd == amount
    assert one.residual_brought_pusd != 0


def test_corrections_are_shown_apart_with_the_month_they_are_for(db, account, new_meter):
    meter = new_meter()
    event = use(meter, account, at("UTC", 2026, 3, 3), uncached=1_000)
    issue(db, account)
    use(meter, account, at("UTC", 2026, 4, 3), uncached=500)
    correct(db, event, kind="adjustment", accounted_at=at("UTC", 2026, 4, 5), quantity=-200)
    correct(db, event, kind="credit", accounted_at=at("UTC", 2026, 4, 6), quantity=-30)
    one = issue(db, account, "2026-04", AFTER_APRIL)
    shown = [(line.kind, line.for_period, line.quantity, line.amount_pusd) for line in one.lines]
    assert shown == [
        (LineKind.USAGE, "2026-04", 500, 500 * INPUT_PUSD),
        (LineKind.ADJUSTMENT, MARCH, -200, -200 * INPUT_PUSD),
        (LineKind.CREDIT, MARCH, -30, -30 * INPUT_PUSD),
    ]
    assert one.amount_pusd == 270 * INPUT_PUSD
    assert one.requests == 1
    assert one.reconciliation.agrees


def test_a_tenant_is_stated_its_own_usage_alone(db, account, new_meter):
    other = new_account(db, "other")
    meter = new_meter()
    use(meter, account, at("UTC", 2026, 3, 3), uncached=1)
    use(meter, other, at("UTC", 2026, 3, 3), uncached=10)
    assert [line.quantity for line in issue(db, account).lines] == [1]
    assert [line.quantity for line in issue(db, other).lines] == [10]
    assert len(list_statements(db, tenant_id=other.tenant.id)) == 1


def test_a_month_without_usage_has_an_empty_statement(db, account):
    one = issue(db, account)
    assert (one.lines, one.due_cents, one.requests) == ([], 0, 0)
    assert one.reconciliation.agrees


def test_books_that_disagree_are_said_to(db, account, new_meter):
    use(new_meter(), account, at("UTC", 2026, 3, 3), uncached=1_000)
    with db.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        else:
            connection.execute(text("DROP TRIGGER usage_events_no_update"))
        connection.execute(update(schema.usage_events).values(uncached_tokens=999))
    one = issue(db, account)
    assert not one.reconciliation.agrees
    assert (one.reconciliation.events_tokens, one.reconciliation.ledger_tokens) == (999, 1_000)


def test_what_cannot_be_stated_is_refused(db, account):
    with pytest.raises(InvalidPeriod):
        issue(db, account, "November")
    for ask in (issue_statement, preview_statement):
        with pytest.raises(UnknownTenant):
            ask(db, tenant_id=TenantId(new_id()), period=MARCH, now=AFTER_MARCH)
    assert month(MARCH, zone_named("UTC")).label == MARCH
