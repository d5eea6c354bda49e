"""What must hold of the ledger after anything whatever, and looks into its tables."""

from sqlalchemy import func, select

from billing import schema
from billing.db import Database
from billing.ledger import LedgerLine, rate
from billing.prices import BookHistory
from billing.usage import TokenCounts


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
    """Every event has exactly the lines that rating it again gives, and a settled request."""
    events = rows(db, schema.usage_events)
    posted = {row.id: set() for row in events}
    for line in rows(db, schema.ledger_lines):
        assert line.amount_pusd == line.quantity_tokens * line.unit_pusd
        posted[line.event_id].add(tuple(line)[2:])
    with db.read() as connection:
        book = BookHistory.load(connection, {row.model for row in events})
    requests = states(db)
    for row in events:
        lines = rate(counts_of(row), book.price(row.model, row.admitted_at_us))
        assert posted[row.id] == {line_columns(line) for line in lines}
        assert requests[row.request_id] == "settled"


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
