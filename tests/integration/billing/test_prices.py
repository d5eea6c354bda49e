import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError

from billing import schema
from billing.errors import BackdatedPrice, UnpricedModel
from billing.ids import new_id
from billing.price_sheet import default_price_sheet, parse_price_sheet
from billing.prices import ensure_published, price_history, price_in_force, publish
from billing.usage import TokenClass
from tests.integration.billing.ledger_checks import count
from tests.unit.billing.builders import T0


def book(**inputs):
    """A book with an input price for each model; `any` is the entry for every other model."""
    models = "".join(
        f'  "{"*" if model == "any" else model}": {{input: {unit}, output: {5 * unit}}}\n'
        for model, unit in inputs.items()
    )
    ratios = "{read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}"
    return parse_price_sheet(f"book: test\ncurrency: USD\ncache_basis_points: {ratios}\nmodels:\n{models}")


def input_unit(db, model, at):
    return price_in_force(db, model=model, at=at).versions[TokenClass.INPUT].unit_pusd


def publish_at(db, sheet, now, effective_from=None):
    return publish(db, sheet, clock=lambda: now, effective_from=effective_from)


def test_a_new_price_applies_from_its_first_instant(db):
    publish_at(db, book(m=80), T0)
    publish_at(db, book(m=160), T0 + 1, effective_from=T0 + 100)
    assert input_unit(db, "m", T0 + 99) == 80
    assert input_unit(db, "m", T0 + 100) == 160
    with pytest.raises(UnpricedModel):
        price_in_force(db, model="m", at=T0 - 1)


def test_a_new_price_leaves_the_old_version_as_it_was(db):
    publish_at(db, book(m=80), T0)
    before = price_history(db)
    publish_at(db, book(m=160), T0 + 1)
    assert [version for version in price_history(db) if version in before] == before


def test_a_price_in_the_past_or_before_a_later_one_is_refused_and_nothing_is_published(db):
    publish_at(db, book(m=80), T0)
    publish_at(db, book(m=160), T0 + 1, effective_from=T0 + 100)
    versions = count(db, schema.price_versions)
    with pytest.raises(BackdatedPrice):
        publish_at(db, book(m=240), T0 + 10, effective_from=T0 + 9)
    for sheet in (book(m=240), book(m=160), book(fresh=80, m=240)):
        with pytest.raises(BackdatedPrice):
            publish_at(db, sheet, T0 + 10, effective_from=T0 + 50)
    assert count(db, schema.price_versions) == versions


def test_versions_out_of_order_are_refused_by_the_database_itself(db):
    publish_at(db, book(m=80), T0)
    values = {
        "id": new_id(),
        "book": "by hand",
        "currency": "USD",
        "model": "m",
        "token_class": "input",
        "unit_pusd": 1,
        "created_at_us": T0,
    }
    for instant in (T0 - 1, T0):
        with pytest.raises(IntegrityError), db.write() as connection:
            connection.execute(insert(schema.price_versions).values(values | {"effective_from_us": instant}))
    with db.write() as connection:
        connection.execute(insert(schema.price_versions).values(values | {"effective_from_us": T0 + 1}))


def test_the_same_book_again_adds_nothing_and_a_changed_one_adds_what_changed(db):
    assert publish_at(db, book(m=80, n=80), T0) == 12
    assert publish_at(db, book(m=80, n=80), T0 + 1) == 0
    assert publish_at(db, book(m=80, n=160), T0 + 2) == 6


def test_an_unknown_model_is_refused_unless_the_book_has_an_entry_for_any(db):
    publish_at(db, book(m=80), T0)
    with pytest.raises(UnpricedModel, match="unknown"):
        price_in_force(db, model="unknown", at=T0)
    publish_at(db, book(any=800), T0 + 1)
    assert input_unit(db, "unknown", T0 + 1) == 800
    assert input_unit(db, "m", T0 + 1) == 80


def test_the_first_book_is_in_force_from_the_beginning_and_is_published_once(db):
    assert ensure_published(db, default_price_sheet(), clock=lambda: T0) == 7
    assert ensure_published(db, book(m=80), clock=lambda: T0) == 0
    assert input_unit(db, "any-model-at-all", 0) == 150_000
