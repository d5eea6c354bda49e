from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.errors import InvalidAmount
from billing.money import PICODOLLARS_PER_DOLLAR, format_basis_points, format_dollars, parse_dollars


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0.00"),
        (1, "0.000000000001"),
        (-1, "-0.000000000001"),
        (54_399_000_000, "0.054399"),
        (3_300_000_000, "0.0033"),
        (10**12, "1.00"),
        (-1_500_000_000_000, "-1.50"),
        (2**63, "9223372.036854775808"),
    ],
)
def test_picodollars_are_written_exactly(amount, text):
    assert format_dollars(amount) == text


@given(st.integers())
def test_a_written_amount_reads_back_as_the_same_amount(amount):
    assert Fraction(format_dollars(amount)) * PICODOLLARS_PER_DOLLAR == amount


def test_a_million_additions_of_a_small_price_are_exact():
    # 2.1e-6 dollars, a million times: floats say 2.0999999999571277.
    assert format_dollars(sum(2_100_000 for _ in range(1_000_000))) == "2.10"


@pytest.mark.parametrize(
    ("basis_points", "text"), [(0, "0.00"), (9735, "97.35"), (10_000, "100.00"), (5, "0.05")]
)
def test_basis_points_are_written_as_a_percentage(basis_points, text):
    assert format_basis_points(basis_points) == text


@given(st.integers(0, 2**63))
def test_what_was_written_down_is_read_back(amount):
    assert parse_dollars(format_dollars(amount)) == amount


@pytest.mark.parametrize("text", ["", "-1", "1e3", "1.", ".5", "1,50", "nan", "0.0000000000001", "１"])
def test_what_is_no_exact_amount_is_refused(text):
    with pytest.raises(InvalidAmount):
        parse_dollars(text)
