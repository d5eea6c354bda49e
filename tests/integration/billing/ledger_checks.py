"""What must hold of the ledger after anything whatever, and looks into its tables."""

from collections import Counter, defaultdict

from sqlalchemy import func, select

from billing import schema
from billing.db import Database
from billing.instants import BUCKET_MICROSECONDS
from billing.prices import BookHistory
from billing.rating import LedgerLine, rate_quantities
from billing.usage import TokenClass, TokenCounts


def rows(db: Database, table):
    with db.read() as connection:
        return connection.execute(select(table)).all()


def count(db: Database, table) -> int:
    with db.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def states(db: Database) -> dict:
    return {row.id: row.state for row in rows(db, schema.requests)}


def events_by_request(db: Database) -> dict:
    """Asserts on the way that no request has two."""
    events = rows(db, schema.usage_events)
    by_request = {row.request_id: row for row in events}
    assert len(by_request) == len(events)
    return by_request


def check_ledger(db: Database) -> None:
    """Every event has exactly the lines that rating it again gives, and a settled request.

    The roll-ups are the sums of both.
    """
    events = rows(db, schema.usage_events)
    posted = {row.id: set() for row in events}
    for line in rows(db, schema.ledger_lines):
        assert line.amount_pusd == line.quantity_tokens * line.unit_pusd
        posted[line.event_id].add(tuple(line)[2:])
    with db.read() as connection:
        book = BookHistory.load(connection, {row.model for row in events}, {row.tenant_id for row in events})
    requests = states(db)
    for row in events:
        lines = rate_quantities(quantities_of(row), book.price(row.model, row.admitted_at_us, row.tenant_id))
        assert posted[row.id] == {line_columns(line) for line in lines}
        assert requests[row.request_id] == "settled"
    check_rollups(db)


def check_rollups(db: Database) -> None:
    keys = {row.id: row.api_key_id for row in rows(db, schema.requests)}
    request_sums, class_sums = defaultdict(Counter), defaultdict(Counter)
    of_event = {}
    for row in rows(db, schema.usage_events):
        bucket = row.accounted_at_us - row.accounted_at_us % BUCKET_MICROSECONDS
        key = of_event[row.id] = (row.tenant_id, bucket, keys[row.request_id], row.model)
        is_terminal = row.original_id is None
        request_sums[key] += Counter()
        request_sums[key].update(
            requests=is_terminal,
            aborted=row.kind == "aborted",
            usage_missing=is_terminal and row.usage_state == "usage_missing",
            delivered_tokens=row.delivered_tokens,
        )
    for line in rows(db, schema.ledger_lines):
        class_sums[*of_event[line.event_id], line.token_class].update(
            quantity_tokens=line.quantity_tokens,
            list_amount_pusd=line.quantity_tokens * line.list_unit_pusd,
            amount_pusd=line.amount_pusd,
            amount_without_cache_pusd=line.amount_without_cache_pusd,
        )
    assert request_sums == {tuple(row)[:4]: sums_of(row, 4) for row in rows(db, schema.request_rollups)}
    assert class_sums == {tuple(row)[:5]: sums_of(row, 5) for row in rows(db, schema.class_rollups)}
    check_deployment_rollups(db)


def check_deployment_rollups(db: Database) -> None:
    """They are the sums of everybody's."""
    for each, of_all in (
        (schema.request_rollups, schema.deployment_request_rollups),
        (schema.class_rollups, schema.deployment_class_rollups),
        (schema.cache_buckets, schema.deployment_cache_buckets),
    ):
        key = [column.name for column in of_all.primary_key]
        counts = [column.name for column in of_all.columns if not column.primary_key]
        sums = defaultdict(Counter)
        for row in rows(db, each):
            sums[tuple(getattr(row, name) for name in key)].update(
                {name: getattr(row, name) for name in counts}
            )
        assert sums == {tuple(row)[: len(key)]: sums_of(row, len(key)) for row in rows(db, of_all)}


def sums_of(row, num_key_columns: int) -> Counter:
    return Counter(dict(list(row._mapping.items())[num_key_columns:]))


def quantities_of(row) -> list:
    columns = schema.COUNT_COLUMNS
    return [(one, getattr(row, column)) for one, column in zip(TokenClass, columns, strict=True)]


def line_columns(line: LedgerLine) -> tuple:
    """The columns of a line's row after its id and its event's."""
    return (
        line.token_class.value,
        line.quantity,
        line.list_unit_pusd,
        line.discount_basis_points,
        line.unit_pusd,
        line.amount_pusd,
        line.amount_without_cache_pusd,
        line.price_version_id,
    )


def counts_of(row) -> TokenCounts:
    names = TokenCounts.__struct_fields__
    columns = schema.COUNT_COLUMNS
    return TokenCounts(**{name: getattr(row, column) for name, column in zip(names, columns, strict=True)})
