"""Layouts of several epochs as one: every epoch's sequences are those of its own layout."""

import numpy as np
import pytest

from memtrain.recipes.sections.length import RowLimits
from memtrain.trainers.data.packing.epochs import laid_epochs, of_epoch
from memtrain.trainers.data.packing.token_rows import Spans, lay_out

LENGTHS = np.array([5, 3, 7, 2, 6, 4, 8, 5])
SPANS = Spans(np.arange(9), np.zeros(8, np.int64), LENGTHS)


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_every_epoch_is_packed_by_itself(packing: str):
    limits = RowLimits(8, "keep_start", None, None, False, packing, False)  # type: ignore[arg-type]
    epochs = [np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7]), np.array([1, 3, 5, 7])]
    alone = [lay_out(LENGTHS, SPANS, rows, limits) for rows in epochs]
    whole, bounds = laid_epochs(
        lambda rows: lay_out(LENGTHS, SPANS, rows, limits), epochs[0], epochs[1:], len
    )
    for number, own in enumerate(alone):
        first, end = of_epoch(bounds, number)
        assert whole.tokens[first:end].tolist() == own.tokens.tolist()
        places = slice(int(whole.bin_ptr[first]), int(whole.bin_ptr[end]))
        assert whole.row[places].tolist() == own.row.tolist()
        assert whole.start[places].tolist() == own.start.tolist()
        assert np.diff(whole.bin_ptr[first : end + 1]).tolist() == np.diff(own.bin_ptr).tolist()
    assert of_epoch(bounds, 3) == of_epoch(bounds, 0)
    assert whole.profile.longest[0] == 8, "the heaviest of any epoch, which the plan must hold"
    assert whole.profile.report.num_rows == 4, "the rows of one epoch"
