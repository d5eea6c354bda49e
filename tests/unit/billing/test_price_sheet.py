import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InvalidPriceBook
from billing.price_sheet import MAX_UNIT_PUSD, default_price_sheet, load_price_sheet, parse_price_sheet
from billing.usage import TokenClass

BOOK = """
book: test
currency: USD
cache_basis_points: {{read: 1000, write_auto: 10000, write_5m: 12500, write_1h: 20000}}
models:
  m: {entry}
"""


def units(entry: str) -> dict[TokenClass, int]:
    return dict(parse_price_sheet(BOOK.format(entry=entry)).units["m"])


def test_the_default_book_prices_every_class_of_any_model():
    assert default_price_sheet().units == {
        "*": {
            TokenClass.INPUT: 150_000,
            TokenClass.READ: 15_000,
            TokenClass.WRITE_AUTO: 150_000,
            TokenClass.WRITE_5M: 187_500,
            TokenClass.WRITE_1H: 300_000,
            TokenClass.OUTPUT: 600_000,
            TokenClass.PIN: 100_000,
        }
    }


def test_cached_classes_follow_from_the_input_price():
    assert units("{input: 3000000, output: 15000000}") == {
        TokenClass.INPUT: 3_000_000,
        TokenClass.OUTPUT: 15_000_000,
        TokenClass.READ: 300_000,
        TokenClass.WRITE_AUTO: 3_000_000,
        TokenClass.WRITE_5M: 3_750_000,
        TokenClass.WRITE_1H: 6_000_000,
    }


def test_a_price_of_its_own_goes_before_the_ratio():
    assert units("{input: 100, output: 1, read: 7, write_5m: 0, write_1h: 0}")[TokenClass.READ] == 7


@given(st.integers(0, MAX_UNIT_PUSD // 80) | st.integers(0, 10**6))
def test_a_ratio_gives_the_exact_price_or_none(eightieth):
    # 12,500 basis points and 1,000 basis points are whole for multiples of 80.
    assert units(f"{{input: {eightieth * 80}, output: 0}}")[TokenClass.READ] == eightieth * 8


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("{input: 0.15, output: 1}", "models.m.input"),
        ("{input: 1e3, output: 1}", "models.m.input"),
        ("{input: true, output: 1}", "models.m.input"),
        ("{input: '100', output: 1}", "models.m.input"),
        ("{input: -100, output: 1}", "models.m.input"),
        (f"{{input: 100, output: {MAX_UNIT_PUSD + 1}}}", "models.m.output"),
        ("{input: 100}", "output is missing"),
        ("{output: 100}", "input is missing"),
        ("{input: 100, output: 1, write_30m: 3}", "write_30m is not known"),
        ("{input: 100, output: 1, read: 101}", "models.m.read"),
        ("{input: 100, output: 1, write_5m: 99}", "models.m.write_5m"),
        ("{input: 100, output: 1, write_5m: 300, write_1h: 200}", "models.m.write_1h"),
        ("{input: 15, output: 1}", "models.m.read"),
        ("[1, 2]", "models.m"),
        ("null", "models.m"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused_by_name(entry, named):
    with pytest.raises(InvalidPriceBook, match=named):
        units(entry)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "- a list",
        "book: [",
        "book: b\ncurrency: EUR\nmodels: {m: {input: 1, output: 1}}",
        "book: b\ncurrency: USD\nmodels: {}",
        "book: b\ncurrency: USD\nmodels: {m: {input: 10, output: 1}}",  # no ratio, no price for reads
        "book: b\nbook: c\ncurrency: USD\nmodels: {}",
        "book: &b b\ncurrency: *b\nmodels: {}",
        "book: b\ncurrency: USD\nmodels: {'': {input: 1, output: 1}}",
        "book: b\ncurrency: USD\nmodels: {1: {input: 1, output: 1}}",
        "book: b\ncurrency: USD\nmodels: {m: {}}\nsurprise: 1",
        "book: !!python/object/apply:os.getcwd []",
        "book: 2026-13-45",
        "[" * 1200,
        "x" * (4 * 1024 * 1024 + 1),
    ],
)
def test_a_book_that_is_none_is_refused(source):
    with pytest.raises(InvalidPriceBook):
        parse_price_sheet(source)


def test_a_price_given_twice_is_refused_rather_than_overwritten():
    with pytest.raises(InvalidPriceBook, match="twice"):
        units("{input: 100, output: 1, input: 1}")


def test_a_book_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InvalidPriceBook):
        load_price_sheet(tmp_path.joinpath("missing.yaml"))
    binary = tmp_path.joinpath("binary.yaml")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPriceBook):
        load_price_sheet(binary)


def test_a_book_in_a_file_is_the_book_in_its_text(tmp_path):
    path = tmp_path.joinpath("book.yaml")
    path.write_text(BOOK.format(entry="{input: 100, output: 1, write_5m: 125}"))
    assert load_price_sheet(path) == parse_price_sheet(path.read_text())
