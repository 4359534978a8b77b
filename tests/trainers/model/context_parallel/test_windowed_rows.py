"""A rank's slice of a row under a sliding window: who attends to whom, and how little is gathered."""

import pytest
import torch
from torch import Tensor

from memtrain.trainers.model.attention.masked import mask_of
from memtrain.trainers.model.attention.row_layout import Layout, Rows, packed_layout, shared_layout
from memtrain.trainers.model.attention.two_part import Reach
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.context_parallel.row_slices import slice_of
from memtrain.trainers.model.context_parallel.windowed_rows import seen_by, under_window


def rows_of(rows: Rows, count: int) -> Tensor:
    return torch.arange(count)[rows]


def marked(counts: Tensor, reach: Reach, queries: Tensor, keys: Tensor) -> None:
    """Count each pair of rows of the whole row that meets in a reach."""
    query = queries[rows_of(reach.queries, len(queries))]
    key = keys[rows_of(reach.keys, len(keys))]
    for q0, q1, k0, k1 in reach.part.spans():
        met = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        counts[query[q0:q1, None], key[None, k0:k1]] += met.tril() if reach.part.is_causal else met


LAYOUTS = {
    "packed": packed_layout([19, 3, 26, 1, 15]),
    "one document": packed_layout([64]),
    "shared prompts": shared_layout([(13, [9, 4]), (5, [17, 16])]),
}


@pytest.mark.parametrize("window", [2, 5, 16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_attend_once_to_all_inside_a_window(name: str, window: int):
    """Of whole slices and in pieces of seven tokens; every pair of the mask is met once, and no other."""
    layout: Layout = LAYOUTS[name]
    T = layout.num_tokens
    for step in (T, 7):
        counts = torch.zeros(T, T, dtype=torch.int64)
        for rank in range(2):
            own = slice_of(layout, ContextRanks(rank, 2))
            there = gathered_rows(layout, window)
            for begin in range(0, own.num_tokens, step):
                end = min(begin + step, own.num_tokens)
                seen, queries = seen_by(own, window, begin, end), own.index[begin:end]
                marked(
                    counts,
                    Reach(slice(0, end - begin), slice(0, end - begin), seen.own.within),
                    queries,
                    queries,
                )
                for reach in seen.own.reaches:
                    marked(counts, reach, queries, own.index)
                for reach in seen.gathered:
                    marked(counts, reach, queries, there)
        assert torch.equal(counts, mask_of(layout, window).long())


def gathered_rows(layout: Layout, window: int) -> Tensor:
    """Rows of the whole row that are gathered, in their order: what the ranks send, laid in `order`."""
    slices = [under_window(slice_of(layout, ContextRanks(rank, 2)), window) for rank in range(2)]
    return torch.cat([one.index[one.sent] for one in slices])[slices[0].order]


def test_a_window_gathers_no_more_than_itself_at_each_border():
    layout = packed_layout([64])
    whole = slice_of(layout, ContextRanks(0, 2))
    assert whole.num_gathered_kv == 48
    assert under_window(whole, 5).num_gathered_kv == 2 * 4, "two of four chunks are neighbours"
    assert under_window(whole, None) is whole
