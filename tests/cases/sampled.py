"""Long lists of cases: some of them in the fast tests, all of them in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Cases for `parametrize`: the first, and each `every`-th after it, is fast; the others are slow.

    With `every` prime to the number of values of the last axis of a product, each of its values stays.
    """
    return [
        case if number % every == 0 else pytest.param(*values_of(case), marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def values_of(case: Any) -> tuple[Any, ...]:
    """The values of a case: those of a tuple, or the case itself."""
    return case if isinstance(case, tuple) else (case,)
