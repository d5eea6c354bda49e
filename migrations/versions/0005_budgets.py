"""Budgets with their balances and reservations; rate limits with what open requests hold of them.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# In this form nothing overflows.
OVERRUN = "NEW.reserved_pusd > 0 AND NEW.reserved_pusd > NEW.limit_pusd - NEW.posted_pusd"
GROWN = f"NEW.reserved_pusd > OLD.reserved_pusd AND {OVERRUN}"


def upgrade() -> None:
    create_tables()
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers()
    else:
        create_sqlite_triggers()


def downgrade() -> None:
    for table in ("limit_holds", "limits", "reservations", "budget_balances", "budgets"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION headstart_refuse_overrun()")


def create_postgresql_triggers() -> None:
    op.execute(
        """
        CREATE FUNCTION headstart_refuse_overrun() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION 'the reservation does not fit into the budget'
                USING ERRCODE = 'integrity_constraint_violation';
        END $$
        """
    )
    for change, condition in (("INSERT", OVERRUN), ("UPDATE", GROWN)):
        op.execute(
            f"CREATE TRIGGER budget_balances_no_overrun_{change.lower()} BEFORE {change} ON budget_balances "
            f"FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION headstart_refuse_overrun()"
        )


def create_sqlite_triggers() -> None:
    for change, condition in (("INSERT", OVERRUN), ("UPDATE", GROWN)):
        op.execute(
            f"CREATE TRIGGER budget_balances_no_overrun_{change.lower()} BEFORE {change} ON budget_balances "
            f"WHEN {condition} "
            "BEGIN SELECT RAISE(ABORT, 'the reservation does not fit into the budget'); END"
        )


def create_tables() -> None:
    op.create_table(
        "budgets",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("project_id", sa.Uuid(), nullable=True),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("scope_id", sa.Uuid(), nullable=False),
        sa.Column("period", sa.String(length=16), nullable=False),
        sa.Column("limit_pusd", sa.BigInteger(), nullable=False),
        sa.Column("created_at_us", sa.BigInteger(), nullable=False),
        sa.Column("removed_at_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint("period IN ('month', 'total')", name=op.f("ck_budgets_period_known")),
        sa.CheckConstraint("limit_pusd >= 0", name=op.f("ck_budgets_limit_pusd_non_negative")),
        sa.CheckConstraint("project_id IS NULL OR api_key_id IS NULL", name=op.f("ck_budgets_scope_is_one")),
        sa.CheckConstraint(
            "scope_id = COALESCE(api_key_id, project_id, tenant_id)",
            name=op.f("ck_budgets_scope_is_the_narrowest"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "api_key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_budgets_tenant_id_api_key_id"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "project_id"],
            ["projects.tenant_id", "projects.id"],
            name=op.f("fk_budgets_tenant_id_project_id"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_budgets_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
    )
    op.create_index(
        "uq_budgets_live",
        "budgets",
        ["scope_id", "period"],
        unique=True,
        sqlite_where=sa.text("removed_at_us IS NULL"),
        postgresql_where=sa.text("removed_at_us IS NULL"),
    )
    op.create_table(
        "limits",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=True),
        sa.Column("scope_id", sa.Uuid(), nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_requests", sa.BigInteger(), nullable=True),
        sa.Column("cached_weight_basis_points", sa.BigInteger(), nullable=False),
        sa.Column("requests_level", sa.BigInteger(), nullable=False),
        sa.Column("tokens_level", sa.BigInteger(), nullable=False),
        sa.Column("level_at_us", sa.BigInteger(), nullable=False),
        sa.Column("open_requests", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "cached_weight_basis_points BETWEEN 0 AND 10000", name=op.f("ck_limits_cached_weight_is_a_share")
        ),
        sa.CheckConstraint("concurrent_requests > 0", name=op.f("ck_limits_concurrent_requests_positive")),
        sa.CheckConstraint("open_requests >= 0", name=op.f("ck_limits_open_requests_non_negative")),
        sa.CheckConstraint("requests_level >= 0", name=op.f("ck_limits_requests_level_non_negative")),
        sa.CheckConstraint("requests_per_minute > 0", name=op.f("ck_limits_requests_per_minute_positive")),
        sa.CheckConstraint(
            "scope_id = COALESCE(api_key_id, tenant_id)", name=op.f("ck_limits_scope_is_the_narrowest")
        ),
        sa.CheckConstraint("tokens_level >= 0", name=op.f("ck_limits_tokens_level_non_negative")),
        sa.CheckConstraint("tokens_per_minute > 0", name=op.f("ck_limits_tokens_per_minute_positive")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "api_key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_limits_tenant_id_api_key_id"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_limits_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_limits")),
        sa.UniqueConstraint("scope_id", name=op.f("uq_limits_scope_id")),
    )
    op.create_table(
        "budget_balances",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("budget_id", sa.Uuid(), nullable=False),
        sa.Column("period", sa.String(length=7), nullable=False),
        sa.Column("limit_pusd", sa.BigInteger(), nullable=False),
        sa.Column("posted_pusd", sa.BigInteger(), nullable=False),
        sa.Column("reserved_pusd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("limit_pusd >= 0", name=op.f("ck_budget_balances_limit_pusd_non_negative")),
        sa.CheckConstraint("reserved_pusd >= 0", name=op.f("ck_budget_balances_reserved_pusd_non_negative")),
        sa.ForeignKeyConstraint(["budget_id"], ["budgets.id"], name=op.f("fk_budget_balances_budget_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budget_balances")),
        sa.UniqueConstraint("budget_id", "period", name=op.f("uq_budget_balances_budget_id_period")),
    )
    op.create_table(
        "limit_holds",
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("limit_id", sa.Uuid(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(state = 'held') = (ended_at_us IS NULL)", name=op.f("ck_limit_holds_ended_has_instant")
        ),
        sa.CheckConstraint(
            "state IN ('held', 'settled', 'expired')", name=op.f("ck_limit_holds_state_known")
        ),
        sa.CheckConstraint("tokens >= 0", name=op.f("ck_limit_holds_tokens_non_negative")),
        sa.ForeignKeyConstraint(["limit_id"], ["limits.id"], name=op.f("fk_limit_holds_limit_id")),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name=op.f("fk_limit_holds_request_id")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_limit_holds")),
    )
    op.create_index(
        "ix_limit_holds_held",
        "limit_holds",
        ["lease_until_us"],
        unique=False,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    )
    op.create_table(
        "reservations",
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("balance_id", sa.Uuid(), nullable=False),
        sa.Column("amount_pusd", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=False),
        sa.Column("settled_pusd", sa.BigInteger(), nullable=True),
        sa.Column("ended_at_us", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(state = 'held') = (ended_at_us IS NULL)", name=op.f("ck_reservations_ended_has_instant")
        ),
        sa.CheckConstraint(
            "(state = 'settled') = (settled_pusd IS NOT NULL)",
            name=op.f("ck_reservations_settled_has_amount"),
        ),
        sa.CheckConstraint(
            "state IN ('held', 'settled', 'released', 'expired')", name=op.f("ck_reservations_state_known")
        ),
        sa.CheckConstraint("amount_pusd >= 0", name=op.f("ck_reservations_amount_pusd_non_negative")),
        sa.ForeignKeyConstraint(
            ["balance_id"], ["budget_balances.id"], name=op.f("fk_reservations_balance_id")
        ),
        sa.ForeignKeyConstraint(["request_id"], ["requests.id"], name=op.f("fk_reservations_request_id")),
        sa.PrimaryKeyConstraint("request_id", "balance_id", name=op.f("pk_reservations")),
    )
    op.create_index(
        "ix_reservations_held",
        "reservations",
        ["lease_until_us"],
        unique=False,
        sqlite_where=sa.text("state = 'held'"),
        postgresql_where=sa.text("state = 'held'"),
    )
