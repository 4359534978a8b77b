"""Words of a plan: every row and token that is lost is counted, in a sentence that is read once."""

import pytest

from memtrain.cli.plan.tables import rows_words
from memtrain.memory.plan.length_profile import LengthReport

NOTHING_LOST = LengthReport(
    num_rows=300,
    num_tokens=9_000,
    num_loss_tokens=4_000,
    rows_cut=0,
    rows_dropped=0,
    rows_split=0,
    pieces=300,
    tokens_cut=0,
    tokens_dropped=0,
    tokens_idle=0,
    loss_tokens_cut=0,
    loss_tokens_dropped=0,
    num_sequences=300,
    fill=1.0,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "300 rows, 9,000 tokens, 4,000 loss tokens; no row was truncated or dropped."),
        (
            {"rows_cut": 1, "tokens_cut": 50, "loss_tokens_cut": 40},
            "300 rows, 9,000 tokens, 4,000 loss tokens; 1 row was truncated (50 tokens, 40 loss tokens).",
        ),
        (
            {"rows_cut": 2, "tokens_cut": 50, "loss_tokens_cut": 9, "loss_tokens_cut_by_answer": (4, 5)},
            "300 rows, 9,000 tokens, 4,000 loss tokens; 2 rows were truncated (50 tokens, 9 loss tokens: "
            "4 of "
            "chosen, 5 of rejected answers).",
        ),
        (
            {"rows_cut": 1, "tokens_cut": 50, "loss_tokens_cut": 0, "loss_tokens_cut_by_answer": (0, 0)},
            "300 rows, 9,000 tokens, 4,000 loss tokens; 1 row was truncated (50 tokens, 0 loss tokens).",
        ),
        (
            {"rows_split": 4, "pieces": 310, "tokens_idle": 700, "num_sequences": 90, "fill": 0.998},
            "300 rows, 9,000 tokens, 4,000 loss tokens; 4 rows were split into pieces; pieces without a "
            "loss token "
            "are left out (700 tokens); 310 pieces in 90 sequences, 99.80% full; no loss token is lost.",
        ),
        (
            {
                "num_loss_tokens": 0,
                "rows_dropped": 3,
                "tokens_dropped": 80,
                "pieces": 297,
                "num_sequences": 297,
            },
            "300 rows, 9,000 tokens; 3 rows were dropped (80 tokens).",
        ),
    ],
)
def test_lost_rows_and_tokens_are_counted_in_one_sentence(changes: dict, words: str):
    assert rows_words(NOTHING_LOST.model_copy(update=changes)) == words
