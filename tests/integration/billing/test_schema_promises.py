"""What the database refuses by itself, whatever code talks to it."""

import contextlib
import sqlite3

import pytest
from sqlalchemy import delete, insert, select, text, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.errors import DatabaseUnavailable
from billing.ids import new_id
from billing.receipt_keys import SigningKey
from billing.reconcile import reconcile
from billing.sealer import Sealer
from tests.integration.billing.ledger_checks import count, rows
from tests.unit.billing.builders import T0, final

COUNTS = [*schema.COUNT_COLUMNS, "delivered_tokens"]
APPEND_ONLY = [
    schema.price_versions,
    schema.usage_events,
    schema.ledger_lines,
    schema.receipt_keys,
    schema.receipts,
    schema.reconciliation_runs,
]


@pytest.fixture
def posted(account, new_meter, db):
    """One posted event with lines and a receipt; the meter is closed."""
    meter = new_meter()
    admitted = account.admission()
    meter.admit(admitted).result(10)
    meter.settle(final(admitted, uncached=10, read=20, output=30))
    meter.close()
    assert count(db, schema.ledger_lines) == 3
    assert Sealer(db, SigningKey.new()).seal_some() == 1
    assert reconcile(db, clock=lambda: T0).agrees
    return admitted


def event_values(admitted, **changes):
    values = dict.fromkeys(COUNTS, 0)
    return {
        "id": new_id(),
        "tenant_id": admitted.tenant_id,
        "request_id": admitted.request_id,
        "kind": "final",
        "model": admitted.model,
        "usage_state": "reported",
        "admitted_at_us": T0,
        "accounted_at_us": T0,
        "finished_at_us": T0,
        "payload_digest": bytes(32),
        "posted_at_us": T0,
        **values,
        **changes,
    }


@pytest.fixture
def admitted(account, new_meter):
    """An admitted request without an event; the meter is closed."""
    meter = new_meter()
    request = account.admission()
    meter.admit(request).result(10)
    meter.close()
    return request


@pytest.mark.parametrize("name", COUNTS)
def test_a_negative_count_is_refused_by_check(db, admitted, name):
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.usage_events).values(event_values(admitted, **{name: -1})))
    with db.write() as connection:  # the control: the same row with a zero is taken
        connection.execute(insert(schema.usage_events).values(event_values(admitted, **{name: 0})))


def test_more_cached_than_prompt_tokens_are_refused_by_check(db, admitted):
    values = event_values(admitted, uncached_tokens=126 - 128, read_tokens=128)
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.usage_events).values(values))


def test_a_request_has_one_terminal_event(db, posted):
    insertion = insert(schema.usage_events)
    if db.engine.dialect.name == "sqlite":  # SQLite's trigger drops it before the index can refuse it
        with db.write() as connection:
            connection.execute(insertion.values(event_values(posted, kind="aborted")))
    else:
        with pytest.raises(IntegrityError), db.write() as connection:
            connection.execute(insertion.values(event_values(posted, kind="aborted")))
    assert [row.kind for row in rows(db, schema.usage_events)] == ["final"]


@pytest.mark.parametrize("changes", [{"kind": "guess"}, {"request_id": new_id()}, {"tenant_id": new_id()}])
def test_an_event_of_an_unknown_kind_or_request_or_tenant_is_refused(db, admitted, changes):
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.usage_events).values(event_values(admitted, **changes)))


@pytest.mark.parametrize("table", APPEND_ONLY, ids=lambda table: table.name)
def test_a_row_of_the_ledger_is_never_changed_or_deleted(db, posted, table):
    before = rows(db, table)
    assert before
    [key, *_] = table.primary_key
    for change in (update(table).values({key: key}), delete(table)):
        with pytest.raises(IntegrityError, match="append-only"), db.write() as connection:
            connection.execute(change)
    assert rows(db, table) == before


@pytest.mark.parametrize("table", APPEND_ONLY, ids=lambda table: table.name)
def test_the_ledger_cannot_be_emptied_past_its_triggers(db, posted, table):
    before = rows(db, table)
    if db.engine.dialect.name == "postgresql":
        with pytest.raises(IntegrityError, match="append-only"), db.write() as connection:
            connection.execute(text(f"TRUNCATE {table.name} CASCADE"))
    else:
        columns = ", ".join(column.name for column in table.c)
        replace_sqlite_rows(
            db, f"INSERT OR REPLACE INTO {table.name} ({columns}) SELECT {columns} FROM {table.name}"
        )
    assert rows(db, table) == before


def test_an_event_cannot_be_replaced_under_a_new_id(db, posted):
    before = rows(db, schema.usage_events)
    forged = event_values(posted, uncached_tokens=1)
    if db.engine.dialect.name == "postgresql":
        insertion = postgresql.insert(schema.usage_events).values(forged)
        forgery = insertion.on_conflict_do_update(
            index_elements=["tenant_id", "request_id"],
            index_where=text(schema.TERMINAL),
            set_={"uncached_tokens": 1},
        )
        with pytest.raises(IntegrityError, match="append-only"), db.write() as connection:
            connection.execute(forgery)
    else:
        columns = [column.name for column in schema.usage_events.c]
        chosen = ", ".join(f"'{new_id().hex}'" if name == "id" else name for name in columns)
        replace_sqlite_rows(
            db,
            f"INSERT OR REPLACE INTO usage_events ({', '.join(columns)}) SELECT {chosen} FROM usage_events",
        )
    assert rows(db, schema.usage_events) == before


def replace_sqlite_rows(db, statement: str) -> None:
    """As a stranger would, without our settings: REPLACE then deletes and fires no DELETE trigger."""
    stranger = sqlite3.connect(db.engine.url.database)
    try:
        with contextlib.suppress(sqlite3.IntegrityError), stranger:
            stranger.execute(statement)
    finally:
        stranger.close()


def test_a_line_that_is_not_the_product_of_its_parts_is_refused(db, posted):
    with db.read() as connection:
        line = dict(connection.execute(select(schema.ledger_lines)).mappings().first())
    line |= {"id": new_id(), "token_class": "write_1h"}
    for wrong in ({"amount_pusd": line["amount_pusd"] + 1}, {"quantity_tokens": 0, "amount_pusd": 0}):
        with pytest.raises(IntegrityError), db.write() as connection:
            connection.execute(insert(schema.ledger_lines).values(line | wrong))
    with db.write() as connection:
        connection.execute(insert(schema.ledger_lines).values(line))


def test_an_event_has_one_line_for_a_class(db, posted):
    with db.read() as connection:
        line = dict(connection.execute(select(schema.ledger_lines)).mappings().first())
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.ledger_lines).values(line | {"id": new_id()}))


def test_a_request_cannot_be_admitted_with_the_key_of_another_tenant(db, account):
    values = {
        "id": new_id(),
        "tenant_id": new_id(),
        "api_key_id": account.key.id,
        "model": "m",
        "state": "admitted",
        "admitted_at_us": T0,
        "lease_until_us": T0,
        "journal_id": new_id(),
        "process_id": new_id(),
    }
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.requests).values(values))
    with db.write() as connection:
        connection.execute(insert(schema.requests).values(values | {"tenant_id": account.tenant.id}))


def test_a_settled_request_has_an_instant_and_an_admitted_one_has_none(db, admitted):
    for change in ({"state": "settled"}, {"settled_at_us": T0}, {"state": "gone"}):
        with pytest.raises(IntegrityError), db.write() as connection:
            connection.execute(update(schema.requests).values(change))


def test_a_reader_changes_nothing(db, account):
    # PostgreSQL refuses, SQLite rolls back: either will do.
    with contextlib.suppress(DatabaseUnavailable), db.read() as connection:
        connection.execute(delete(schema.api_keys))
    assert count(db, schema.api_keys) == 1
