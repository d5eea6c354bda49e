"""Statements, and the index that finds corrections and late events.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

OUT_OF_PERIOD = "(kind IN ('adjustment', 'credit') OR accounted_at_us <> admitted_at_us)"


def upgrade() -> None:
    op.create_table(
        "statements",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.String(64), nullable=False),
        sa.Column("period", sa.String(7), nullable=False),
        sa.Column("start_us", sa.BigInteger(), nullable=False),
        sa.Column("end_us", sa.BigInteger(), nullable=False),
        sa.Column("issued_at_us", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.CheckConstraint("start_us < end_us", name=op.f("ck_statements_period_holds_something")),
        sa.CheckConstraint("length(digest) = 32", name=op.f("ck_statements_digest_is_32_bytes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_statements")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_statements_tenant_id")),
        sa.UniqueConstraint("tenant_id", "period", name=op.f("uq_statements_tenant_id_period")),
    )
    op.create_index(
        "ix_usage_events_out_of_period",
        "usage_events",
        ["tenant_id", "accounted_at_us"],
        sqlite_where=sa.text(OUT_OF_PERIOD),
        postgresql_where=sa.text(OUT_OF_PERIOD),
    )
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers()
    else:
        create_sqlite_triggers()


def downgrade() -> None:
    if op.get_bind().execute(sa.text("SELECT count(*) FROM statements")).scalar_one():
        raise RuntimeError("statements were issued; going down would lose them")
    op.drop_index("ix_usage_events_out_of_period", "usage_events")
    op.drop_table("statements")


def create_postgresql_triggers() -> None:
    for name, event, scope in (
        ("append_only", "UPDATE OR DELETE", "ROW"),
        ("no_truncate", "TRUNCATE", "STATEMENT"),
    ):
        op.execute(
            f"CREATE TRIGGER statements_{name} BEFORE {event} ON statements "
            f"FOR EACH {scope} EXECUTE FUNCTION headstart_refuse_change()"
        )


def create_sqlite_triggers() -> None:
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER statements_no_{change.lower()} BEFORE {change} ON statements "
            "BEGIN SELECT RAISE(ABORT, 'statements is append-only'); END"
        )
    # What INSERT OR REPLACE would delete, by either key, also on a connection without recursive triggers.
    op.execute(
        "CREATE TRIGGER statements_no_replace BEFORE INSERT ON statements "
        "WHEN EXISTS (SELECT 1 FROM statements WHERE id = NEW.id "
        "OR (tenant_id = NEW.tenant_id AND period = NEW.period)) "
        "BEGIN SELECT RAISE(ABORT, 'statements is append-only'); END"
    )
