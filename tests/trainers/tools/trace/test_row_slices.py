"""Which slices of a row a trace goes through."""

from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.streamed.row_slices import slices_of
from memtrain.trainers.tools.trace.row_slices import standing_slices


def test_the_first_the_heaviest_and_the_last_two_slices_stand_for_a_row():
    """The tenth slice attends to 900 earlier keys of the long document; documents after it are short."""
    layout = packed_layout([1000, 100, 100, 100])
    assert [part.begin for part in standing_slices(layout, 100)] == [0, 900, 1100, 1200]


def test_a_row_of_few_slices_is_traced_as_it_is():
    layout = packed_layout([400])
    assert standing_slices(layout, 100) == slices_of(layout, 100)
