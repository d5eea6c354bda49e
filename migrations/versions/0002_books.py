"""Projects, discounts, tenant prices, attempts, corrections; more of a tenant, a key, an event and a line.

Revision ID: 0002
Revises: 0001

SQLite cannot alter a CHECK, so on both databases the rows are set aside, the tables are made
anew, and the rows go back. Children are dropped before their parents, so no foreign key is
ever broken. Going down is refused while there are rows that the former tables cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TERMINAL = "kind IN ('final', 'aborted')"
COUNTS_BEFORE = (
    "uncached_tokens",
    "read_tokens",
    "write_auto_tokens",
    "write_5m_tokens",
    "write_1h_tokens",
    "output_tokens",
    "delivered_tokens",
)
COUNTS = (
    "uncached_tokens",
    "read_tokens",
    "read_host_tokens",
    "read_disk_tokens",
    "read_remote_tokens",
    "write_auto_tokens",
    "write_5m_tokens",
    "write_1h_tokens",
    "output_tokens",
    "pin_token_hours",
)
# Parents first.
REBUILT = ("tenants", "api_keys", "price_versions", "requests", "usage_events", "ledger_lines")
APPEND_ONLY_BEFORE = ("price_versions", "usage_events", "ledger_lines")
APPEND_ONLY = (*APPEND_ONLY_BEFORE, "tenant_discounts", "attempts")

# What a new column holds in rows that are older than it.
FILLED_UP: Mapping[str, Mapping[str, str]] = {
    "tenants": {"time_zone": "'UTC'", "currency": "'USD'"},
    "usage_events": {
        "read_host_tokens": "0",
        "read_disk_tokens": "0",
        "read_remote_tokens": "0",
        "pin_token_hours": "0",
        "usage_state": "'reported'",
        "accounted_at_us": "admitted_at_us",
    },
    "ledger_lines": {"list_unit_pusd": "unit_pusd", "discount_basis_points": "0"},
}
# What the former tables cannot say.
UNSAYABLE: Mapping[str, str] = {
    "tenant_discounts": "TRUE",
    "projects": "TRUE",
    "attempts": "TRUE",
    "api_keys": "replaced_by IS NOT NULL",
    "price_versions": "tenant_id IS NOT NULL "
    "OR token_class NOT IN ('input', 'read', 'write_auto', 'write_5m', 'write_1h', 'output')",
    "usage_events": f"NOT ({TERMINAL}) OR accounted_at_us <> admitted_at_us OR usage_state <> 'reported' "
    "OR read_host_tokens + read_disk_tokens + read_remote_tokens + pin_token_hours <> 0",
    "ledger_lines": "discount_basis_points <> 0",
}


def upgrade() -> None:
    columns = set_aside()
    create_tenants()
    create_projects()
    create_api_keys()
    create_price_versions()
    create_requests()
    create_usage_events()
    create_ledger_lines()
    for table in REBUILT:
        put_back(table, columns[table], FILLED_UP.get(table, {}))
    create_triggers(APPEND_ONLY, tenant_prices=True)


def downgrade() -> None:
    refuse_loss()
    columns = set_aside()
    for table in ("attempts", "projects", "tenant_discounts"):
        op.drop_table(f"{table}_0002")
    create_tables_of_0001()
    for table in REBUILT:
        known = {column["name"] for column in sa.inspect(op.get_bind()).get_columns(table)}
        put_back(table, [name for name in columns[table] if name in known], {})
    create_triggers(APPEND_ONLY_BEFORE, tenant_prices=False)


def refuse_loss() -> None:
    for table, condition in UNSAYABLE.items():
        found = sa.text(f"SELECT count(*) FROM {table} WHERE {condition}")
        if op.get_bind().execute(found).scalar_one():
            raise RuntimeError(f"{table} has rows that version 0001 cannot hold; going down would lose them")


def set_aside() -> dict[str, list[str]]:
    """Every table of money becomes a plain copy of its rows; returns each one's columns."""
    bind = op.get_bind()
    present = set(sa.inspect(bind).get_table_names())
    columns = {}
    order = ("ledger_lines", "attempts", "usage_events", "requests", "price_versions")
    for table in (*order, "api_keys", "projects", "tenant_discounts", "tenants"):
        if table in present:
            columns[table] = [column["name"] for column in sa.inspect(bind).get_columns(table)]
            op.execute(f"CREATE TABLE {table}_0002 AS SELECT * FROM {table}")
            op.drop_table(table)
    return columns


def put_back(table: str, columns: list[str], filled_up: Mapping[str, str]) -> None:
    op.execute(
        f"INSERT INTO {table} ({', '.join([*columns, *filled_up])}) "
        f"SELECT {', '.join([*columns, *filled_up.values()])} FROM {table}_0002"
    )
    op.drop_table(f"{table}_0002")


def non_negative(table: str, column: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} >= 0", name=op.f(f"ck_{table}_{column}_non_negative"))


def check(table: str, name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=op.f(f"ck_{table}_{name}"))


def integer(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def string(name: str, length: int, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(length), nullable=nullable)


def uuid(name: str, *, nullable: bool = False) -> sa.Column:
    return sa.Column(name, sa.Uuid(), nullable=nullable)


def key(table: str, columns: list[str], target: list[str]) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(columns, target, name=op.f(f"fk_{table}_{'_'.join(columns)}"))


def unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=op.f(f"uq_{table}_{'_'.join(columns)}"))


def primary(table: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{table}"))


def index(name: str, table: str, columns: list[str], *, where: str | None = None, is_unique: bool) -> None:
    condition = sa.text(where) if where else None
    op.create_index(
        name, table, columns, unique=is_unique, sqlite_where=condition, postgresql_where=condition
    )


def create_tenants() -> None:
    op.create_table(
        "tenants",
        uuid("id"),
        string("name", 128),
        string("time_zone", 64),
        string("currency", 3),
        integer("created_at_us"),
        check("tenants", "name_not_empty", "name <> ''"),
        check("tenants", "time_zone_not_empty", "time_zone <> ''"),
        check("tenants", "currency_known", "currency = 'USD'"),
        primary("tenants"),
        unique("tenants", "name"),
    )
    op.create_table(
        "tenant_discounts",
        uuid("id"),
        uuid("tenant_id"),
        integer("basis_points"),
        integer("effective_from_us"),
        integer("created_at_us"),
        check("tenant_discounts", "basis_points_are_a_share", "basis_points BETWEEN 0 AND 10000"),
        primary("tenant_discounts"),
        key("tenant_discounts", ["tenant_id"], ["tenants.id"]),
        unique("tenant_discounts", "tenant_id", "effective_from_us"),
    )


def create_projects() -> None:
    op.create_table(
        "projects",
        uuid("id"),
        uuid("tenant_id"),
        string("name", 128),
        integer("created_at_us"),
        integer("archived_at_us", nullable=True),
        check("projects", "name_not_empty", "name <> ''"),
        primary("projects"),
        key("projects", ["tenant_id"], ["tenants.id"]),
        unique("projects", "tenant_id", "name"),
        unique("projects", "tenant_id", "id"),
    )


def create_api_keys() -> None:
    op.create_table(
        "api_keys",
        uuid("id"),
        uuid("tenant_id"),
        uuid("project_id", nullable=True),
        string("label", 128),
        string("prefix", 16),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        string("role", 16),
        integer("created_at_us"),
        integer("expires_at_us", nullable=True),
        integer("revoked_at_us", nullable=True),
        uuid("replaced_by", nullable=True),
        check("api_keys", "role_known", "role IN ('tenant', 'admin')"),
        check("api_keys", "digest_is_32_bytes", "length(digest) = 32"),
        check("api_keys", "replaced_expires", "replaced_by IS NULL OR expires_at_us IS NOT NULL"),
        primary("api_keys"),
        key("api_keys", ["tenant_id"], ["tenants.id"]),
        key("api_keys", ["replaced_by"], ["api_keys.id"]),
        key("api_keys", ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        unique("api_keys", "digest"),
        unique("api_keys", "tenant_id", "id"),
    )
    index(
        "uq_api_keys_live_label",
        "api_keys",
        ["tenant_id", "label"],
        where="revoked_at_us IS NULL AND replaced_by IS NULL",
        is_unique=True,
    )


def create_price_versions() -> None:
    op.create_table(
        "price_versions",
        uuid("id"),
        string("book", 128),
        string("currency", 3),
        uuid("tenant_id", nullable=True),
        string("model", 256),
        string("token_class", 32),
        integer("unit_pusd"),
        integer("effective_from_us"),
        integer("created_at_us"),
        non_negative("price_versions", "unit_pusd"),
        check("price_versions", "currency_known", "currency = 'USD'"),
        primary("price_versions"),
        key("price_versions", ["tenant_id"], ["tenants.id"]),
    )
    instant = ["model", "token_class", "effective_from_us"]
    index(
        "uq_price_versions_list_instant", "price_versions", instant, where="tenant_id IS NULL", is_unique=True
    )
    index(
        "uq_price_versions_tenant_instant",
        "price_versions",
        ["tenant_id", *instant],
        where="tenant_id IS NOT NULL",
        is_unique=True,
    )


def create_requests() -> None:
    op.create_table(
        "requests",
        uuid("id"),
        uuid("tenant_id"),
        uuid("api_key_id"),
        uuid("project_id", nullable=True),
        string("model", 256),
        string("state", 16),
        integer("admitted_at_us"),
        integer("lease_until_us"),
        integer("settled_at_us", nullable=True),
        uuid("journal_id"),
        uuid("process_id"),
        check("requests", "state_known", "state IN ('admitted', 'settled')"),
        check("requests", "settled_has_instant", "(state = 'settled') = (settled_at_us IS NOT NULL)"),
        primary("requests"),
        key("requests", ["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        key("requests", ["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
        unique("requests", "tenant_id", "id"),
    )
    index(
        "ix_requests_admitted", "requests", ["lease_until_us"], where="state = 'admitted'", is_unique=False
    )
    op.create_table(
        "attempts",
        uuid("id"),
        uuid("tenant_id"),
        uuid("request_id"),
        integer("number"),
        string("worker", 128, nullable=True),
        string("outcome", 64),
        integer("started_at_us"),
        integer("ended_at_us"),
        check("attempts", "number_positive", "number > 0"),
        primary("attempts"),
        key("attempts", ["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
        unique("attempts", "request_id", "number"),
    )


def create_usage_events() -> None:
    op.create_table(
        "usage_events",
        uuid("id"),
        uuid("tenant_id"),
        uuid("request_id"),
        string("kind", 16),
        uuid("original_id", nullable=True),
        string("model", 256),
        *(integer(count) for count in COUNTS),
        integer("delivered_tokens"),
        string("usage_state", 16),
        string("finish_reason", 64, nullable=True),
        integer("first_token_ns", nullable=True),
        string("worker", 128, nullable=True),
        string("miss_reason", 64, nullable=True),
        string("deepest_block", 64, nullable=True),
        integer("admitted_at_us"),
        integer("accounted_at_us"),
        integer("finished_at_us"),
        sa.Column("payload_digest", sa.LargeBinary(32), nullable=False),
        integer("posted_at_us"),
        check("usage_events", "kind_known", "kind IN ('final', 'aborted', 'adjustment', 'credit')"),
        check("usage_events", "usage_state_known", "usage_state IN ('reported', 'usage_missing')"),
        check("usage_events", "corrections_have_an_original", f"({TERMINAL}) = (original_id IS NULL)"),
        check("usage_events", "accounted_after_admission", "accounted_at_us >= admitted_at_us"),
        *(
            check(
                "usage_events",
                f"{count}_non_negative",
                f"{count} >= 0 OR kind IN ('adjustment', 'credit')",
            )
            for count in (*COUNTS, "delivered_tokens")
        ),
        primary("usage_events"),
        key("usage_events", ["original_id"], ["usage_events.id"]),
        key("usage_events", ["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    )
    index(
        "uq_usage_events_terminal",
        "usage_events",
        ["tenant_id", "request_id"],
        where=TERMINAL,
        is_unique=True,
    )
    index(
        "ix_usage_events_tenant_accounted", "usage_events", ["tenant_id", "accounted_at_us"], is_unique=False
    )
    index(
        "ix_usage_events_original",
        "usage_events",
        ["original_id"],
        where="original_id IS NOT NULL",
        is_unique=False,
    )


def create_ledger_lines() -> None:
    op.create_table(
        "ledger_lines",
        uuid("id"),
        uuid("event_id"),
        string("token_class", 32),
        integer("quantity_tokens"),
        integer("list_unit_pusd"),
        integer("discount_basis_points"),
        integer("unit_pusd"),
        integer("amount_pusd"),
        integer("amount_without_cache_pusd"),
        uuid("price_version_id"),
        check("ledger_lines", "quantity_not_zero", "quantity_tokens <> 0"),
        non_negative("ledger_lines", "list_unit_pusd"),
        check("ledger_lines", "discount_is_a_share", "discount_basis_points BETWEEN 0 AND 10000"),
        check(
            "ledger_lines",
            "unit_is_discounted",
            "unit_pusd = list_unit_pusd / 10000 * (10000 - discount_basis_points)"
            " + list_unit_pusd % 10000 * (10000 - discount_basis_points) / 10000",
        ),
        check("ledger_lines", "amount_is_exact", "amount_pusd = quantity_tokens * unit_pusd"),
        check(
            "ledger_lines",
            "amount_without_cache_has_the_sign",
            "amount_without_cache_pusd = 0 OR (amount_without_cache_pusd > 0) = (quantity_tokens > 0)",
        ),
        primary("ledger_lines"),
        key("ledger_lines", ["event_id"], ["usage_events.id"]),
        key("ledger_lines", ["price_version_id"], ["price_versions.id"]),
        unique("ledger_lines", "event_id", "token_class"),
    )


def create_triggers(append_only: tuple[str, ...], *, tenant_prices: bool) -> None:
    """Those that went with their tables. PostgreSQL's functions stayed, but for the one that tells prices apart."""
    of_the_same = "model = NEW.model AND token_class = NEW.token_class"
    if tenant_prices:
        of_the_same += " AND (tenant_id = NEW.tenant_id OR (tenant_id IS NULL AND NEW.tenant_id IS NULL))"
    if op.get_bind().dialect.name == "postgresql":
        create_postgresql_triggers(append_only, of_the_same)
    else:
        create_sqlite_triggers(append_only, of_the_same)


def create_postgresql_triggers(append_only: tuple[str, ...], of_the_same: str) -> None:
    op.execute(
        f"""
        CREATE OR REPLACE FUNCTION headstart_refuse_overlap() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF EXISTS (
                SELECT 1 FROM price_versions
                WHERE {of_the_same} AND effective_from_us >= NEW.effective_from_us
            ) THEN
                RAISE EXCEPTION 'price_versions must be in order of time'
                    USING ERRCODE = 'integrity_constraint_violation';
            END IF;
            RETURN NEW;
        END $$
        """
    )
    for table in append_only:
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


def create_sqlite_triggers(append_only: tuple[str, ...], of_the_same: str) -> None:
    for table in append_only:
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
        f"WHEN NEW.{TERMINAL} AND EXISTS (SELECT 1 FROM usage_events "
        f"WHERE tenant_id = NEW.tenant_id AND request_id = NEW.request_id AND {TERMINAL}) "
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
        f"WHEN EXISTS (SELECT 1 FROM price_versions WHERE {of_the_same} "
        "AND effective_from_us >= NEW.effective_from_us) "
        "BEGIN SELECT RAISE(ABORT, 'price_versions must be in order of time'); END"
    )


def create_tables_of_0001() -> None:
    op.create_table(
        "tenants",
        uuid("id"),
        string("name", 128),
        integer("created_at_us"),
        check("tenants", "name_not_empty", "name <> ''"),
        primary("tenants"),
        unique("tenants", "name"),
    )
    op.create_table(
        "api_keys",
        uuid("id"),
        uuid("tenant_id"),
        string("label", 128),
        string("prefix", 16),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        string("role", 16),
        integer("created_at_us"),
        integer("expires_at_us", nullable=True),
        integer("revoked_at_us", nullable=True),
        check("api_keys", "role_known", "role IN ('tenant', 'admin')"),
        check("api_keys", "digest_is_32_bytes", "length(digest) = 32"),
        primary("api_keys"),
        key("api_keys", ["tenant_id"], ["tenants.id"]),
        unique("api_keys", "digest"),
        unique("api_keys", "tenant_id", "id"),
    )
    index(
        "uq_api_keys_live_label",
        "api_keys",
        ["tenant_id", "label"],
        where="revoked_at_us IS NULL",
        is_unique=True,
    )
    op.create_table(
        "price_versions",
        uuid("id"),
        string("book", 128),
        string("currency", 3),
        string("model", 256),
        string("token_class", 32),
        integer("unit_pusd"),
        integer("effective_from_us"),
        integer("created_at_us"),
        non_negative("price_versions", "unit_pusd"),
        check("price_versions", "currency_known", "currency = 'USD'"),
        primary("price_versions"),
    )
    index(
        "uq_price_versions_instant",
        "price_versions",
        ["model", "token_class", "effective_from_us"],
        is_unique=True,
    )
    op.create_table(
        "requests",
        uuid("id"),
        uuid("tenant_id"),
        uuid("api_key_id"),
        string("model", 256),
        string("state", 16),
        integer("admitted_at_us"),
        integer("lease_until_us"),
        integer("settled_at_us", nullable=True),
        uuid("journal_id"),
        uuid("process_id"),
        check("requests", "state_known", "state IN ('admitted', 'settled')"),
        check("requests", "settled_has_instant", "(state = 'settled') = (settled_at_us IS NOT NULL)"),
        primary("requests"),
        key("requests", ["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
        unique("requests", "tenant_id", "id"),
    )
    index(
        "ix_requests_admitted", "requests", ["lease_until_us"], where="state = 'admitted'", is_unique=False
    )
    op.create_table(
        "usage_events",
        uuid("id"),
        uuid("tenant_id"),
        uuid("request_id"),
        string("kind", 16),
        string("model", 256),
        *(integer(count) for count in COUNTS_BEFORE),
        string("finish_reason", 64, nullable=True),
        integer("first_token_ns", nullable=True),
        integer("admitted_at_us"),
        integer("finished_at_us"),
        sa.Column("payload_digest", sa.LargeBinary(32), nullable=False),
        integer("posted_at_us"),
        check("usage_events", "kind_known", TERMINAL),
        *(non_negative("usage_events", count) for count in COUNTS_BEFORE),
        primary("usage_events"),
        key("usage_events", ["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    )
    index(
        "uq_usage_events_terminal",
        "usage_events",
        ["tenant_id", "request_id"],
        where=TERMINAL,
        is_unique=True,
    )
    index(
        "ix_usage_events_tenant_admitted", "usage_events", ["tenant_id", "admitted_at_us"], is_unique=False
    )
    op.create_table(
        "ledger_lines",
        uuid("id"),
        uuid("event_id"),
        string("token_class", 32),
        integer("quantity_tokens"),
        integer("unit_pusd"),
        integer("amount_pusd"),
        integer("amount_without_cache_pusd"),
        uuid("price_version_id"),
        check("ledger_lines", "quantity_positive", "quantity_tokens > 0"),
        non_negative("ledger_lines", "unit_pusd"),
        non_negative("ledger_lines", "amount_without_cache_pusd"),
        check("ledger_lines", "amount_is_exact", "amount_pusd = quantity_tokens * unit_pusd"),
        primary("ledger_lines"),
        key("ledger_lines", ["event_id"], ["usage_events.id"]),
        key("ledger_lines", ["price_version_id"], ["price_versions.id"]),
        unique("ledger_lines", "event_id", "token_class"),
    )
