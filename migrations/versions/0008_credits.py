"""Promises to keep cached tokens that were broken, and what was credited for each.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

TABLE = "broken_promises"
# What INSERT OR REPLACE would delete, by either key, also on a connection without recursive triggers.
KEYS = "credit_id = NEW.credit_id OR (original_id = NEW.original_id AND promise = NEW.promise)"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("credit_id", sa.Uuid(), nullable=False),
        sa.Column("original_id", sa.Uuid(), nullable=False),
        sa.Column("promise", sa.String(128), nullable=False),
        sa.Column("token_class", sa.String(32), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("tokens", "promised_until_us", "broken_at_us", "reported_at_us")
        ),
        check("promise_not_empty", "promise <> ''"),
        check("token_class_has_a_ttl", "token_class IN ('write_5m', 'write_1h')"),
        check("tokens_positive", "tokens > 0"),
        check("broken_early", "broken_at_us < promised_until_us"),
        sa.PrimaryKeyConstraint("credit_id", name=op.f("pk_broken_promises")),
        sa.ForeignKeyConstraint(["credit_id"], ["usage_events.id"], name=op.f("fk_broken_promises_credit_id")),
        sa.ForeignKeyConstraint(
            ["original_id"], ["usage_events.id"], name=op.f("fk_broken_promises_original_id")
        ),
        sa.UniqueConstraint("original_id", "promise", name=op.f("uq_broken_promises_original_id_promise")),
    )
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers()
    else:
        create_sqlite_triggers()


def downgrade() -> None:
    if op.get_bind().execute(sa.text(f"SELECT count(*) FROM {TABLE}")).scalar_one():
        raise RuntimeError("credits were granted; going down would lose what for")
    op.drop_table(TABLE)


def check(name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{TABLE}_{name}"))


def create_postgresql_triggers() -> None:
    for name, event, scope in (
        ("append_only", "UPDATE OR DELETE", "ROW"),
        ("no_truncate", "TRUNCATE", "STATEMENT"),
    ):
        op.execute(
            f"CREATE TRIGGER {TABLE}_{name} BEFORE {event} ON {TABLE} "
            f"FOR EACH {scope} EXECUTE FUNCTION headstart_refuse_change()"
        )


def create_sqlite_triggers() -> None:
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {TABLE}_no_{change.lower()} BEFORE {change} ON {TABLE} "
            f"BEGIN SELECT RAISE(ABORT, '{TABLE} is append-only'); END"
        )
    op.execute(
        f"CREATE TRIGGER {TABLE}_no_replace BEFORE INSERT ON {TABLE} "
        f"WHEN EXISTS (SELECT 1 FROM {TABLE} WHERE {KEYS}) "
        f"BEGIN SELECT RAISE(ABORT, '{TABLE} is append-only'); END"
    )
