"""Tenants, keys, prices, requests, usage events, ledger lines.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

APPEND_ONLY = ("price_versions", "usage_events", "ledger_lines")


def upgrade() -> None:
    create_accounts()
    create_price_versions()
    create_requests()
    create_usage_events()
    create_ledger_lines()
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers()
    else:
        create_sqlite_triggers()


def downgrade() -> None:
    for table in ("ledger_lines", "usage_events", "requests", "price_versions", "api_keys", "tenants"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION headstart_refuse_change()")
        op.execute("DROP FUNCTION headstart_refuse_overlap()")


def non_negative(table: str, column: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} >= 0", name=op.f(f"ck_{table}_{column}_non_negative"))


def create_accounts() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("name <> ''", name=op.f("ck_tenants_name_not_empty")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("label", sa.String(128), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_us", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("role IN ('tenant', 'admin')", name=op.f("ck_api_keys_role_known")),
        sa.CheckConstraint("length(digest) = 32", name=op.f("ck_api_keys_digest_is_32_bytes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.UniqueConstraint("digest", name=op.f("uq_api_keys_digest")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_api_keys_tenant_id_id")),
    )
    op.create_index(
        "uq_api_keys_live_label",
        "api_keys",
        ["tenant_id", "label"],
        unique=True,
        sqlite_where=sa.text("revoked_at_us IS NULL"),
        postgresql_where=sa.text("revoked_at_us IS NULL"),
    )


def create_price_versions() -> None:
    op.create_table(
        "price_versions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("book", sa.String(128), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("token_class", sa.String(32), nullable=False),
        sa.Column("unit_pusd", sa.BigInteger(), nullable=False),
        sa.Column("effective_from_us", sa.BigInteger(), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        non_negative("price_versions", "unit_pusd"),
        sa.CheckConstraint("currency = 'USD'", name=op.f("ck_price_versions_currency_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_price_versions")),
    )
    op.create_index(
        "uq_price_versions_instant",
        "price_versions",
        ["model", "token_class", "effective_from_us"],
        unique=True,
    )


def create_requests() -> None:
    op.create_table(
        "requests",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("admitted_at_us", sa.BigInteger(), nullable=False),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=False),
        sa.Column("settled_at_us", sa.BigInteger(), nullable=True),
        sa.Column("journal_id", sa.Uuid(), nullable=False),
        sa.Column("process_id", sa.Uuid(), nullable=False),
        sa.CheckConstraint("state IN ('admitted', 'settled')", name=op.f("ck_requests_state_known")),
        sa.CheckConstraint(
            "(state = 'settled') = (settled_at_us IS NOT NULL)",
            name=op.f("ck_requests_settled_has_instant"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "api_key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_requests_tenant_id_api_key_id"),
        ),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_requests_tenant_id_id")),
    )
    op.create_index(
        "ix_requests_admitted",
        "requests",
        ["lease_until_us"],
        sqlite_where=sa.text("state = 'admitted'"),
        postgresql_where=sa.text("state = 'admitted'"),
    )


def create_usage_events() -> None:
    counts = (
        "uncached_tokens",
        "read_tokens",
        "write_auto_tokens",
        "write_5m_tokens",
        "write_1h_tokens",
        "output_tokens",
        "delivered_tokens",
    )
    op.create_table(
        "usage_events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        *(sa.Column(count, sa.BigInteger(), nullable=False) for count in counts),
        sa.Column("finish_reason", sa.String(64), nullable=True),
        sa.Column("first_token_ns", sa.BigInteger(), nullable=True),
        sa.Column("admitted_at_us", sa.BigInteger(), nullable=False),
        sa.Column("finished_at_us", sa.BigInteger(), nullable=False),
        sa.Column("payload_digest", sa.LargeBinary(32), nullable=False),
        sa.Column("posted_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('final', 'aborted')", name=op.f("ck_usage_events_kind_known")),
        *(non_negative("usage_events", count) for count in counts),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_events")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "request_id"],
            ["requests.tenant_id", "requests.id"],
            name=op.f("fk_usage_events_tenant_id_request_id"),
        ),
    )
    op.create_index(
        "uq_usage_events_terminal",
        "usage_events",
        ["tenant_id", "request_id"],
        unique=True,
        sqlite_where=sa.text("kind IN ('final', 'aborted')"),
        postgresql_where=sa.text("kind IN ('final', 'aborted')"),
    )
    op.create_index("ix_usage_events_tenant_admitted", "usage_events", ["tenant_id", "admitted_at_us"])


def create_ledger_lines() -> None:
    op.create_table(
        "ledger_lines",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("event_id", sa.Uuid(), nullable=False),
        sa.Column("token_class", sa.String(32), nullable=False),
        sa.Column("quantity_tokens", sa.BigInteger(), nullable=False),
        sa.Column("unit_pusd", sa.BigInteger(), nullable=False),
        sa.Column("amount_pusd", sa.BigInteger(), nullable=False),
        sa.Column("amount_without_cache_pusd", sa.BigInteger(), nullable=False),
        sa.Column("price_version_id", sa.Uuid(), nullable=False),
        sa.CheckConstraint("quantity_tokens > 0", name=op.f("ck_ledger_lines_quantity_positive")),
        non_negative("ledger_lines", "unit_pusd"),
        non_negative("ledger_lines", "amount_without_cache_pusd"),
        sa.CheckConstraint(
            "amount_pusd = quantity_tokens * unit_pusd", name=op.f("ck_ledger_lines_amount_is_exact")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_lines")),
        sa.ForeignKeyConstraint(["event_id"], ["usage_events.id"], name=op.f("fk_ledger_lines_event_id")),
        sa.ForeignKeyConstraint(
            ["price_version_id"], ["price_versions.id"], name=op.f("fk_ledger_lines_price_version_id")
        ),
        sa.UniqueConstraint("event_id", "token_class", name=op.f("uq_ledger_lines_event_id_token_class")),
    )


def create_postgresql_triggers() -> None:
    op.execute(
        """
        CREATE FUNCTION headstart_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
        END $$
        """
    )
    op.execute(
        """
        CREATE FUNCTION headstart_refuse_overlap() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF EXISTS (
                SELECT 1 FROM price_versions
                WHERE model = NEW.model AND token_class = NEW.token_class
                    AND effective_from_us >= NEW.effective_from_us
            ) THEN
                RAISE EXCEPTION 'price_versions must be in order of time'
                    USING ERRCODE = 'integrity_constraint_violation';
            END IF;
            RETURN NEW;
        END $$
        """
    )
    for table in APPEND_ONLY:
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE ON {table} "
            "FOR EACH ROW EXECUTE FUNCTION headstart_refuse_change()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION headstart_refuse_change()"
        )
    op.execute(
        "CREATE TRIGGER price_versions_in_order BEFORE INSERT ON price_versions "
        "FOR EACH ROW EXECUTE FUNCTION headstart_refuse_overlap()"
    )


def create_sqlite_triggers() -> None:
    for table in APPEND_ONLY:
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        # INSERT OR REPLACE deletes without a DELETE trigger unless the connection asks for one.
        op.execute(
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
            f"WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id) "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
    # The unique keys that a REPLACE could hit besides the id. IGNORE is what ON CONFLICT DO NOTHING does.
    op.execute(
        "CREATE TRIGGER usage_events_no_second_terminal BEFORE INSERT ON usage_events "
        "WHEN NEW.kind IN ('final', 'aborted') AND EXISTS (SELECT 1 FROM usage_events "
        "WHERE tenant_id = NEW.tenant_id AND request_id = NEW.request_id AND kind IN ('final', 'aborted')) "
        "BEGIN SELECT RAISE(IGNORE); END"
    )
    op.execute(
        "CREATE TRIGGER ledger_lines_no_second_class BEFORE INSERT ON ledger_lines "
        "WHEN EXISTS (SELECT 1 FROM ledger_lines "
        "WHERE event_id = NEW.event_id AND token_class = NEW.token_class) "
        "BEGIN SELECT RAISE(ABORT, 'ledger_lines is append-only'); END"
    )
    op.execute(
        "CREATE TRIGGER price_versions_in_order BEFORE INSERT ON price_versions "
        "WHEN EXISTS (SELECT 1 FROM price_versions WHERE model = NEW.model "
        "AND token_class = NEW.token_class AND effective_from_us >= NEW.effective_from_us) "
        "BEGIN SELECT RAISE(ABORT, 'price_versions must be in order of time'); END"
    )
