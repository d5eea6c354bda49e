"""Roll-ups of 15 minutes, filled from the events and lines that are there.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

BUCKET_US = 15 * 60 * 1_000_000
KEY = ("tenant_id", "bucket_start_us", "api_key_id", "model")
LARGEST = 2**63 - 1
IS_CORRECTION = "original_id IS NOT NULL"


def upgrade() -> None:
    create_request_rollups()
    create_class_rollups()
    op.drop_index("ix_usage_events_original", "usage_events")
    op.create_index(
        "uq_usage_events_correction",
        "usage_events",
        ["original_id", "payload_digest"],
        unique=True,
        sqlite_where=sa.text(IS_CORRECTION),
        postgresql_where=sa.text(IS_CORRECTION),
    )
    fill()


def downgrade() -> None:
    op.drop_index("uq_usage_events_correction", "usage_events")
    op.create_index(
        "ix_usage_events_original",
        "usage_events",
        ["original_id"],
        sqlite_where=sa.text(IS_CORRECTION),
        postgresql_where=sa.text(IS_CORRECTION),
    )
    op.drop_table("class_rollups")
    op.drop_table("request_rollups")


def integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def key_columns() -> list[sa.Column]:
    return [
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("bucket_start_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
    ]


def constraints(table: str, *more_of_the_key: str) -> list[sa.Constraint]:
    return [
        sa.CheckConstraint(f"bucket_start_us % {BUCKET_US} = 0", name=op.f(f"ck_{table}_bucket_is_whole")),
        sa.PrimaryKeyConstraint(*KEY, *more_of_the_key, name=op.f(f"pk_{table}")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "api_key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f(f"fk_{table}_tenant_id_api_key_id"),
        ),
    ]


def create_request_rollups() -> None:
    op.create_table(
        "request_rollups",
        *key_columns(),
        integer("requests"),
        integer("aborted"),
        integer("usage_missing"),
        integer("delivered_tokens"),
        *constraints("request_rollups"),
        sa.CheckConstraint("requests >= 0", name=op.f("ck_request_rollups_requests_non_negative")),
        sqlite_with_rowid=False,
    )


def create_class_rollups() -> None:
    op.create_table(
        "class_rollups",
        *key_columns(),
        sa.Column("token_class", sa.String(32), nullable=False),
        integer("quantity_tokens"),
        integer("list_amount_pusd"),
        integer("amount_pusd"),
        integer("amount_without_cache_pusd"),
        *constraints("class_rollups", "token_class"),
        *(
            sa.CheckConstraint(f"abs({column}) <= {LARGEST}", name=op.f(f"ck_class_rollups_{column}_fits"))
            for column in ("list_amount_pusd", "amount_pusd", "amount_without_cache_pusd")
        ),
        sqlite_with_rowid=False,
    )


def fill() -> None:
    joined = "usage_events e JOIN requests r ON r.id = e.request_id"
    key = f"e.tenant_id, e.accounted_at_us - e.accounted_at_us % {BUCKET_US}, r.api_key_id, e.model"
    op.execute(
        "INSERT INTO request_rollups (tenant_id, bucket_start_us, api_key_id, model, "
        "requests, aborted, usage_missing, delivered_tokens) "
        f"SELECT {key}, count(CASE WHEN e.original_id IS NULL THEN 1 END), "
        "count(CASE WHEN e.kind = 'aborted' THEN 1 END), "
        "count(CASE WHEN e.usage_state = 'usage_missing' AND e.original_id IS NULL THEN 1 END), "
        f"sum(e.delivered_tokens) FROM {joined} GROUP BY 1, 2, 3, 4"
    )
    op.execute(
        "INSERT INTO class_rollups (tenant_id, bucket_start_us, api_key_id, model, token_class, "
        "quantity_tokens, list_amount_pusd, amount_pusd, amount_without_cache_pusd) "
        f"SELECT {key}, l.token_class, sum(l.quantity_tokens), sum(l.quantity_tokens * l.list_unit_pusd), "
        "sum(l.amount_pusd), sum(l.amount_without_cache_pusd) "
        f"FROM {joined} JOIN ledger_lines l ON l.event_id = e.id GROUP BY 1, 2, 3, 4, 5"
    )
