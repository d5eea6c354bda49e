"""The tables, and the promises that the database keeps by itself.

Knows columns, keys and CHECKs. Does not know how rows come to be. What a table
declaration cannot say (append-only, versions in order) is said by triggers in
`migrations/`.

Columns that end in `_us` are microseconds since the Unix epoch, UTC; `_pusd`
are picodollars; `_tokens` are counts. All are signed 64-bit integers.
"""

from __future__ import annotations

from typing import Final

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
    UniqueConstraint,
    Uuid,
    text,
)

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


def _non_negative(column: str) -> CheckConstraint:
    return CheckConstraint(f"{column} >= 0", name=f"{column}_non_negative")


tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("created_at_us", BigInteger(), nullable=False),
    CheckConstraint("name <> ''", name="name_not_empty"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), ForeignKey("tenants.id"), nullable=False),
    Column("label", String(128), nullable=False),
    Column("prefix", String(16), nullable=False),
    Column("digest", LargeBinary(32), nullable=False, unique=True),
    Column("role", String(16), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    Column("expires_at_us", BigInteger(), nullable=True),
    Column("revoked_at_us", BigInteger(), nullable=True),
    CheckConstraint("role IN ('tenant', 'admin')", name="role_known"),
    CheckConstraint("length(digest) = 32", name="digest_is_32_bytes"),
    # Lets a request prove that its key is its tenant's.
    UniqueConstraint("tenant_id", "id"),
    # A revoked key frees its label.
    Index(
        "uq_api_keys_live_label",
        "tenant_id",
        "label",
        unique=True,
        sqlite_where=text("revoked_at_us IS NULL"),
        postgresql_where=text("revoked_at_us IS NULL"),
    ),
)

price_versions = Table(
    "price_versions",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("book", String(128), nullable=False),
    Column("currency", String(3), nullable=False),
    Column("model", String(256), nullable=False),
    Column("token_class", String(32), nullable=False),
    Column("unit_pusd", BigInteger(), nullable=False),
    # A version ends where the next one of its model and class begins, so versions cannot overlap.
    Column("effective_from_us", BigInteger(), nullable=False),
    Column("created_at_us", BigInteger(), nullable=False),
    _non_negative("unit_pusd"),
    CheckConstraint("currency = 'USD'", name="currency_known"),
    Index("uq_price_versions_instant", "model", "token_class", "effective_from_us", unique=True),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("api_key_id", Uuid(), nullable=False),
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
    UniqueConstraint("tenant_id", "id"),
    Index(
        "ix_requests_admitted",
        "lease_until_us",
        sqlite_where=text("state = 'admitted'"),
        postgresql_where=text("state = 'admitted'"),
    ),
)

usage_events = Table(
    "usage_events",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("tenant_id", Uuid(), nullable=False),
    Column("request_id", Uuid(), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("model", String(256), nullable=False),
    Column("uncached_tokens", BigInteger(), nullable=False),
    Column("read_tokens", BigInteger(), nullable=False),
    Column("write_auto_tokens", BigInteger(), nullable=False),
    Column("write_5m_tokens", BigInteger(), nullable=False),
    Column("write_1h_tokens", BigInteger(), nullable=False),
    Column("output_tokens", BigInteger(), nullable=False),
    Column("delivered_tokens", BigInteger(), nullable=False),
    Column("finish_reason", String(64), nullable=True),
    Column("first_token_ns", BigInteger(), nullable=True),
    Column("admitted_at_us", BigInteger(), nullable=False),
    Column("finished_at_us", BigInteger(), nullable=False),
    Column("payload_digest", LargeBinary(32), nullable=False),
    Column("posted_at_us", BigInteger(), nullable=False),
    CheckConstraint("kind IN ('final', 'aborted')", name="kind_known"),
    _non_negative("uncached_tokens"),
    _non_negative("read_tokens"),
    _non_negative("write_auto_tokens"),
    _non_negative("write_5m_tokens"),
    _non_negative("write_1h_tokens"),
    _non_negative("output_tokens"),
    _non_negative("delivered_tokens"),
    ForeignKeyConstraint(["tenant_id", "request_id"], ["requests.tenant_id", "requests.id"]),
    Index(
        "uq_usage_events_terminal",
        "tenant_id",
        "request_id",
        unique=True,
        sqlite_where=text(TERMINAL),
        postgresql_where=text(TERMINAL),
    ),
    Index("ix_usage_events_tenant_admitted", "tenant_id", "admitted_at_us"),
)

ledger_lines = Table(
    "ledger_lines",
    metadata,
    Column("id", Uuid(), primary_key=True),
    Column("event_id", Uuid(), ForeignKey("usage_events.id"), nullable=False),
    Column("token_class", String(32), nullable=False),
    Column("quantity_tokens", BigInteger(), nullable=False),
    Column("unit_pusd", BigInteger(), nullable=False),
    Column("amount_pusd", BigInteger(), nullable=False),
    # The same tokens had there been no cache: input classes at the input price then in force.
    Column("amount_without_cache_pusd", BigInteger(), nullable=False),
    Column("price_version_id", Uuid(), ForeignKey("price_versions.id"), nullable=False),
    CheckConstraint("quantity_tokens > 0", name="quantity_positive"),
    _non_negative("unit_pusd"),
    _non_negative("amount_without_cache_pusd"),
    CheckConstraint("amount_pusd = quantity_tokens * unit_pusd", name="amount_is_exact"),
    UniqueConstraint("event_id", "token_class"),
)
