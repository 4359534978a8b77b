"""Lengths of rows as a limit bounds them."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from memtrain.trainers.batches.split_rows import bounded_lengths


@pytest.mark.parametrize(
    ("parts", "lengths"),
    [
        ([[3, 5, 9], [4, 2, 1]], [12, 6]),  # a prompt with two answers: the longer one counts
        ([[3, 5], [4, 2]], [8, 6]),
        ([[7], [2]], [7, 2]),
    ],
)
def test_max_length_bounds_a_prompt_with_its_longest_answer(parts: list[list[int]], lengths: list[int]):
    store = cast(Any, SimpleNamespace(part_lengths=np.array(parts)))
    assert bounded_lengths(store).tolist() == lengths
