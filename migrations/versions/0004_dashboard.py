"""Who is signed in to the dashboard, and how requests met the cache, by quarter of an hour.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

BUCKET_US = 15 * 60 * 1_000_000
COUNTS = ("requests", "prompt_tokens", "read_tokens", "first_tokens", "first_token_us")
READ = "(read_tokens + read_host_tokens + read_disk_tokens + read_remote_tokens)"
WRITTEN = "(write_auto_tokens + write_5m_tokens + write_1h_tokens)"


def upgrade() -> None:
    create_dashboard_sessions()
    create_cache_buckets()
    # From the events that are there, as posting would have.
    op.execute(filling())


def downgrade() -> None:
    op.drop_table("cache_buckets")
    op.drop_table("dashboard_sessions")


def create_dashboard_sessions() -> None:
    op.create_table(
        "dashboard_sessions",
        sa.Column("token_digest", sa.LargeBinary(32), nullable=False),
        sa.Column("key_digest", sa.LargeBinary(32), nullable=False),
        sa.Column("opened_at_us", sa.BigInteger(), nullable=False),
        sa.Column("last_used_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "length(token_digest) = 32", name=op.f("ck_dashboard_sessions_token_digest_is_32_bytes")
        ),
        sa.PrimaryKeyConstraint("token_digest", name=op.f("pk_dashboard_sessions")),
    )
    op.create_index("ix_dashboard_sessions_key_digest", "dashboard_sessions", ["key_digest"])


def create_cache_buckets() -> None:
    op.create_table(
        "cache_buckets",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("bucket_us", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("worker", sa.String(128), nullable=False),
        sa.Column("outcome", sa.String(8), nullable=False),
        sa.Column("miss_reason", sa.String(64), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in COUNTS),
        sa.CheckConstraint("outcome IN ('hit', 'miss')", name=op.f("ck_cache_buckets_outcome_known")),
        sa.CheckConstraint(f"bucket_us % {BUCKET_US} = 0", name=op.f("ck_cache_buckets_bucket_begins")),
        sa.CheckConstraint("read_tokens <= prompt_tokens", name=op.f("ck_cache_buckets_read_is_a_part")),
        sa.PrimaryKeyConstraint(
            "tenant_id",
            "bucket_us",
            "model",
            "worker",
            "outcome",
            "miss_reason",
            name=op.f("pk_cache_buckets"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_cache_buckets_tenant_id")),
    )


def filling() -> str:
    columns = "tenant_id, bucket_us, model, worker, outcome, miss_reason"
    return (
        f"INSERT INTO cache_buckets ({columns}, {', '.join(COUNTS)}) "
        f"SELECT {columns}, count(*), sum(prompt_tokens), sum(read_tokens), sum(first_tokens), "
        "sum(first_token_us) FROM ("
        f"SELECT tenant_id, admitted_at_us - admitted_at_us % {BUCKET_US} AS bucket_us, model, "
        "coalesce(worker, '') AS worker, coalesce(miss_reason, '') AS miss_reason, "
        f"CASE WHEN {READ} > 0 THEN 'hit' ELSE 'miss' END AS outcome, "
        f"uncached_tokens + {READ} + {WRITTEN} AS prompt_tokens, {READ} AS read_tokens, "
        "CASE WHEN first_token_ns IS NULL THEN 0 ELSE 1 END AS first_tokens, "
        "coalesce(first_token_ns, 0) / 1000 AS first_token_us "
        "FROM usage_events WHERE kind IN ('final', 'aborted')) AS events "
        f"GROUP BY {columns}"
    )
