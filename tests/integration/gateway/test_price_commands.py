"""`headstart prices` and `headstart tenants set-discount`, on a ledger with usage."""

import json

import pytest

from billing.errors import BackdatedPrice, InvalidDiscount, InvalidPeriod, InvalidPriceBook, UnknownTenant
from tests.integration.gateway.test_limit_commands import key, run

__all__ = ["key"]

BOOK = """
book: dearer
currency: USD
cache_basis_points: {read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}
models:
  "*": {input: 300000, output: 600000}
"""


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.yaml"
    path.write_text(BOOK)
    return path


def test_a_book_is_compared_tried_on_the_past_and_loaded(key, book):
    changed = run("prices", "diff", book)
    assert "input" in changed
    assert "0.15" in changed
    assert "output" not in changed
    tried = json.loads(run("prices", "what-if", book, "--start", "2020-01-01", "--json"))
    assert [line["difference_pusd"] for line in tried["lines"]] == [1_000_000 * 150_000]
    assert "0.30" in run("prices", "what-if", book, "--start", "2020-01-01")
    assert run("prices", "load", book).startswith("5 prices of dearer")
    assert "input" not in run("prices", "diff", book)
    assert "0.30" in run("prices", "show")
    assert "0.15" in run("prices", "show", "--at", "2020-01-01")


def test_a_tenant_gets_prices_of_its_own_and_a_discount(key, book):
    book.write_text("tenant: acme" + BOOK)
    run("prices", "load", book)
    own, listed = run("prices", "show", "--tenant", "acme"), run("prices", "show")
    assert "0.375" in own  # five minutes' writes at 1.25 times the input
    assert "0.375" not in listed
    assert "12.50 %" in run("tenants", "set-discount", "--tenant", "acme", "--basis-points", 1250)


def test_what_cannot_be_is_refused(key, book):
    with pytest.raises(InvalidPriceBook):
        run("prices", "load", book.with_name("missing.yaml"))
    with pytest.raises(BackdatedPrice):
        run("prices", "load", book, "--effective-from", "2020-01-01")
    with pytest.raises(InvalidPeriod):
        run("prices", "what-if", book, "--start", "2026-01-02", "--end", "2026-01-01")
    with pytest.raises(UnknownTenant):
        run("prices", "show", "--tenant", "nobody")
    with pytest.raises(InvalidDiscount):
        run("tenants", "set-discount", "--tenant", "acme", "--basis-points", 10_001)
