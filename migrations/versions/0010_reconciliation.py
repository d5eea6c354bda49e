"""Runs of `billing reconcile`, and what they need: a worker's epoch, and since when a zone is a tenant's.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

TABLE = "reconciliation_runs"


def upgrade() -> None:
    op.add_column("usage_events", sa.Column("worker_epoch", sa.String(64), nullable=True))
    op.add_column("tenants", sa.Column("zone_since_us", sa.BigInteger(), nullable=True))
    op.create_table(
        TABLE,
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=True),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("start_us", "end_us", "started_at_us", "finished_at_us", "num_differences")
        ),
        sa.Column("document", sa.Text(), nullable=False),
        check("period_runs_forwards", "start_us <= end_us"),
        check("run_runs_forwards", "started_at_us <= finished_at_us"),
        check("num_differences_non_negative", "num_differences >= 0"),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{TABLE}")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f(f"fk_{TABLE}_tenant_id")),
    )
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers()
    else:
        create_sqlite_triggers()


def downgrade() -> None:
    op.drop_table(TABLE)
    op.drop_column("tenants", "zone_since_us")
    op.drop_column("usage_events", "worker_epoch")


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
        f"WHEN EXISTS (SELECT 1 FROM {TABLE} WHERE id = NEW.id) "
        f"BEGIN SELECT RAISE(ABORT, '{TABLE} is append-only'); END"
    )
