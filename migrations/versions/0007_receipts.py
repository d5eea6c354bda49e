"""Receipts, the public keys they are checked with, and which events are due one: all that are there.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# What INSERT OR REPLACE would delete, by any key, also on a connection without recursive triggers.
KEYS = {
    "receipt_keys": "id = NEW.id OR public_key = NEW.public_key",
    "receipts": "event_id = NEW.event_id OR (tenant_id = NEW.tenant_id AND sequence = NEW.sequence)",
}


def upgrade() -> None:
    create_receipt_keys()
    create_receipts()
    create_receipt_dues()
    op.execute("INSERT INTO receipt_dues (event_id, tenant_id) SELECT id, tenant_id FROM usage_events")
    for table, keys in KEYS.items():
        if op.get_bind().dialect.name == "postgresql":
            create_postgresql_triggers(table)
        else:
            create_sqlite_triggers(table, keys)


def downgrade() -> None:
    if op.get_bind().execute(sa.text("SELECT count(*) FROM receipts")).scalar_one():
        raise RuntimeError("receipts were issued; going down would lose them")
    for table in ("receipt_dues", "receipts", "receipt_keys"):
        op.drop_table(table)


def create_receipt_keys() -> None:
    op.create_table(
        "receipt_keys",
        sa.Column("id", sa.String(43), nullable=False),
        sa.Column("public_key", sa.LargeBinary(32), nullable=False),
        sa.Column("first_used_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("length(public_key) = 32", name=op.f("ck_receipt_keys_public_key_is_32_bytes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_receipt_keys")),
        sa.UniqueConstraint("public_key", name=op.f("uq_receipt_keys_public_key")),
    )


def create_receipts() -> None:
    op.create_table(
        "receipts",
        sa.Column("event_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("request_id", sa.Uuid(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("key_id", sa.String(43), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("issued_at_us", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("sequence > 0", name=op.f("ck_receipts_sequence_positive")),
        sa.CheckConstraint("length(digest) = 32", name=op.f("ck_receipts_digest_is_32_bytes")),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_receipts")),
        sa.ForeignKeyConstraint(["event_id"], ["usage_events.id"], name=op.f("fk_receipts_event_id")),
        sa.ForeignKeyConstraint(["key_id"], ["receipt_keys.id"], name=op.f("fk_receipts_key_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "request_id"],
            ["requests.tenant_id", "requests.id"],
            name=op.f("fk_receipts_tenant_id_request_id"),
        ),
        sa.UniqueConstraint("tenant_id", "sequence", name=op.f("uq_receipts_tenant_id_sequence")),
    )
    op.create_index("ix_receipts_request_id", "receipts", ["request_id"])


def create_receipt_dues() -> None:
    op.create_table(
        "receipt_dues",
        sa.Column("event_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_receipt_dues")),
        sa.ForeignKeyConstraint(["event_id"], ["usage_events.id"], name=op.f("fk_receipt_dues_event_id")),
    )


def create_postgresql_triggers(table: str) -> None:
    for name, event, scope in (
        ("append_only", "UPDATE OR DELETE", "ROW"),
        ("no_truncate", "TRUNCATE", "STATEMENT"),
    ):
        op.execute(
            f"CREATE TRIGGER {table}_{name} BEFORE {event} ON {table} "
            f"FOR EACH {scope} EXECUTE FUNCTION headstart_refuse_change()"
        )


def create_sqlite_triggers(table: str, keys: str) -> None:
    for change in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER {table}_no_{change.lower()} BEFORE {change} ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
    op.execute(
        f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
        f"WHEN EXISTS (SELECT 1 FROM {table} WHERE {keys}) "
        f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
    )
