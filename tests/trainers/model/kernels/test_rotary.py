"""Turned queries and keys, and their gradients, bit for bit those of transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from memtrain.trainers.model.kernels.rotary import rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_same_to_the_bit_both_ways(dtype):
    torch.manual_seed(0)
    angles = torch.rand(2, 7, 8).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    # As a model has them: heads before tokens, by a view.
    q = torch.randn(2, 7, 4, 16).to(dtype).transpose(1, 2)
    k = torch.randn(2, 7, 2, 16).to(dtype).transpose(1, 2)
    found = []
    for turn in (apply_rotary_pos_emb, rotate):
        leaves = [x.detach().requires_grad_() for x in (q, k)]
        made = turn(*leaves, cos, sin)
        grads = torch.autograd.grad(made, leaves, [x.flip(-1) for x in (q, k)])
        with torch.no_grad():
            again = turn(q, k, cos, sin)
        found.append((*made, *grads, *again))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_it_keeps_the_angles_alone():
    kept = []
    angles = torch.rand(1, 7, 16)
    q = torch.randn(1, 4, 7, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotate(q, q, angles, angles)
    assert {t.data_ptr() for t in kept} == {angles.data_ptr()}
