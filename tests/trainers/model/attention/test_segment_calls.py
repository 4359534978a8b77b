"""A row of segments of one length is one call of a kernel; each gets what it would get alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.attention.torch_cpu import TorchCpu, attend
from memtrain.trainers.model.attention.two_part import RowAttention, attend_by

HEADS = {"own keys": (4, 4), "shared keys": (6, 2)}
LENGTHS = {
    "one length": ([24, 24, 24], [3]),
    "some alike": ([9, 24, 24], [1, 1, 1]),
    "one segment": ([40], [1]),
    "none alike": ([5, 6, 7], [1, 1, 1]),
}


class Counted(TorchCpu):
    """The CPU's kernel; notes the segments of each call."""

    calls: list[int]

    @classmethod
    def attended(cls, *given: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        cls.calls.append(len(given[0]))
        return super().attended(*given, is_causal=is_causal, scale=scale)

    @classmethod
    def gradients(cls, *given: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        cls.calls.append(len(given[0]))
        return super().gradients(*given, is_causal=is_causal, scale=scale)


def row_of(layout: Layout, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the output's gradient."""
    torch.manual_seed(3)
    H, K = heads
    return [torch.randn(layout.num_tokens, one, 16).to(dtype) for one in (H, K, K, H)]


def results(kernel: Any, layout: Layout, row: list[Tensor]) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    return results_of(attend_by(kernel), layout, row)


def results_of(attention: RowAttention, layout: Layout, row: list[Tensor]) -> list[Tensor]:
    query, key, value = (one.clone().requires_grad_() for one in row[:3])
    out = attention(query, key, value, layout, 0.25)
    return [out.detach(), *torch.autograd.grad(out, [query, key, value], row[3])]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_call_of_many_segments_gives_the_bits_of_each_alone(lengths: str, dtype: torch.dtype, heads: str):
    each, calls = LENGTHS[lengths]
    layout = packed_layout(each)
    row = row_of(layout, HEADS[heads], dtype)
    Counted.calls = []
    found = results(Counted, layout, row)
    folds = heads == "shared keys" and dtype == torch.bfloat16
    # Heads that are folded are the batch of the call: 6 over 2.
    assert Counted.calls == ([3] * len(each) if folds else calls) * 2
    parts = zip(*(one.split(each) for one in row), strict=True)
    alone = [results(TorchCpu, packed_layout([len(part[0])]), list(part)) for part in parts]
    for whole, *segments in zip(found, *alone, strict=True):
        assert torch.equal(whole, torch.cat(segments))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_derivative_by_torch_is_the_one_of_two_parts(lengths: str, dtype: torch.dtype, heads: str):
    """To the bit; torch's own is taken where one call gives the row."""
    layout = packed_layout(LENGTHS[lengths][0])
    row = row_of(layout, HEADS[heads], dtype)
    for found, own in zip(results_of(attend, layout, row), results(TorchCpu, layout, row), strict=True):
        assert torch.equal(found, own)
    out = attend(*(one.requires_grad_() for one in row[:3]), layout, 0.25)
    is_one = lengths.startswith("one") and (dtype == torch.float32 or heads == "own keys")
    assert ("TwoPart" in names_of(out)) is not is_one


def names_of(out: Tensor) -> str:
    """Names of the nodes that made a tensor."""
    nodes, seen = [out.grad_fn], ""
    while nodes:
        if (node := nodes.pop()) is not None:
            seen += node.name()
            nodes += [before for before, _ in node.next_functions]
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_shared_keys_are_as_exact_as_those_of_repeated_keys(dtype: torch.dtype):
    """Against float64; the kernel itself rounds half precision after every head, where it may not sum."""
    layout = packed_layout([50, 50])
    row = row_of(layout, (16, 2), dtype)
    exact = results(TorchCpu, layout, [one.double() for one in row])
    repeated = [row[0], *(one.repeat_interleave(8, 1) for one in row[1:3]), row[3]]
    given = results(TorchCpu, layout, repeated)
    summed = [*given[:2], *(one.float().unflatten(1, (2, 8)).sum(2).to(dtype) for one in given[2:])]
    found = results(TorchCpu, layout, row)
    for own, plain, right in zip(found, summed, exact, strict=True):
        assert (own - right).norm() <= 1.1 * (plain - right).norm()


def test_completions_of_equal_groups_meet_their_prompts_in_one_call():
    layout = shared_layout([(8, [5, 5]), (8, [4, 6])])
    Counted.calls = []
    results(Counted, layout, row_of(layout, (4, 2), torch.float32))
    # Each segment to itself, and completions to their prompts; forward and backward.
    assert Counted.calls == [*[1] * 6, 2] * 2
