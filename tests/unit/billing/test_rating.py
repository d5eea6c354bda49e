"""From counts to lines. Amounts are those of public bug reports; prices are picodollars per token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import AmountTooLarge, UnpricedModel
from billing.ledger import payload_digest
from billing.money import MAX_STORED, format_dollars
from billing.rating import rate
from billing.usage import MAX_TOKENS, TokenClass, TokenCounts
from tests.unit.billing.builders import admission, final, model_price

SONNET = model_price(
    input=3_000_000,
    read=300_000,
    write_auto=3_000_000,
    write_5m=3_750_000,
    write_1h=6_000_000,
    output=15_000_000,
)

counts_of_any_request = st.builds(
    TokenCounts,
    uncached=st.integers(0, 10**7),
    read=st.integers(0, 10**7),
    write_auto=st.integers(0, 10**7),
    write_5m=st.integers(0, 10**7),
    write_1h=st.integers(0, 10**7),
    output=st.integers(0, 10**7),
)
units_of_any_book = st.fixed_dictionaries({name.value: st.integers(0, 10**9) for name in TokenClass})


def amount(counts: TokenCounts) -> int:
    return sum(line.amount_pusd for line in rate(counts, SONNET))


@pytest.mark.parametrize(
    ("counts", "dollars"),
    [
        (TokenCounts(uncached=100, read=10_000), "0.0033"),
        (TokenCounts(uncached=3, write_5m=12_304, output=550), "0.054399"),
        (TokenCounts(uncached=10, write_5m=4_000, write_1h=6_000), "0.05103"),
        (TokenCounts(uncached=5_005, read=257_955), "0.0924015"),
        (TokenCounts(uncached=9, read=17_102), "0.0051576"),
        (TokenCounts(uncached=18, output=26), "0.000444"),
        (TokenCounts(), "0.00"),
    ],
)
def test_amounts_are_those_of_the_published_prices(counts, dollars):
    assert format_dollars(amount(counts)) == dollars


def test_the_write_vector_is_exact_to_the_picodollar():
    assert amount(TokenCounts(uncached=3, write_5m=12_304, output=550)) == 54_399_000_000


def test_a_request_made_of_reads_never_costs_less_than_nothing():
    assert amount(TokenCounts(uncached=1, write_5m=225, read=965_602, output=82)) > 0


@pytest.mark.parametrize(
    ("counts", "prompt", "read"),
    [
        (TokenCounts(uncached=9, read=5, write_5m=2), 16, 5),
        # With its 5 output tokens, 9,038 in all.
        (TokenCounts(uncached=4_522, write_5m=4_511, output=5), 9_033, 0),
        (TokenCounts(uncached=50, read=2_400, write_5m=120), 2_570, 2_400),
        (TokenCounts(uncached=5_005, read=257_955), 262_960, 257_955),
    ],
)
def test_the_prompt_is_the_sum_of_its_disjoint_classes(counts, prompt, read):
    assert (counts.prompt, counts.read) == (prompt, read)


@given(counts_of_any_request, units_of_any_book)
def test_lines_conserve_tokens_and_money(counts, units):
    lines = rate(counts, model_price(**units))
    assert sum(line.quantity for line in lines) == counts.prompt + counts.output
    assert sum(line.amount_pusd for line in lines) == sum(
        quantity * units[token_class] for token_class, quantity in counts.by_class()
    )
    assert sum(line.amount_without_cache_pusd for line in lines) == (
        counts.prompt * units["input"] + counts.output * units["output"]
    )
    assert len({line.token_class for line in lines}) == len(lines)


@given(counts_of_any_request, units_of_any_book)
def test_rating_again_gives_the_same_lines(counts, units):
    price = model_price(**units)
    assert rate(counts, price) == rate(counts, price)


def test_a_class_with_tokens_and_no_price_is_refused_not_free():
    with pytest.raises(UnpricedModel, match="write_1h"):
        rate(TokenCounts(write_1h=1), model_price(input=1, output=1))


def test_a_class_without_tokens_needs_no_price():
    assert len(rate(TokenCounts(uncached=1), model_price(input=1))) == 1


def test_the_largest_line_that_fits_is_rated_and_the_next_is_refused():
    unit = MAX_STORED // MAX_TOKENS
    assert rate(TokenCounts(uncached=MAX_TOKENS), model_price(input=unit))
    with pytest.raises(AmountTooLarge):
        rate(TokenCounts(uncached=MAX_TOKENS), model_price(input=unit + 1))


def test_a_discount_that_does_not_fit_without_the_cache_is_refused_too():
    with pytest.raises(AmountTooLarge):
        rate(TokenCounts(read=MAX_TOKENS), model_price(input=MAX_STORED // MAX_TOKENS + 1, read=0))


def test_the_digest_tells_events_apart_and_equal_ones_not():
    admitted = admission()
    assert payload_digest(final(admitted, read=1)) == payload_digest(final(admitted, read=1))
    assert payload_digest(final(admitted, read=1)) != payload_digest(final(admitted, read=2))
    assert payload_digest(final(admitted, read=1)) != payload_digest(final(admitted, uncached=1))
