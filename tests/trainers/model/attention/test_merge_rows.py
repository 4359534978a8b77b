"""Attention over two sets of keys, put together: its numbers, and the copies that it makes."""

import torch

from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.model.attention.two_part import merge_rows


def drawn():
    draw = torch.Generator().manual_seed(0)
    out, other = (torch.randn(64, 4, 32, generator=draw).bfloat16() for _ in range(2))
    lse, other_lse = (torch.randn(4, 64, generator=draw) for _ in range(2))
    return out, lse, other, other_lse


def test_rows_are_the_sum_weighted_by_their_softmax():
    out, lse, other, other_lse = drawn()
    weight = torch.sigmoid(lse - other_lse).t()[..., None]
    wanted = (weight * out.float() + (1 - weight) * other.float()).bfloat16()
    merge_rows(out, lse, other, other_lse, slice(None))
    assert torch.allclose(out.float(), wanted.float(), atol=1e-2)


def test_two_copies_in_float32_are_made_and_no_third():
    out, lse, other, other_lse = drawn()
    with TensorPeak() as counted:
        merge_rows(out, lse, other, other_lse, slice(None))
    statistics = 8 * lse.nbytes
    assert counted.peak_bytes <= 2 * 4 * out.numel() + statistics
