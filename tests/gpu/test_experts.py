"""Products of tokens with their experts on a GPU: one kernel for all, and one expert after the other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.model.experts.grouped import grouped_product, has_kernel, looped_product

pytestmark = pytest.mark.gpu
MIXTURE = (
    "{model_type: qwen3_moe, hidden_size: 128, intermediate_size: 256, moe_intermediate_size: 64,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, num_experts: 8,"
    " num_experts_per_tok: 2, decoder_sparse_step: 1}"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_kernel_for_all_experts_gives_the_numbers_of_one_after_the_other(
    dtype: torch.dtype, cuda: torch.device
):
    """One expert has no token. Gradients too."""
    torch.manual_seed(0)
    x, weight = (torch.randn(size, device=cuda).to(dtype) for size in ((96, 64), (4, 64, 128)))
    ends = torch.tensor([40, 40, 72, 96], dtype=torch.int32, device=cuda)
    assert has_kernel(x) == (dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (8, 0))
    found: list[tuple[torch.Tensor, ...]] = []
    for product in (grouped_product, looped_product):
        leaves = [one.clone().requires_grad_() for one in (x, weight)]
        out = product(*leaves, ends)
        found.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for one, other in zip(*found, strict=True):
        assert ((one - other).float().norm() / other.float().norm()).item() < 1e-2


@pytest.mark.parametrize("adapter", [(), ("model.adapter={r: 4}",)], ids=["whole", "adapter"])
def test_a_mixture_of_experts_learns(
    adapter: tuple[str, ...], plan_of: Callable[..., Plan], steps_of: Callable, tmp_path: Path
):
    stepped = steps_of(plan_of("sft", f"model.config={MIXTURE}", *adapter), 4)
    assert stepped.losses[-1] < stepped.losses[0]
    assert all(torch.isfinite(one).all() for one in stepped.weights.values())
