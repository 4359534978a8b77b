"""Fused kernels on a GPU: torch's operators round as transformers' modules do."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.model.kernels.rms_norm import norm_forward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [64, 1024, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_transformers(dtype: torch.dtype, width: int, cuda: torch.device):
    torch.manual_seed(0)
    norm = LlamaRMSNorm(width).to(cuda, dtype)
    torch.nn.init.normal_(norm.weight)
    x, grad = (torch.randn(3, 37, width, device=cuda).to(dtype) for _ in range(2))
    found: list[tuple[Tensor, ...]] = []
    for forward in (LlamaRMSNorm.forward, norm_forward):
        leaf = x.clone().requires_grad_()
        out = forward(norm, leaf)
        found.append((out, *torch.autograd.grad(out, (leaf, norm.weight), grad)))
    # Sums in another order move a rounding here and there.
    bound = 2e-6 if dtype == torch.float32 else 5e-3
    for one, other in zip(*found, strict=True):
        assert ((one - other).float().norm() / other.float().norm()).item() < bound


def test_fused_kernels_keep_the_loss(plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device):
    forms = ("model.kernels=transformers", "model.kernels=fused")
    plain, fused = (steps_of(plan_of("sft", form)) for form in forms)
    assert fused.losses == pytest.approx(plain.losses, rel=2e-2)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_compiled_layers_keep_the_loss(
    method: str, dtype: str, bound: float, plan_of: Callable[..., Plan], steps_of: Callable
):
    """By kernels that torch's compiler writes. Answers are written by layers as they are."""
    words = ("model.liger=off", "model.kernels=transformers", "memory.measure_peaks=false")
    plain, compiled = (
        steps_of(plan_of(method, *words, f"model.compile={one}", dtype=dtype)) for one in ("off", "on")
    )
    assert compiled.losses == pytest.approx(plain.losses, rel=bound, abs=bound / 10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_triton_tiles_keep_the_loss(plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device):
    forms = ("torch", "triton")
    plans = [plan_of("sft", "memory.loss=chunked", "model.liger=off", dtype="float32") for _ in forms]
    plain, fused = (
        steps_of(plan.model_copy(update={"settings": plan.settings.model_copy(update={"loss_kernel": form})}))
        for plan, form in zip(plans, forms, strict=True)
    )
    assert fused.losses == pytest.approx(plain.losses, rel=1e-5)
