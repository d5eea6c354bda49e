"""Rows that keep what was there, on both databases."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.db import Database
from billing.ids import JournalId, ProcessId, new_id
from billing.ledger import Owner, admit_all, post_all
from tests.integration.billing.conftest import Account
from tests.unit.billing import builders
from tests.unit.billing.builders import T0

OWNER = Owner(journal_id=JournalId(new_id()), process_id=ProcessId(new_id()))
LEASE = timedelta(minutes=5)
HARD_TEXT = "ümlaut 漢字 🙂 \"quoted\" back\\slash {json: 'no'}"


def admit(db: Database, *admissions) -> set:
    with db.write() as connection:
        return admit_all(connection, admissions, owner=OWNER, lease=LEASE)


def test_the_ids_of_new_rows_alone_come_back(db: Database, account: Account):
    first, second = account.admission(), account.admission()
    assert admit(db, first) == {first.request_id}
    assert admit(db, first, second) == {second.request_id}
    assert admit(db, first, second) == set()
    assert admit(db) == set()


def test_a_row_that_is_there_keeps_its_values(db: Database, account: Account):
    admission = account.admission()
    admit(db, admission)
    admit(db, replace(admission, model="another"))
    with db.read() as connection:
        models = connection.execute(select(schema.requests.c.model)).scalars().all()
    assert models == [builders.MODEL]


def test_every_kind_of_value_arrives_as_it_was_sent(db: Database, account: Account):
    admission = account.admission()
    event = replace(
        builders.final(admission, uncached=10**12, output=3),
        finish_reason=HARD_TEXT,
        worker=None,
        miss_reason=None,
    )
    with db.write() as connection:
        posting = post_all(connection, [event], owner=OWNER, lease=LEASE, now=T0)
        assert list(posting.posted) == [event]
    with db.read() as connection:
        row = connection.execute(select(schema.usage_events)).one()
    assert (row.finish_reason, row.worker, row.miss_reason) == (HARD_TEXT, None, None)
    assert (row.uncached_tokens, row.output_tokens) == (10**12, 3)
    assert (row.tenant_id, row.request_id) == (account.tenant.id, admission.request_id)
    assert len(row.payload_digest) == 32


def test_a_row_of_nobody_is_refused_and_takes_the_others_with_it(db: Database, account: Account):
    with pytest.raises(IntegrityError):
        admit(db, account.admission(), builders.admission())
    with db.read() as connection:
        assert connection.execute(select(schema.requests)).all() == []
