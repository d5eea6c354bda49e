"""The roll-ups of all tenants as one, filled from those of each.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

BUCKET_US = 15 * 60 * 1_000_000
LARGEST = 2**63 - 1
MONEY = ("list_amount_pusd", "amount_pusd", "amount_without_cache_pusd")
REQUEST_SUMS = ("requests", "aborted", "usage_missing", "delivered_tokens")
CLASS_SUMS = ("quantity_tokens", *MONEY)
CACHE_KEY = ("bucket_us", "model", "worker", "outcome", "miss_reason")
CACHE_SUMS = ("requests", "prompt_tokens", "read_tokens", "first_tokens", "first_token_us")


def upgrade() -> None:
    create_request_rollups()
    create_class_rollups()
    create_cache_buckets()
    for statement in fillings():
        op.execute(statement)


def downgrade() -> None:
    op.drop_table("deployment_cache_buckets")
    op.drop_table("deployment_class_rollups")
    op.drop_table("deployment_request_rollups")


def fillings() -> list[str]:
    """One statement for each table."""
    return [
        summed("request_rollups", ("bucket_start_us", "model"), REQUEST_SUMS),
        summed("class_rollups", ("bucket_start_us", "model", "token_class"), CLASS_SUMS),
        summed("cache_buckets", CACHE_KEY, CACHE_SUMS),
    ]


def summed(table: str, key: tuple[str, ...], sums: tuple[str, ...]) -> str:
    columns = ", ".join((*key, *sums))
    added = ", ".join((*key, *(f"sum({name})" for name in sums)))
    return (
        f"INSERT INTO deployment_{table} ({columns}) SELECT {added} FROM {table} GROUP BY {', '.join(key)}"
    )


def create_request_rollups() -> None:
    op.create_table(
        "deployment_request_rollups",
        sa.Column("bucket_start_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        *(integer(name) for name in REQUEST_SUMS),
        begins_whole("deployment_request_rollups", "bucket_start_us", "bucket_is_whole"),
        sa.CheckConstraint("requests >= 0", name=op.f("ck_deployment_request_rollups_requests_non_negative")),
        sa.PrimaryKeyConstraint("bucket_start_us", "model", name=op.f("pk_deployment_request_rollups")),
        sqlite_with_rowid=False,
    )


def create_class_rollups() -> None:
    op.create_table(
        "deployment_class_rollups",
        sa.Column("bucket_start_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("token_class", sa.String(32), nullable=False),
        *(integer(name) for name in CLASS_SUMS),
        begins_whole("deployment_class_rollups", "bucket_start_us", "bucket_is_whole"),
        *(
            sa.CheckConstraint(
                f"abs({name}) <= {LARGEST}", name=op.f(f"ck_deployment_class_rollups_{name}_fits")
            )
            for name in MONEY
        ),
        sa.PrimaryKeyConstraint(
            "bucket_start_us", "model", "token_class", name=op.f("pk_deployment_class_rollups")
        ),
        sqlite_with_rowid=False,
    )


def create_cache_buckets() -> None:
    table = "deployment_cache_buckets"
    op.create_table(
        table,
        sa.Column("bucket_us", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("worker", sa.String(128), nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("miss_reason", sa.String(64), nullable=False),
        *(integer(name) for name in CACHE_SUMS),
        sa.CheckConstraint("outcome IN ('hit', 'miss')", name=op.f(f"ck_{table}_outcome_known")),
        begins_whole(table, "bucket_us", "bucket_begins"),
        sa.CheckConstraint("read_tokens <= prompt_tokens", name=op.f(f"ck_{table}_read_is_a_part")),
        sa.PrimaryKeyConstraint(*CACHE_KEY, name=op.f(f"pk_{table}")),
    )


def integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def begins_whole(table: str, column: str, name: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} % {BUCKET_US} = 0", name=op.f(f"ck_{table}_{name}"))
