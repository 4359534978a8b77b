"""The norm of two kernels is that of transformers."""

import copy
import types

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from memtrain.trainers.model.kernels.rms_norm import norm_forward
from memtrain.trainers.model.streamed.weight_sums import WeightSums


def both(dtype, weight_dtype=None):
    """(output, gradient of the input, of the weight) of transformers' norm, of ours, and in float64."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-5).to(weight_dtype or dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = torch.randn(3, 17, 48).to(dtype), torch.randn(3, 17, 48).to(dtype)
    found = []
    for forward, made in (
        (LlamaRMSNorm.forward, norm),
        (norm_forward, copy.deepcopy(norm)),
        (in_double, copy.deepcopy(norm).double()),
    ):
        made.zero_grad()
        leaf = x.detach().clone().to(torch.float64 if forward is in_double else dtype).requires_grad_()
        out = forward(made, leaf)
        out.backward(grad.to(out.dtype))
        found.append((out.detach(), leaf.grad, made.weight.grad))
    return found


def in_double(norm, x):
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def off(found, truth):
    return ((found.double() - truth).norm() / truth.norm()).item()


def test_in_float32_it_is_the_same_to_rounding():
    plain, ours, _ = both(torch.float32)
    assert torch.equal(ours[0], plain[0])
    for found, expected in zip(ours[1:], plain[1:], strict=True):
        assert off(found, expected.double()) < 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_forward_as_transformers_and_backward_less(dtype):
    plain, ours, truth = both(dtype)
    assert torch.equal(ours[0], plain[0])
    for found, theirs, exact in zip(ours[1:], plain[1:], truth[1:], strict=True):
        assert found.dtype == dtype
        assert off(found, exact) < off(theirs, exact) < 0.01


def test_a_scale_of_another_precision_is_left_to_transformers():
    plain, ours, _ = both(torch.bfloat16, torch.float32)
    assert ours[0].dtype == plain[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_it_keeps_its_input_and_a_number_a_token():
    kept = []
    x = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
    norm = LlamaRMSNorm(48).to(torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm_forward(norm, x)
    sizes = [t.numel() * t.element_size() for t in kept if t is not norm.weight]
    assert sorted(sizes) == [5 * 4, 5 * 48 * 2]


def test_slices_whose_gradients_nearly_cancel_are_summed_before_they_are_rounded():
    """As of chosen and rejected answers: rounding each slice's gradient loses more than all of the sum."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(16, eps=1e-5).to(torch.bfloat16)
    norm.forward = types.MethodType(norm_forward, norm)
    x, grad = torch.randn(2, 64, 16).to(torch.bfloat16), torch.randn(1, 64, 16).to(torch.bfloat16)
    x[1] = (x[0].double() + 1e-2 * torch.randn(64, 16)).to(torch.bfloat16)
    grads = torch.cat([grad, -grad])
    exact = copy.deepcopy(norm).double()
    in_double(exact, x.double()).backward(grads.double())
    with (sums := WeightSums(norm)):
        for one, above in zip(x, grads, strict=True):
            norm(one.requires_grad_(False)).backward(above)
    (found,) = sums.taken()
    assert found.dtype == torch.bfloat16
    assert off(found, exact.weight.grad) < 2**-8
