"""Prompts with the answers of others: the heaviest micro-batch of an evaluation is the one that it reads."""

from types import SimpleNamespace

import numpy as np
import pytest

from memtrain.memory.plan.heaviest_batch import MixedRows
from memtrain.trainers.data.packing.mixed_answers import MixedAnswers


def mixed_of(prompt: list[int], answer: list[int], *sets: int, items: list[int] | None = None):
    """Evaluation sets of so many sequences each, of one item unless said otherwise."""
    prompts, answers = np.array(prompt), np.array(answer)[:, None]
    item_ptr = np.cumsum([0, *(items or [1] * len(prompt))])
    sequences = SimpleNamespace(
        row=np.arange(len(prompt)),
        prompt=prompts,
        answer=answers,
        loss_tokens=answers - 1,
        item_ptr=item_ptr,
        tokens=np.add.reduceat(prompts + answers[:, 0], item_ptr[:-1]),
        weights=np.diff(item_ptr),
    )
    numbers = np.arange(len(prompt))
    return MixedAnswers(sequences, np.cumsum([0, *sets]), numbers)  # type: ignore[arg-type]


def settings_of(rows: int, tokens: int | None = None, *, padding_free: bool = True, replicas: int = 1):
    said = {"micro_batch_size": rows, "micro_tokens": tokens}
    return SimpleNamespace(**said, padding_free=padding_free, num_replicas=replicas)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Rows of 11, 10, 8 and 7 tokens; each prompt with the answer before it, the first with the last:
        # 1 + 5, 9 + 10, 6 + 1, 2 + 2.
        (settings_of(2), MixedRows(2, 25, 19, 4 + 9)),
        (settings_of(2, padding_free=False), MixedRows(2, 25, 19, 4 + 9)),
        (settings_of(4), MixedRows(4, 36, 19, 4 + 9 + 0 + 1)),
        # In 18 tokens the first row stands alone, and the second with the third.
        (settings_of(4, 18), MixedRows(2, 26, 19, 9 + 0)),
        (settings_of(4, replicas=4), MixedRows(1, 19, 19, 9)),
    ],
)
def test_the_heaviest_micro_batch_has_the_answers_that_an_evaluation_reads(settings, expected):
    mixed = mixed_of([1, 9, 2, 6], [10, 1, 5, 2], 4)
    assert mixed.heaviest(settings) == expected


def test_sets_are_read_apart():
    """The first row of a set takes the answer of the last of its own set: 1 + 3, 1 + 5 and 1 + 70, 1 + 90."""
    mixed = mixed_of([1, 1, 1, 1], [5, 3, 90, 70], 2, 2)
    assert mixed.heaviest(settings_of(1)) == MixedRows(1, 91, 91, 89)
    assert mixed.heaviest(settings_of(4)) == MixedRows(2, 162, 91, 158)


def test_rows_of_a_prompt_that_share_a_sequence_are_read_one_by_one():
    """Two sequences of two items: partners are two places before, in the other sequence."""
    mixed = mixed_of([4, 4, 3, 3], [1, 2, 9, 8], 2, items=[2, 2])
    assert mixed.heaviest(settings_of(1)) == MixedRows(2, 4 + 9 + 4 + 8, 13, 15)
