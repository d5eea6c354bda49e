"""The tables, and the promises that the database keeps by itself.

Knows columns, keys and CHECKs. Does not know how rows come to be. What a table
declaration cannot say (append-only, versions in order) is said by triggers in
`migrations/`.

Columns that end in `_us` are microseconds since the Unix epoch, UTC; `_pusd`
are picodollars; `_tokens` are counts. All are signed 64-bit integers.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from billing.instants import BUCKET_MICROSECONDS

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

TERMINAL: Final = "kind IN ('final', 'aborted')"
"""The predicate of the index that allows one terminal event per request."""

OUT_OF_PERIOD: Final = "(kind IN ('adjustment', 'credit') OR accounted_at_us <> admitted_at_us)"
"""The predicate of the index that finds what a period holds beside its own usage."""

COUNT_COLUMNS: Final = (
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
"""The disjoint counts of an event, one for each token class, in the order of `TokenClass`."""


def _non_negative(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} >= 0", name=f"{column}_non_negative")


def _non_negative_unless_correction(column: str) -> CheckConstraint:
    return CheckConstraint(
        f"{column} >= 0 OR kind IN ('adjustment', 'credit')", name=f"{column}_non_negative"
    )


tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("time_zone", String(64), nullable=False),
    Column("currency", String(3), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    # When the zone was changed last; NULL: never.
    Column("zone_since_us", BigInteger(), nullable=True),
    CheckConstraint("name <> ''", name="name_not_empty"),
    CheckConstraint("time_zone <> ''", name="time_zone_not_empty"),
    CheckConstraint("currency = 'USD'", name="currency_known"),
)

tenant_discounts = Table(
    "tenant_discounts",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("basis_points", BigInteger(), nullable=False),
    # In force until the next one of its tenant begins; before the first there is none.
    Column("effective_from_us", BigInteger(), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    CheckConstraint("basis_points BETWEEN 0 AND 10000", name="basis_points_are_a_share"),
    UniqueConstraint("tenant_id", "effective_from_us"),
)

projects = Table(
    "projects",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    Column("archived_at_us", BigInteger(), nullable=True),
    CheckConstraint("name <> ''", name="name_not_empty"),
    UniqueConstraint("tenant_id", "name"),
    # Lets a key prove that its project is its tenant's.
    UniqueConstraint("tenant_id", "id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    # A key belongs to one project of its tenant, or to none, for as long as it lives.
    Column("project_id", Uuid(), nullable=True),
    Column("label", String(128), nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    Column("expires_at_us", BigInteger(), nullable=True),
    Column("revoked_at_us", BigInteger(), nullable=True),
    # The key that took this one's label when it was rotated; this one lives on until it expires.
    Column("replaced_by", Uuid(), ForeignKey("api_keys.id"), nullable=True),
    CheckConstraint("role IN ('tenant', 'admin')", name="role_known"),
    CheckConstraint("length(digest) = 32", name="digest_is_32_bytes"),
    CheckConstraint("replaced_by IS NULL OR expires_at_us IS NOT NULL", name="replaced_expires"),
    ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
    # Lets a request prove that its key is its tenant's.
    UniqueConstraint("tenant_id", "id"),
    # A revoked key frees its label, and so does a replaced one.
    Index(
        "uq_api_keys_live_label",
        "tenant_id",
        "label",
        unique=True,
        sqlite_where=text("revoked_at_us IS NULL AND replaced_by IS NULL"),
        postgresql_where=text("revoked_at_us IS NULL AND replaced_by IS NULL"),
    ),
)

price_versions = Table(
    "price_versions",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("book", String(128), nullable=False),
    Column("currency", String(3), nullable=False),
    # NULL: the list price, for every tenant without one of its own.
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=True),
    Column("model", String(256), nullable=False),
    Column("token_class", String(32), nullable=False),
    Column("unit_pusd", BigInteger(), nullable=False),
    # A version ends where the next one of its tenant, model and class begins, so versions cannot overlap.
    Column("effective_from_us", BigInteger(), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    _non_negative("unit_pusd"),
    CheckConstraint("currency = 'USD'", name="currency_known"),
    Index(
        "uq_price_versions_list_instant",
        "model",
        "token_class",
        "effective_from_us",
        unique=True,
        sqlite_where=text("tenant_id IS NULL"),
        postgresql_where=text("tenant_id IS NULL"),
    ),
    Index(
        "uq_price_versions_tenant_instant",
        "tenant_id",
        "model",
        "token_class",
        "effective_from_us",
        unique=True,
        sqlite_where=text("tenant_id IS NOT NULL"),
        postgresql_where=text("tenant_id IS NOT NULL"),
    ),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("api_key_id", Uuid(), nullable=False),
    Column("project_id", Uuid(), nullable=True),
    Column("model", String(256), nullable=False),
    Column("state", String(16), nullable=False),
    Column("admitted_at_us", BigInteger(), nullable=False),
    Column("lease_until_us", BigInteger(), nullable=False),
    Column("settled_at_us", BigInteger(), nullable=True),
    Column("journal_id", Uuid(), nullable=False),
    Column("process_id", Uuid(), nullable=False),
    CheckConstraint("state IN ('admitted', 'settled')", name="state_known"),
    CheckConstraint("(state = 'settled') = (settled_at_us IS NOT NULL)", name="settled_has_instant"),
    ForeignKeyConstraint(["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
    ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
    UniqueConstraint("tenant_id", "id"),
    Index(
        "ix_requests_admitted",
        "lease_until_us",
        sqlite_where=text("state = 'admitted'"),
        postgresql_where=text("state = 'admitted'"),
    ),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("request_id", Uuid(), nullable=False),
    # From 1; the last is the one that was billed, if any was.
    Column("number", BigInteger(), nullable=False),
    Column("worker", String(128), nullable=True),
    Column("outcome", String(64), nullable=False),
    Column("started_at_us", BigInteger(), nullable=False),
    Column("ended_at_us", BigInteger(), nullable=False),
    CheckConstraint("number > 0", name="number_positive"),
    ForeignKeyConstraint(["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    UniqueConstraint("request_id", "number"),
)

usage_events = Table(
    "usage_events",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("request_id", Uuid(), nullable=False),
    Column("kind", String(16), nullable=False),
    # What a correction corrects. Only corrections have one, and only they may be negative.
    Column("original_id", Uuid(), ForeignKey("usage_events.id"), nullable=True),
    Column("model", String(256), nullable=False),
    *(Column(name, BigInteger(), nullable=False) for name in COUNT_COLUMNS),
    Column("delivered_tokens", BigInteger(), nullable=False),
    Column("usage_state", String(16), nullable=False),
    Column("finish_reason", String(64), nullable=True),
    Column("first_token_ns", BigInteger(), nullable=True),
    Column("worker", String(128), nullable=True),
    Column("miss_reason", String(64), nullable=True),
    Column("deepest_block", String(64), nullable=True),
    Column("admitted_at_us", BigInteger(), nullable=False),
    # The instant whose period it belongs to: that of admission, or later if that period was closed by then.
    Column("accounted_at_us", BigInteger(), nullable=False),
    Column("finished_at_us", BigInteger(), nullable=False),
    Column("payload_digest", LargeBinary(32), nullable=False),
    Column("posted_at_us", BigInteger(), nullable=False),
    # Of the run of the worker that computed it: its counters are since then.
    Column("worker_epoch", String(64), nullable=True),
    CheckConstraint("kind IN ('final', 'aborted', 'adjustment', 'credit')", name="kind_known"),
    CheckConstraint("usage_state IN ('reported', 'usage_missing')", name="usage_state_known"),
    CheckConstraint(f"({TERMINAL}) = (original_id IS NULL)", name="corrections_have_an_original"),
    CheckConstraint("accounted_at_us >= admitted_at_us", name="accounted_after_admission"),
    *(_non_negative_unless_correction(name) for name in (*COUNT_COLUMNS, "delivered_tokens")),
    ForeignKeyConstraint(["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    Index(
        "uq_usage_events_terminal",
        "tenant_id",
        "request_id",
        unique=True,
        sqlite_where=text(TERMINAL),
        postgresql_where=text(TERMINAL),
    ),
    Index("ix_usage_events_tenant_accounted", "tenant_id", "accounted_at_us"),
    Index(
        "ix_usage_events_out_of_period",
        "tenant_id",
        "accounted_at_us",
        sqlite_where=text(OUT_OF_PERIOD),
        postgresql_where=text(OUT_OF_PERIOD),
    ),
    # The same late event corrects once, however often it is replayed.
    Index(
        "uq_usage_events_correction",
        "original_id",
        "payload_digest",
        unique=True,
        sqlite_where=text("original_id IS NOT NULL"),
        postgresql_where=text("original_id IS NOT NULL"),
    ),
)

ledger_lines = Table(
    "ledger_lines",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("event_id", Uuid(), ForeignKey("usage_events.id"), nullable=False),
    Column("token_class", String(32), nullable=False),
    Column("quantity_tokens", BigInteger(), nullable=False),
    # The price version's unit; then the tenant's, after its discount.
    Column("list_unit_pusd", BigInteger(), nullable=False),
    Column("discount_basis_points", BigInteger(), nullable=False),
    Column("unit_pusd", BigInteger(), nullable=False),
    Column("amount_pusd", BigInteger(), nullable=False),
    # The same tokens had there been no cache: input classes at the tenant's input price then in force.
    Column("amount_without_cache_pusd", BigInteger(), nullable=False),
    Column("price_version_id", Uuid(), ForeignKey("price_versions.id"), nullable=False),
    CheckConstraint("quantity_tokens <> 0", name="quantity_not_zero"),
    _non_negative("list_unit_pusd"),
    CheckConstraint("discount_basis_points BETWEEN 0 AND 10000", name="discount_is_a_share"),
    # Rounded down, in the tenant's favour, so that a unit stays a whole number. In two parts: no overflow.
    CheckConstraint(
        "unit_pusd = list_unit_pusd / 10000 * (10000 - discount_basis_points)"
        " + list_unit_pusd % 10000 * (10000 - discount_basis_points) / 10000",
        name="unit_is_discounted",
    ),
    CheckConstraint("amount_pusd = quantity_tokens * unit_pusd", name="amount_is_exact"),
    CheckConstraint(
        "amount_without_cache_pusd = 0 OR (amount_without_cache_pusd > 0) = (quantity_tokens > 0)",
        name="amount_without_cache_has_the_sign",
    ),
    UniqueConstraint("event_id", "token_class"),
)

statements = Table(
    "statements",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("number", String(64), nullable=False),
    # A month of the tenant's zone, as `2026-11`.
    Column("period", String(7), nullable=False),
    Column("start_us", BigInteger(), nullable=False),
    Column("end_us", BigInteger(), nullable=False),
    Column("issued_at_us", BigInteger(), nullable=False),
    # Canonical JSON, and its SHA-256.
    Column("document", Text(), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    CheckConstraint("start_us < end_us", name="period_holds_something"),
    CheckConstraint("length(digest) = 32", name="digest_is_32_bytes"),
    UniqueConstraint("tenant_id", "period"),
)

dashboard_sessions = Table(
    "dashboard_sessions",
    metadata,
    # SHA-256 of what the browser holds, and the digest of the key it was opened with.
    Column("token_digest", LargeBinary(32), primary_key=True),
    Column("key_digest", LargeBinary(32), nullable=False),
    Column("opened_at_us", BigInteger(), nullable=False),
    Column("last_used_at_us", BigInteger(), nullable=False),
    CheckConstraint("length(token_digest) = 32", name="token_digest_is_32_bytes"),
    Index("ix_dashboard_sessions_key_digest", "key_digest"),
)

CACHE_COUNTS: Final = ("requests", "prompt_tokens", "read_tokens", "first_tokens", "first_token_us")


def _cache_columns() -> list[Any]:
    """How requests met the cache in 15 minutes, whosever they are."""
    return [
        Column("bucket_us", BigInteger(), primary_key=True, autoincrement=False),
        Column("model", String(256), primary_key=True),
        # Empty where the event does not say: a key holds no NULL.
        Column("worker", String(128), primary_key=True),
        Column("outcome", String(8), primary_key=True),
        Column("miss_reason", String(64), primary_key=True),
        # `first_tokens` requests came to a first token, after `first_token_us` microseconds in all.
        *(Column(name, BigInteger(), nullable=False) for name in CACHE_COUNTS),
        CheckConstraint("outcome IN ('hit', 'miss')", name="outcome_known"),
        CheckConstraint(f"bucket_us % {BUCKET_MICROSECONDS} = 0", name="bucket_begins"),
        CheckConstraint("read_tokens <= prompt_tokens", name="read_is_a_part"),
    ]


cache_buckets = Table(
    "cache_buckets",
    metadata,
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), primary_key=True),
    *_cache_columns(),
)

# The same of all tenants as one: what an operator's page reads, however many tenants there are.
deployment_cache_buckets = Table("deployment_cache_buckets", metadata, *_cache_columns())

# A budget names one key, one project, or its whole tenant.
budgets = Table(
    "budgets",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("project_id", Uuid(), nullable=True),
    Column("api_key_id", Uuid(), nullable=True),
    # Of these three the narrowest: what requests are matched by.
    Column("scope_id", Uuid(), nullable=False),
    Column("period", String(16), nullable=False),
    Column("limit_pusd", BigInteger(), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    Column("removed_at_us", BigInteger(), nullable=True),
    CheckConstraint("period IN ('month', 'total')", name="period_known"),
    CheckConstraint("project_id IS NULL OR api_key_id IS NULL", name="scope_is_one"),
    CheckConstraint("scope_id = COALESCE(api_key_id, project_id, tenant_id)", name="scope_is_the_narrowest"),
    _non_negative("limit_pusd"),
    ForeignKeyConstraint(["tenant_id", "project_id"], ["projects.tenant_id", "projects.id"]),
    ForeignKeyConstraint(["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
    Index(
        "uq_budgets_live",
        "scope_id",
        "period",
        unique=True,
        sqlite_where=text("removed_at_us IS NULL"),
        postgresql_where=text("removed_at_us IS NULL"),
    ),
)

# What stands against a budget in one of its periods. A trigger refuses a reservation past the limit;
# what was really used is posted, whatever the limit.
budget_balances = Table(
    "budget_balances",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("budget_id", Uuid(), ForeignKey("budgets.id"), nullable=False),
    # A month of the tenant's zone, as `2026-11`, or `total`.
    Column("period", String(7), nullable=False),
    Column("limit_pusd", BigInteger(), nullable=False),
    Column("posted_pusd", BigInteger(), nullable=False),
    Column("reserved_pusd", BigInteger(), nullable=False),
    _non_negative("limit_pusd"),
    _non_negative("reserved_pusd"),
    UniqueConstraint("budget_id", "period"),
)

reservations = Table(
    "reservations",
    metadata,
    Column("request_id", Uuid(), ForeignKey("requests.id"), primary_key=True),
    Column("balance_id", Uuid(), ForeignKey("budget_balances.id"), primary_key=True),
    Column("amount_pusd", BigInteger(), nullable=False),
    Column("state", String(16), nullable=False),
    Column("lease_until_us", BigInteger(), nullable=False),
    Column("settled_pusd", BigInteger(), nullable=True),
    Column("ended_at_us", BigInteger(), nullable=True),
    _non_negative("amount_pusd"),
    CheckConstraint("state IN ('held', 'settled', 'released', 'expired')", name="state_known"),
    CheckConstraint("(state = 'held') = (ended_at_us IS NULL)", name="ended_has_instant"),
    CheckConstraint("(state = 'settled') = (settled_pusd IS NOT NULL)", name="settled_has_amount"),
    Index(
        "ix_reservations_held",
        "lease_until_us",
        sqlite_where=text("state = 'held'"),
        postgresql_where=text("state = 'held'"),
    ),
)

# The limits of a key, or of all keys of a tenant that have none of their own, and how full they are.
limits = Table(
    "limits",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("api_key_id", Uuid(), nullable=True),
    Column("scope_id", Uuid(), nullable=False, unique=True),
    Column("requests_per_minute", BigInteger(), nullable=True),
    Column("tokens_per_minute", BigInteger(), nullable=True),
    Column("concurrent_requests", BigInteger(), nullable=True),
    Column("cached_weight_basis_points", BigInteger(), nullable=False),
    # Of the two buckets, in parts of 60,000,000 to a request or a token, at one instant; see `limits.py`.
    Column("requests_level", BigInteger(), nullable=False),
    Column("tokens_level", BigInteger(), nullable=False),
    Column("level_at_us", BigInteger(), nullable=False),
    Column("open_requests", BigInteger(), nullable=False),
    CheckConstraint("requests_per_minute > 0", name="requests_per_minute_positive"),
    CheckConstraint("tokens_per_minute > 0", name="tokens_per_minute_positive"),
    CheckConstraint("concurrent_requests > 0", name="concurrent_requests_positive"),
    CheckConstraint("cached_weight_basis_points BETWEEN 0 AND 10000", name="cached_weight_is_a_share"),
    CheckConstraint("scope_id = COALESCE(api_key_id, tenant_id)", name="scope_is_the_narrowest"),
    _non_negative("requests_level"),
    _non_negative("tokens_level"),
    _non_negative("open_requests"),
    ForeignKeyConstraint(["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
)

# What an open request holds of its limits: one of the concurrent requests, and tokens.
limit_holds = Table(
    "limit_holds",
    metadata,
    Column("request_id", Uuid(), ForeignKey("requests.id"), primary_key=True),
    Column("limit_id", Uuid(), ForeignKey("limits.id"), nullable=False),
    Column("tokens", BigInteger(), nullable=False),
    Column("state", String(16), nullable=False),
    Column("lease_until_us", BigInteger(), nullable=False),
    Column("ended_at_us", BigInteger(), nullable=True),
    _non_negative("tokens"),
    CheckConstraint("state IN ('held', 'settled', 'expired')", name="state_known"),
    CheckConstraint("(state = 'held') = (ended_at_us IS NULL)", name="ended_has_instant"),
    Index(
        "ix_limit_holds_held",
        "lease_until_us",
        sqlite_where=text("state = 'held'"),
        postgresql_where=text("state = 'held'"),
    ),
)


def _rollup_key() -> list[Any]:
    """Columns and constraints of a roll-up: whose usage of what, and in which 15 minutes."""
    return [
        Column("tenant_id", Uuid(), primary_key=True),
        Column("bucket_start_us", BigInteger(), primary_key=True, autoincrement=False),
        Column("api_key_id", Uuid(), primary_key=True),
        Column("model", String(256), primary_key=True),
        CheckConstraint(f"bucket_start_us % {BUCKET_MICROSECONDS} = 0", name="bucket_is_whole"),
        ForeignKeyConstraint(["tenant_id", "api_key_id"], ["api_keys.tenant_id", "api_keys.id"]),
    ]


def _deployment_key() -> list[Any]:
    """The same for all tenants as one."""
    return [
        Column("bucket_start_us", BigInteger(), primary_key=True, autoincrement=False),
        Column("model", String(256), primary_key=True),
        CheckConstraint(f"bucket_start_us % {BUCKET_MICROSECONDS} = 0", name="bucket_is_whole"),
    ]


def _fits(column: str) -> CheckConstraint:
    """SQLite would go on in floating point."""
    return CheckConstraint(f"abs({column}) <= {2**63 - 1}", name=f"{column}_fits")


def _request_sums() -> list[Any]:
    return [
        Column("requests", BigInteger(), nullable=False),
        Column("aborted", BigInteger(), nullable=False),
        Column("usage_missing", BigInteger(), nullable=False),
        Column("delivered_tokens", BigInteger(), nullable=False),
        CheckConstraint("requests >= 0", name="requests_non_negative"),
    ]


def _class_sums() -> list[Any]:
    return [
        Column("token_class", String(32), primary_key=True),
        Column("quantity_tokens", BigInteger(), nullable=False),
        Column("list_amount_pusd", BigInteger(), nullable=False),
        Column("amount_pusd", BigInteger(), nullable=False),
        Column("amount_without_cache_pusd", BigInteger(), nullable=False),
        _fits("list_amount_pusd"),
        _fits("amount_pusd"),
        _fits("amount_without_cache_pusd"),
    ]


request_rollups = Table(
    "request_rollups", metadata, *_rollup_key(), *_request_sums(), sqlite_with_rowid=False
)
class_rollups = Table("class_rollups", metadata, *_rollup_key(), *_class_sums(), sqlite_with_rowid=False)
deployment_request_rollups = Table(
    "deployment_request_rollups", metadata, *_deployment_key(), *_request_sums(), sqlite_with_rowid=False
)
deployment_class_rollups = Table(
    "deployment_class_rollups", metadata, *_deployment_key(), *_class_sums(), sqlite_with_rowid=False
)

# Public halves of the keys that receipts were ever signed with.
receipt_keys = Table(
    "receipt_keys",
    metadata,
    Column("id", String(43), primary_key=True),
    Column("public_key", LargeBinary(32), nullable=False, unique=True),
    Column("first_used_at_us", BigInteger(), nullable=False),
    CheckConstraint("length(public_key) = 32", name="public_key_is_32_bytes"),
)

receipts = Table(
    "receipts",
    metadata,
    # An event has one receipt, and a place in its tenant's chain one as well.
    Column("event_id", Uuid(), ForeignKey("usage_events.id"), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("request_id", Uuid(), nullable=False),
    Column("sequence", BigInteger(), nullable=False),
    Column("key_id", String(43), ForeignKey("receipt_keys.id"), nullable=False),
    # The signed line, and its SHA-256, which the next receipt of the tenant names.
    Column("document", Text(), nullable=False),
    Column("digest", LargeBinary(32), nullable=False),
    Column("issued_at_us", BigInteger(), nullable=False),
    CheckConstraint("sequence > 0", name="sequence_positive"),
    CheckConstraint("length(digest) = 32", name="digest_is_32_bytes"),
    ForeignKeyConstraint(["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    UniqueConstraint("tenant_id", "sequence"),
    Index("ix_receipts_request_id", "request_id"),
)

# Events that have no receipt yet: written with the event, deleted with its receipt.
receipt_dues = Table(
    "receipt_dues",
    metadata,
    Column("event_id", Uuid(), ForeignKey("usage_events.id"), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
)

# Cached tokens that were promised for longer than they were kept. Each is credited once.
broken_promises = Table(
    "broken_promises",
    metadata,
    Column("credit_id", Uuid(), ForeignKey("usage_events.id"), primary_key=True),
    Column("original_id", Uuid(), ForeignKey("usage_events.id"), nullable=False),
    # What the worker calls it, among the promises of one request.
    Column("promise", String(128), nullable=False),
    Column("token_class", String(32), nullable=False),
    Column("tokens", BigInteger(), nullable=False),
    Column("promised_until_us", BigInteger(), nullable=False),
    Column("broken_at_us", BigInteger(), nullable=False),
    Column("reported_at_us", BigInteger(), nullable=False),
    CheckConstraint("promise <> ''", name="promise_not_empty"),
    CheckConstraint("token_class IN ('write_5m', 'write_1h')", name="token_class_has_a_ttl"),
    CheckConstraint("tokens > 0", name="tokens_positive"),
    CheckConstraint("broken_at_us < promised_until_us", name="broken_early"),
    UniqueConstraint("original_id", "promise"),
)

# What each comparison of the books came to. Kept for ever.
reconciliation_runs = Table(
    "reconciliation_runs",
    metadata,
    Column("id", Uuid(), primary_key=True),
    # NULL: all tenants.
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=True),
    Column("start_us", BigInteger(), nullable=False),
    Column("end_us", BigInteger(), nullable=False),
    Column("started_at_us", BigInteger(), nullable=False),
    Column("finished_at_us", BigInteger(), nullable=False),
    Column("num_differences", BigInteger(), nullable=False),
    # JSON, with each difference that is named.
    Column("document", Text(), nullable=False),
    CheckConstraint("start_us <= end_us", name="period_runs_forwards"),
    CheckConstraint("started_at_us <= finished_at_us", name="run_runs_forwards"),
    _non_negative("num_differences"),
)
