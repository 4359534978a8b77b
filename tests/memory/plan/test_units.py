"""Sizes read and shown as people write them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import RecipeError
from memtrain.memory.plan.units import GIB, MIB, count_of, gib, read_size, round_up, signed


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (2048, "2.00 KiB"),
        (5 * MIB + MIB // 2, "5.50 MiB"),
        (640 * MIB, "640 MiB"),
        (1023.9 * MIB, "1.00 GiB"),
        (5.02 * GIB, "5.02 GiB"),
        (141.3 * GIB, "141.3 GiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_a_size_is_shown_with_about_three_digits(num_bytes, shown):
    assert gib(num_bytes) == shown


@pytest.mark.parametrize(
    ("share", "decimals", "shown"),
    [
        (0.053, 1, "+5.3%"),
        (-0.003, 1, "-0.3%"),
        (-0.0001, 1, "0.0%"),
        (0.0001, 1, "0.0%"),
        (0.001, 0, "0%"),
        (1.0, 0, "+100%"),
    ],
)
def test_a_difference_that_rounds_to_zero_has_no_sign(share, decimals, shown):
    assert signed(share, decimals) == shown


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("24GiB", 24 * GIB), ("24", 24 * GIB), ("0.5", GIB // 2), ("80GB", 80 * 10**9)]
)
def test_a_size_is_read_and_a_bare_number_is_gib(text, num_bytes):
    assert read_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "24 parsecs", "0GiB", "-3GiB"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(RecipeError, match="24GiB"):
        read_size(text, "budget")


@settings(max_examples=50)
@given(st.integers(1, 10**13))
def test_a_shown_size_reads_back_within_its_digits(num_bytes):
    assert read_size(gib(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


def test_rounding_up_keeps_multiples():
    assert [round_up(n, 512) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_a_count_of_one_is_singular():
    assert [count_of(count, "row") for count in (0, 1, 2, 2000)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "2,000 rows",
    ]
