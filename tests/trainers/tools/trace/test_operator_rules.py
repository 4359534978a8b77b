"""Answers of a trace for operators, against the operators themselves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
