"""silu(gate) * up and its gradients, bit for bit those of transformers' MLP."""

import pytest
import torch
import torch.nn.functional as F

from memtrain.trainers.model.kernels.gated_product import gated_product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_same_to_the_bit_and_keeps_its_factors(dtype):
    torch.manual_seed(0)
    factors = [torch.randn(5, 24).to(dtype) for _ in range(2)]
    grad, found, kept = torch.randn(5, 24).to(dtype), [], []
    for product in (lambda gate, up: F.silu(gate) * up, gated_product):
        leaves = [x.clone().requires_grad_() for x in factors]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            made = product(*leaves)
        found.append((made, *torch.autograd.grad(made, leaves, grad)))
        with torch.no_grad():
            assert torch.equal(product(*leaves), made)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(kept) == 2


def test_a_factor_without_gradient_gets_none():
    gate, up = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    gated_product(gate, up).sum().backward()
    expected = torch.autograd.grad((F.silu(gate) * up).sum(), gate)[0]
    assert torch.equal(gate.grad, expected)
    assert up.grad is None
