"""Receipts of posted events: each has one, in an unbroken chain of its tenant, whoever seals and whenever."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.db import open_database
from billing.errors import DatabaseUnavailable, UnknownReceipt, UnknownRequest
from billing.ids import new_request_id
from billing.receipt_chain import (
    BATCH_EVENTS,
    chain_documents,
    num_due,
    public_keys,
    publish_key,
    receipts_of,
    seal_next,
)
from billing.receipt_keys import SigningKey
from billing.receipts import FIRST_PREVIOUS, verify
from billing.sealer import BUSY_EVENTS, PATIENT_LOOKS, Sealer
from billing.usage import UsageKind
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import count, rows
from tests.unit.billing.builders import T0, final

KEY = SigningKey.new()
KEYS = {KEY.public.id: KEY.public}


@pytest.fixture
def published(db):
    publish_key(db, KEY.public, now=T0)


@pytest.fixture
def tenants(db, account, published):
    return [account, new_account(db, "other")]


def post(meter, account, number, **counts):
    """Posts events; returns their admissions."""
    admissions = [account.admission() for _ in range(number)]
    for one in admissions:
        meter.admit(one).result(10)
        meter.settle(final(one, **(counts or {"uncached": 10, "read": 20, "output": 5})))
    meter.flush()
    return admissions


def chains(db) -> dict:
    with db.read() as connection:
        tenants = connection.execute(select(schema.tenants.c.id)).scalars().all()
        return {tenant_id: list(chain_documents(connection, tenant_id)) for tenant_id in tenants}


def check_chains(db) -> dict:
    """Every event has one receipt or is due one; every chain is whole and sound."""
    found = chains(db)
    documents = [document for chain in found.values() for document in chain]
    verified = verify(io.BytesIO(b"".join(one.encode() + b"\n" for one in documents)), KEYS)
    assert documents == [] or not verified.flaws
    for tenant_id, chain in verified.chains.items():
        assert (chain.first, chain.last) == (1, len(found[tenant_id]))
    sealed = [row.event_id for row in rows(db, schema.receipts)]
    due = [row.event_id for row in rows(db, schema.receipt_dues)]
    assert sorted([*sealed, *due]) == sorted(row.id for row in rows(db, schema.usage_events))
    return found


def test_an_event_is_due_a_receipt_from_the_transaction_that_posts_it(db, account, new_meter, published):
    [admitted] = post(new_meter(), account, 1)
    assert num_due(db, at_most=10) == 1
    with pytest.raises(UnknownReceipt):
        receipts_of(db, admitted.request_id)
    assert seal_next(db, KEY, now=T0) == 1
    assert seal_next(db, KEY, now=T0) == 0
    assert num_due(db, at_most=10) == 0
    check_chains(db)


def test_a_receipt_says_what_the_event_and_its_lines_say(db, account, new_meter, published):
    [admitted] = post(new_meter(), account, 1, uncached=10, read_host=20, write_5m=7, output=5)
    seal_next(db, KEY, now=T0 + 5)
    [document] = receipts_of(db, admitted.request_id, tenant_id=account.tenant.id)
    receipt = json.loads(document)
    lines = {line["token_class"]: line for line in receipt["lines"]}
    for row in rows(db, schema.ledger_lines):
        line = lines.pop(row.token_class)
        assert line["quantity"] == row.quantity_tokens
        assert line["amount_pusd"] == row.amount_pusd
        assert line["price_version_id"] == str(row.price_version_id)
    assert not lines
    amount = 10 * 3_000_000 + 20 * 300_000 + 7 * 3_750_000 + 5 * 15_000_000
    assert (receipt["amount_pusd"], receipt["amount"]) == (amount, "0.00013725")
    assert receipt["saved_pusd"] == 37 * 3_000_000 + 5 * 15_000_000 - amount
    assert (receipt["prompt_tokens"], receipt["cached_tokens"], receipt["written_tokens"]) == (37, 20, 7)
    assert receipt["tier"] == "host"
    assert receipt["previous"] == FIRST_PREVIOUS.hex()
    assert receipt["issued_at"] == "2026-03-01T00:00:00.000005Z"
    assert receipt["api_key_id"] == str(account.key.id)


def test_a_request_that_cost_nothing_has_a_receipt_too(db, account, new_meter, published):
    meter = new_meter()
    admitted = account.admission()
    meter.admit(admitted).result(10)
    meter.settle(final(admitted, kind=UsageKind.ABORTED))
    meter.flush()
    seal_next(db, KEY, now=T0)
    [document] = receipts_of(db, admitted.request_id)
    assert json.loads(document)["amount"] == "0.00"
    check_chains(db)


def test_a_correction_has_a_receipt_of_its_own(db, account, new_meter, published):
    meter = new_meter(lease=timedelta(seconds=1))
    admitted = account.admission()
    meter.admit(admitted).result(10)
    meter.observe(final(admitted, kind=UsageKind.ABORTED, uncached=10))
    meter.sweep(T0 + 2_000_000)
    meter.settle(final(admitted, uncached=10, output=5))
    meter.flush()
    seal_next(db, KEY, now=T0)
    first, second = map(json.loads, receipts_of(db, admitted.request_id))
    assert (first["kind"], second["kind"]) == ("aborted", "adjustment")
    assert second["original_id"] == first["event_id"]
    assert second["tokens"]["output"] == 5
    check_chains(db)


def test_chains_of_tenants_do_not_mix(db, account, new_meter, published):
    other = new_account(db, "other")
    meter = new_meter()
    for _ in range(3):
        post(meter, account, 1)
        post(meter, other, 1)
    seal_next(db, KEY, now=T0)
    assert {len(chain) for chain in check_chains(db).values()} == {3}


def test_a_request_of_another_tenant_is_unknown(db, account, new_meter, published):
    [admitted] = post(new_meter(), account, 1)
    seal_next(db, KEY, now=T0)
    for tenant_id, request_id in (
        (new_account(db, "x").tenant.id, admitted.request_id),
        (None, new_request_id()),
    ):
        with pytest.raises(UnknownRequest):
            receipts_of(db, request_id, tenant_id=tenant_id)


def test_a_change_of_the_key_breaks_no_chain(db, account, new_meter, published):
    meter, new = new_meter(), SigningKey.new()
    post(meter, account, 2)
    seal_next(db, KEY, now=T0)
    post(meter, account, 2)
    publish_key(db, new.public, now=T0 + 1)
    publish_key(db, new.public, now=T0 + 2)
    seal_next(db, new, now=T0)
    [chain] = chains(db).values()
    keys = {key.id: key for key in public_keys(db)}
    assert list(keys) == [KEY.public.id, new.public.id]
    assert not verify(io.BytesIO("\n".join([*chain, ""]).encode()), keys).flaws
    assert verify(io.BytesIO("\n".join([*chain, ""]).encode()), KEYS).flaws


def test_several_processes_may_seal_at_once(db, database_url, account, new_meter, published):
    other = new_account(db, "other")
    meter = new_meter()
    for one in (account, other):
        post(meter, one, BATCH_EVENTS)

    def seal_to_the_end(_):
        with open_database(database_url) as mine:
            return sum(iter(lambda: seal_next(mine, KEY, now=T0), 0))

    with ThreadPoolExecutor(4) as pool:
        sealed = list(pool.map(seal_to_the_end, range(4)))
    assert sum(sealed) == 2 * BATCH_EVENTS
    assert num_due(db, at_most=1) == 0
    check_chains(db)


def test_what_a_dead_process_left_due_is_sealed_by_another(db, account, new_meter):
    post(new_meter(), account, 3)
    sealer = Sealer(db, KEY, clock=lambda: T0)
    sealer.start()
    sealer.close()
    assert num_due(db, at_most=1) == 0
    assert sealer.stats() == {"sealed": 3, "due": 0}
    check_chains(db)


def test_a_sealing_that_dies_leaves_nothing_behind(db, account, new_meter, published, monkeypatch):
    post(new_meter(), account, 3)
    monkeypatch.setattr("billing.receipt_chain.insert_many", _break)
    with pytest.raises(_Broken):
        seal_next(db, KEY, now=T0)
    monkeypatch.undo()
    assert count(db, schema.receipts) == 0
    assert num_due(db, at_most=10) == 3
    seal_next(db, KEY, now=T0)
    check_chains(db)


class _Broken(Exception):
    pass


def _break(*_):
    raise _Broken


def test_one_request_is_sealed_before_all_others(db, account, new_meter):
    meter = new_meter()
    post(meter, account, 5)
    [wanted] = post(meter, account, 1)
    sealer = Sealer(db, KEY, clock=lambda: T0)
    assert sealer.seal_request(tenant_id=account.tenant.id, request_id=wanted.request_id) == 1
    assert json.loads(receipts_of(db, wanted.request_id)[0])["sequence"] == 1
    assert num_due(db, at_most=10) == 5
    assert sealer.seal_some() == 5
    check_chains(db)


def test_a_sealer_outlives_an_outage(db, account, new_meter, outage):
    meter = new_meter()
    sealer = Sealer(db, KEY, clock=lambda: T0)
    post(meter, account, 1)
    with outage(), pytest.raises(DatabaseUnavailable):
        sealer.seal_some()
    assert sealer.seal_some() == 1
    check_chains(db)


def test_sealing_gives_way_to_posting_but_not_for_ever(db, account, new_meter, monkeypatch):
    monkeypatch.setattr("billing.sealer.LOOK_INTERVAL", timedelta(milliseconds=1))
    post(new_meter(), account, 1)
    asked, has_given_way = [], threading.Event()

    def num_unposted():
        asked.append(num_due(db, at_most=1))
        if len(asked) == PATIENT_LOOKS + 2:
            has_given_way.set()
        return BUSY_EVENTS

    sealer = Sealer(db, KEY, num_unposted=num_unposted, clock=lambda: T0)
    sealer.start()
    assert has_given_way.wait(30)
    sealer.close()
    assert asked[: PATIENT_LOOKS + 2] == [1] * (PATIENT_LOOKS + 1) + [0]


@pytest.mark.parametrize("copied", ["event_id", "sequence"])
def test_an_event_and_a_place_in_a_chain_have_one_receipt(db, account, new_meter, published, copied):
    meter = new_meter()
    post(meter, account, 1)
    seal_next(db, KEY, now=T0)
    post(meter, account, 1)
    [first], [due] = rows(db, schema.receipts), rows(db, schema.receipt_dues)
    sound = first._asdict() | {"event_id": due.event_id, "sequence": 2}
    forged = sound | {copied: first._asdict()[copied]}
    with pytest.raises(IntegrityError), db.write() as connection:
        connection.execute(insert(schema.receipts).values(forged))
    assert rows(db, schema.receipts) == [first]
    with db.write() as connection:  # the control: the row without the copy is taken
        connection.execute(insert(schema.receipts).values(sound))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=8))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_posted_and_sealed_in_any_order_every_chain_is_sound(tenants, new_meter, db, steps):
    meter = new_meter()
    for number, whose, is_sealed in steps:
        post(meter, tenants[whose], number)
        if is_sealed:
            seal_next(db, KEY, now=T0)
    meter.close()
    check_chains(db)
