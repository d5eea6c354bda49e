"""What a statement says, without any table: lines, cents, residuals, and one canonical form."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from billing import statements
from billing.ids import ApiKeyId, TenantId, new_id
from billing.instants import Microseconds
from billing.money import PICODOLLARS_PER_CENT, format_cents, rounded_cents
from billing.statements import (
    LineKind,
    Reconciliation,
    Statement,
    StatementLine,
    Status,
    statement_number,
)
from billing.usage import TokenClass

amounts = st.integers(-(10**24), 10**24)
AGREED = Reconciliation(events_tokens=1, ledger_tokens=1, rollup_tokens=1, ledger_pusd=2, rollup_pusd=2)


def line(amount_pusd: int, **changes) -> StatementLine:
    fields = {
        "kind": LineKind.USAGE,
        "for_period": "2026-11",
        "project_id": None,
        "project": None,
        "api_key_id": ApiKeyId(new_id()),
        "api_key": "first",
        "model": "test-model",
        "token_class": TokenClass.INPUT,
        "quantity": 7,
        "list_amount_pusd": amount_pusd + 5,
        "amount_pusd": amount_pusd,
        "amount_without_cache_pusd": amount_pusd,
    }
    return StatementLine(**(fields | changes))


def statement(lines, *, brought: int = 0) -> Statement:
    tenant_id = TenantId(new_id())
    return Statement(
        number=statement_number(tenant_id, "2026-11"),
        status=Status.FINAL,
        tenant_id=tenant_id,
        tenant="acme",
        period="2026-11",
        time_zone="UTC",
        start=Microseconds(0),
        end=Microseconds(1),
        issued_at=Microseconds(2),
        currency="USD",
        requests=1,
        lines=lines,
        residual_brought_pusd=brought,
        reconciliation=AGREED,
    )


@given(amounts)
def test_cents_and_residual_are_the_amount(amount):
    cents, residual = rounded_cents(amount)
    assert cents * PICODOLLARS_PER_CENT + residual == amount
    assert cents == round(Fraction(amount, PICODOLLARS_PER_CENT))  # which rounds half to even
    assert abs(residual) * 2 <= PICODOLLARS_PER_CENT


def test_cents_have_two_digits():
    assert [format_cents(cents) for cents in (0, 5, -5, 123_456)] == ["0.00", "0.05", "-0.05", "1234.56"]


@given(st.lists(amounts))
def test_rounded_lines_and_the_rounding_are_what_is_due(amounts):
    one = statement([line(amount) for amount in amounts])
    assert sum(each.cents for each in one.lines) + one.rounding_cents == one.due_cents
    assert (
        sum(each.cents * PICODOLLARS_PER_CENT + each.residual_pusd for each in one.lines) == one.amount_pusd
    )
    assert one.discount_pusd == 5 * len(amounts)


@given(st.lists(st.lists(amounts, max_size=4), min_size=1))
def test_over_all_statements_nothing_is_lost_to_rounding(months):
    brought, due = 0, 0
    for month in months:
        one = statement([line(amount) for amount in month], brought=brought)
        brought = one.residual_kept_pusd
        due += one.due_cents
        assert abs(brought) * 2 <= PICODOLLARS_PER_CENT
    assert due * PICODOLLARS_PER_CENT + brought == sum(map(sum, months))


def test_a_tenth_of_a_cent_a_month_is_a_cent_in_ten_months():
    residuals = list(
        accumulate(
            range(10), lambda kept, _: statement([line(10**9)], brought=kept).residual_kept_pusd, initial=0
        )
    )
    assert residuals[5] == 5 * 10**9
    assert residuals[10] == 0


def test_savings_are_reads_at_the_discount_minus_premiums_on_writes_and_pins():
    one = statement(
        [
            line(300, quantity=100, token_class=TokenClass.INPUT, amount_without_cache_pusd=300),
            line(90, quantity=300, token_class=TokenClass.READ_DISK, amount_without_cache_pusd=900),
            line(125, quantity=100, token_class=TokenClass.WRITE_5M, amount_without_cache_pusd=100),
            line(7, quantity=1, token_class=TokenClass.PIN, amount_without_cache_pusd=0),
            line(-50, quantity=-9, kind=LineKind.CREDIT, token_class=TokenClass.READ),
        ]
    )
    savings = one.savings
    assert (savings.reads_pusd, savings.write_premiums_pusd, savings.pins_pusd) == (810, 25, 7)
    assert savings.net_pusd == 778
    assert savings.cached_basis_points == 6_000
    assert one.amount_of_kind(LineKind.CREDIT) == -50


@given(st.lists(amounts), amounts)
def test_the_document_says_all_and_always_the_same(amounts, brought):
    one = statement([line(amount) for amount in amounts], brought=brought)
    document = statements.encode(one)
    assert statements.decode(document) == one
    assert statements.encode(statements.decode(document)) == document
    assert len(statements.digest(document)) == 32


def test_another_picodollar_is_another_digest():
    one = statement([line(1)])
    other = msgspec.structs.replace(one, residual_brought_pusd=1)
    digests = {statements.digest(statements.encode(each)) for each in (one, other)}
    assert len(digests) == 2


def test_a_reconciliation_agrees_only_if_all_books_do():
    assert AGREED.agrees
    for name in AGREED.__struct_fields__:
        assert not msgspec.structs.replace(AGREED, **{name: 9}).agrees
