"""Answers of a trace for operators, against the operators themselves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtrain.trainers.memory_meter.cpu_allocator_peak import allocator_peak
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.tools.trace.operator_rules import RULES

GROUPED = torch.ops.aten._grouped_mm.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [((16, 16), (3, 16, 24)), ((8, 16), (16, 24))])
def test_a_grouped_product_has_its_shape_in_every_precision(dtype, sizes):
    """Forward, and the gradient of the stack: torch's own answer without data knows bfloat16 alone."""
    left, right = (torch.randn(size, dtype=dtype) for size in sizes)
    ends = torch.tensor([4, 6, 16], dtype=torch.int32)
    expected = GROUPED(left, right, ends)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(one) for one in (left, right, ends)]
        found = RULES[GROUPED](GROUPED, tuple(fakes), {})
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def product(x_1TI):
    """A product of rows in three dimensions, whose gradient is a view of one in two."""
    return x_1TI @ torch.ones(x_1TI.shape[-1], 4)


@pytest.mark.parametrize("shape", [(512, 352), (1, 512, 352)])
@pytest.mark.parametrize("parts", [(product, product), (product, torch.neg), (torch.neg, product)])
def test_two_gradients_are_summed_in_place_where_nothing_holds_the_first_ones_storage(parts, shape):
    """That of a view is held by what it is a view of: a third tensor of 704 KiB, which a trace did not show.
    Kernels take some for themselves."""

    def work():
        x = torch.ones(shape, requires_grad=True)
        both = x.exp()
        first, second = (part(both).sum() for part in parts)
        (first + second).backward()
        return x

    with FakeTensorMode(), Recorder(rules=RULES) as counted:
        x = work()
    del x
    assert counted.peak_bytes == pytest.approx(allocator_peak([], work), abs=20_000)
