"""A statement as text and as a page: every figure billing's own, nothing to run, nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import re

import msgspec
import pytest

from billing.ids import ApiKeyId, TenantId, new_id
from billing.instants import Microseconds
from billing.statements import LineKind, Reconciliation, Statement, StatementLine, Status
from billing.usage import TokenClass
from gateway.statements import CLASS_LABELS, as_text
from gateway.web.statements import as_html, statement_page

DIGEST = bytes(range(32))
EVIL = "<script>alert(1)</script>"


def line(token_class: TokenClass, quantity: int, unit_pusd: int, **changes) -> StatementLine:
    fields = {
        "kind": LineKind.USAGE,
        "for_period": "2026-11",
        "project_id": None,
        "project": None,
        "api_key_id": ApiKeyId(new_id()),
        "api_key": "first (hs-abcdefgh…)",
        "model": "test-model",
        "token_class": token_class,
        "quantity": quantity,
        "list_amount_pusd": quantity * unit_pusd * 10 // 9,
        "amount_pusd": quantity * unit_pusd,
        "amount_without_cache_pusd": quantity * 3_000_000,
    }
    return StatementLine(**(fields | changes))


STATEMENT = Statement(
    number="HS-2026-11-0123ABCD",
    status=Status.FINAL,
    tenant_id=TenantId(new_id()),
    tenant="Acme & Söhne",
    period="2026-11",
    time_zone="Asia/Kolkata",
    start=Microseconds(1_793_471_400_000_000),
    end=Microseconds(1_796_063_400_000_000),
    issued_at=Microseconds(1_796_100_000_000_000),
    currency="USD",
    requests=1_234,
    lines=[
        line(TokenClass.INPUT, 9_000_000, 3_000_000),
        line(TokenClass.READ, 81_000_000, 300_000, project="search"),
        line(TokenClass.OUTPUT, 1_111_111, 15_000_000, amount_without_cache_pusd=1_111_111 * 15_000_000),
        line(TokenClass.INPUT, -500, 3_000_000, kind=LineKind.ADJUSTMENT, for_period="2026-10"),
        line(TokenClass.WRITE_5M, -9_000, 3_750_000, kind=LineKind.CREDIT, for_period="2026-10"),
    ],
    residual_brought_pusd=4_000_000_000,
    reconciliation=Reconciliation(
        events_tokens=91_101_611,
        ledger_tokens=91_101_611,
        rollup_tokens=91_101_611,
        ledger_pusd=67_931_415_000_000,
        rollup_pusd=67_931_415_000_000,
    ),
)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", " ", text, flags=re.S)))


def test_text_and_page_say_the_same_figures():
    text, page = words(as_text(STATEMENT, DIGEST)), words(as_html(STATEMENT, DIGEST))
    for figure in (
        "HS-2026-11-0123ABCD",
        "1 November to 30 November 2026, Asia/Kolkata",
        "9,000,000",
        "27.00",
        "-0.0015",
        "Adjustments from earlier periods",
        "Credits",
        "81,000,000 (90.00 %)",
        "218.70",
        "67.93",
        "0.004",
        "2026-10",
        DIGEST.hex(),
        "events = ledger = roll-ups: 91,101,611 tokens, 67.931415 USD",
    ):
        assert figure in text, figure
        assert figure in page, figure
    assert "Acme & Söhne" in text
    assert "Acme &amp; Söhne" in page


def test_the_columns_of_the_text_line_up():
    rows = [row for row in as_text(STATEMENT, DIGEST).splitlines() if "test-model" in row or "exact  " in row]
    widths = {len(row) for row in rows[:4]}
    assert len(widths) == 1


def test_rounded_lines_and_the_rounding_add_up_to_what_is_due():
    text = as_text(STATEMENT, DIGEST)
    [rounding] = re.findall(r"Rounding of lines +(-?[\d.]+)", text)
    [due] = re.findall(r"Due, USD +([\d.]+)", text)
    assert sum(one.cents for one in STATEMENT.lines) + round(float(rounding) * 100) == STATEMENT.due_cents
    assert due == "67.94"


def test_a_preview_says_so_first():
    preview = msgspec.structs.replace(STATEMENT, status=Status.PREVIEW)
    assert as_text(preview, None).splitlines()[0].startswith("PREVIEW")
    for shown in (as_text(preview, None), as_html(preview, None)):
        assert "PREVIEW: this period is still open" in shown
        assert "SHA-256" not in shown


def test_books_that_disagree_are_shown_to():
    torn = msgspec.structs.replace(STATEMENT.reconciliation, rollup_pusd=5)
    statement = msgspec.structs.replace(STATEMENT, reconciliation=torn)
    for shown in (as_text(statement, DIGEST), words(as_html(statement, DIGEST))):
        assert re.search("books disagree", shown, re.IGNORECASE)
        assert "0.000000000005" in shown
    assert 'class="badge disagree"' in as_html(statement, DIGEST)


def test_names_are_text_and_nothing_else():
    evil = msgspec.structs.replace(
        STATEMENT, tenant=EVIL, lines=[line(TokenClass.INPUT, 1, 1, project=EVIL, model=EVIL, api_key=EVIL)]
    )
    page = as_html(evil, DIGEST)
    assert page.count("&lt;script&gt;") == 4
    assert "<script" not in page


def test_the_page_asks_for_nothing():
    page = as_html(STATEMENT, DIGEST)
    assert re.findall(r"src=|href=[^>]*|url\(|@import|https?:", page) == ['href="data:,"']
    assert "@media print" in page


def test_the_policy_of_the_page_allows_its_own_style_and_no_other():
    answer = statement_page(STATEMENT, DIGEST)
    [style] = re.findall(r"<style>(.*?)</style>", answer.body.decode(), re.DOTALL)
    named = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["content-security-policy"]
    assert f"style-src 'self' 'sha256-{named}';" in policy
    assert "unsafe-inline" not in policy
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("token_class", list(TokenClass))
def test_every_token_class_has_a_label(token_class):
    assert CLASS_LABELS[token_class]
