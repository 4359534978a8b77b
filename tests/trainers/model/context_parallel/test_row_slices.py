"""The slices of a row hold it once; every query sees what it sees in the whole row, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memtrain.trainers.model.attention.masked import mask_of
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout, held_by, slice_of

SIZES = st.sampled_from([1, 2, 3, 4])


def cut(layout: Layout, size: int) -> list[SlicedLayout]:
    return [slice_of(layout, ContextRanks(index, size)) for index in range(size)]


def seen(slices: list[SlicedLayout]) -> Tensor:
    """int [T, T]: how often query i meets key j, by what the slices say they send and attend to."""
    T = sum(one.num_tokens for one in slices)
    met_TT = torch.zeros(T, T, dtype=torch.int64)
    arriving = torch.cat([one.index[one.sent] for one in slices])
    for one in slices:
        for q0, q1, k0, k1 in one.within.spans():
            causal = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64).tril()
            met_TT[one.index[q0:q1, None], one.index[None, k0:k1]] += causal
        keys_M = arriving[one.order]
        for queries, keys, part in one.reaches:
            rows, columns = one.index[queries], keys_M[keys]
            for q0, q1, k0, k1 in part.spans():
                met_TT[rows[q0:q1, None], columns[None, k0:k1]] += 1
    return met_TT


def padded(lengths: list[int], size: int) -> list[int]:
    rest = -sum(lengths) % (2 * size)
    return [*lengths, rest] if rest else lengths


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), SIZES)
def test_packed_rows_are_seen_as_in_one_piece(lengths: list[int], size: int):
    layout = packed_layout(padded(lengths, size))
    assert torch.equal(seen(cut(layout, size)), mask_of(layout).long())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    SIZES,
)
def test_shared_prompts_are_seen_as_in_one_piece(groups: list[tuple[int, list[int]]], size: int):
    rest = -sum(prompt + sum(answers) for prompt, answers in groups) % (2 * size)
    if rest:
        groups = [*groups, (1, [rest + 2 * size - 1])]
    layout = shared_layout(groups)
    assert torch.equal(seen(cut(layout, size)), mask_of(layout).long())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_row_is_held_once_and_in_equal_parts(size: int):
    slices = cut(packed_layout([64]), size)
    assert [one.num_tokens for one in slices] == [64 // size] * size
    assert sorted(torch.cat([one.index for one in slices]).tolist()) == list(range(64))


def test_ranks_hold_an_early_and_a_late_chunk():
    assert held_by(0, 2, 16) == ((0, 4), (12, 16))
    assert held_by(1, 2, 16) == ((4, 12),)
    assert held_by(0, 1, 16) == ((0, 16),)


def test_causal_work_is_the_same_on_all_ranks_but_for_the_diagonal():
    """One document of 64 on 4 ranks, chunks of 8: rank r meets 8r + 8(7 - r) = 56 tokens before its chunks,
    a chunk each, and 2 * 36 on the diagonal: 8 * 56 + 72 = 520."""
    layout = packed_layout([64])
    work = [int(mask_of(layout)[one.index].sum()) for one in cut(layout, 4)]
    assert work == [520] * 4


def test_documents_inside_one_chunk_need_nothing_gathered():
    for one in cut(packed_layout([4] * 8), 4):
        assert one.num_gathered_kv == 0
        assert one.reaches == ()


def test_only_what_is_looked_back_on_is_gathered():
    """Borders at 8, 16 and 24; rank 1 holds 8 to 23. Row 8 looks back on its document's rows 5 to 7, and row
    24 on 11 to 23; documents that end before a border are not sent."""
    slices = cut(packed_layout([5, 6, 21]), 2)
    sent = [one.index[one.sent[: one.num_sent]].tolist() for one in slices]
    assert sent == [[5, 6, 7], list(range(11, 24))]
    assert [one.num_gathered_kv for one in slices] == [16, 16]


def test_a_row_that_cannot_be_cut_is_stopped():
    with pytest.raises(AssertionError, match="10 tokens"):
        slice_of(packed_layout([10]), ContextRanks(0, 2))
