"""What one tenant pays: prices of its own, discounts, and what another book would have made of it."""

import pytest

from billing import schema
from billing.errors import BackdatedPrice, InvalidDiscount, UnknownTenant
from billing.ids import TenantId, new_id
from billing.price_sheet import parse_price_sheet
from billing.prices import price_in_force, publish, set_discount
from billing.reports import usage_report
from billing.usage import TokenClass
from billing.what_if import what_if
from tests.integration.billing.conftest import new_account
from tests.integration.billing.ledger_checks import check_ledger, rows
from tests.unit.billing.builders import MODEL, T0, final

LIST_INPUT, LIST_OUTPUT = 3_000_000, 15_000_000


def own_book(*, input_unit: int, output_unit: int, tenant: str | None = "acme", model: str = MODEL):
    ratios = "{read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}"
    owner = f"tenant: {tenant}\n" if tenant else ""
    return parse_price_sheet(
        f"book: own\n{owner}currency: USD\ncache_basis_points: {ratios}\n"
        f"models:\n  {model}: {{input: {input_unit}, output: {output_unit}}}\n"
    )


def settle(db, new_meter, *events):
    meter = new_meter()
    for event in events:
        meter.settle(event)
    meter.flush()
    check_ledger(db)


def amount(db, account):
    return usage_report(db, tenant_id=account.tenant.id, start=T0, end=T0 + 10**9).totals.amount_pusd


def test_a_tenants_own_price_goes_before_the_list_and_others_pay_the_list(db, account, new_meter):
    other = new_account(db, "other")
    publish(db, own_book(input_unit=1_000_000, output_unit=2_000_000), clock=lambda: T0)
    settle(
        db,
        new_meter,
        final(account.admission(), uncached=10, read=10, output=10),
        final(other.admission(), uncached=10),
    )
    assert amount(db, account) == 10 * 1_000_000 + 10 * 100_000 + 10 * 2_000_000
    assert amount(db, other) == 10 * LIST_INPUT


def test_a_discount_applies_from_its_first_instant_to_the_tenants_every_unit(db, account, new_meter):
    set_discount(db, tenant_id=account.tenant.id, basis_points=1_250, clock=lambda: T0, effective_from=T0 + 5)
    before, after = account.admission(admitted_at=T0 + 4), account.admission(admitted_at=T0 + 5)
    settle(db, new_meter, final(before, uncached=8), final(after, uncached=8))
    assert amount(db, account) == 8 * LIST_INPUT + 8 * LIST_INPUT * 7 // 8
    shown = {(line.list_unit_pusd, line.discount_basis_points, line.unit_pusd) for line in lines(db)}
    assert shown == {(LIST_INPUT, 0, LIST_INPUT), (LIST_INPUT, 1_250, LIST_INPUT * 7 // 8)}


def lines(db):
    return rows(db, schema.ledger_lines)


@pytest.mark.parametrize(
    ("unit", "basis_points", "paid"), [(7, 3_333, 4), (1, 1, 0), (5, 10_000, 0), (9, 0, 9)]
)
def test_a_discounted_unit_is_rounded_down_and_the_amount_stays_exact(
    db, account, new_meter, unit, basis_points, paid
):
    publish(db, own_book(input_unit=unit * 10_000, output_unit=unit, model="odd"), clock=lambda: T0)
    set_discount(db, tenant_id=account.tenant.id, basis_points=basis_points, clock=lambda: T0)
    settle(db, new_meter, final(account.admission(model="odd"), output=1_000))
    assert amount(db, account) == 1_000 * paid
    (line,) = lines(db)
    assert (line.list_unit_pusd, line.unit_pusd) == (unit, paid)


def test_an_own_price_and_a_discount_apply_together(db, account, new_meter):
    publish(db, own_book(input_unit=1_000_000, output_unit=2_000_000), clock=lambda: T0)
    set_discount(db, tenant_id=account.tenant.id, basis_points=5_000, clock=lambda: T0)
    settle(db, new_meter, final(account.admission(), output=3))
    assert amount(db, account) == 3 * 1_000_000
    totals = usage_report(db, tenant_id=account.tenant.id, start=T0, end=T0 + 10**9).totals
    assert totals.list_amount_pusd == 3 * 2_000_000


def test_discounts_are_never_backdated_and_come_in_order(db, account):
    def give(at, now=T0, basis_points=1):
        return set_discount(
            db, tenant_id=account.tenant.id, basis_points=basis_points, clock=lambda: now, effective_from=at
        )

    give(T0 + 10)
    for at in (T0 - 1, T0 + 10, T0 + 9):
        with pytest.raises(BackdatedPrice):
            give(at)
    for share in (-1, 10_001):
        with pytest.raises(InvalidDiscount):
            give(T0 + 20, basis_points=share)
    with pytest.raises(UnknownTenant):
        set_discount(db, tenant_id=TenantId(new_id()), basis_points=1, clock=lambda: T0)
    with pytest.raises(UnknownTenant, match="nobody"):
        publish(db, own_book(input_unit=10_000, output_unit=1, tenant="nobody"), clock=lambda: T0)


def test_reads_from_a_tier_without_a_price_cost_what_reads_cost(db, account, new_meter):
    settle(db, new_meter, final(account.admission(), uncached=1, read=2, read_host=3, read_disk=4))
    assert amount(db, account) == LIST_INPUT + 9 * LIST_INPUT // 10
    price = price_in_force(db, model=MODEL, at=T0)
    assert price.version(TokenClass.READ_REMOTE) == price.version(TokenClass.READ)


def test_what_if_re_rates_exactly_and_leaves_alone_what_a_book_does_not_concern(db, account, new_meter):
    other = new_account(db, "other")
    publish(db, own_book(input_unit=1_000_000, output_unit=2_000_000, tenant="other"), clock=lambda: T0)
    set_discount(db, tenant_id=account.tenant.id, basis_points=1_000, clock=lambda: T0)
    settle(
        db,
        new_meter,
        final(account.admission(), uncached=100, read=1_000, output=10),
        final(other.admission(), uncached=100),
        final(account.admission(admitted_at=T0 + 10**6), uncached=7),
    )
    book = own_book(input_unit=4_000_000, output_unit=LIST_OUTPUT, tenant=None)
    found = {(one.tenant, one.token_class): one for one in what_if(db, book, start=T0, end=T0 + 10**6)}
    acme = found["acme", TokenClass.INPUT]
    assert (acme.quantity, acme.before_pusd, acme.after_pusd) == (100, 270_000_000, 360_000_000)
    assert found["acme", TokenClass.READ].difference_pusd == 1_000 * 90_000
    assert found["acme", TokenClass.OUTPUT].difference_pusd == 0
    assert found["other", TokenClass.INPUT].difference_pusd == 0
    own = own_book(input_unit=500_000, output_unit=1, tenant="other")
    assert [
        one.after_pusd for one in what_if(db, own, start=T0, end=T0 + 10**6) if one.tenant == "other"
    ] == [100 * 500_000]


def test_what_if_of_the_book_in_force_changes_nothing(db, account, new_meter):
    settle(db, new_meter, final(account.admission(), uncached=5, read=6, write_5m=7, write_1h=8, output=9))
    book = own_book(input_unit=LIST_INPUT, output_unit=LIST_OUTPUT, tenant=None)
    rerated = what_if(db, book, start=T0, end=T0 + 1)
    assert len(rerated) == 5
    assert all(one.difference_pusd == 0 for one in rerated)
