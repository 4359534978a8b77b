"""Attention on a GPU: every back end that can run is right, and none builds a mask of a long row."""

from collections.abc import Callable

import pytest
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.build.components import build_model
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.flex import block_mask_of
from memtrain.trainers.model.attention.functions import attend_of
from memtrain.trainers.model.attention.isolation_check import verify_isolation
from memtrain.trainers.model.attention.probe import Outcome, probe_one
from memtrain.trainers.model.attention.row_layout import packed_layout

pytestmark = pytest.mark.gpu
BACKENDS = ("torch_varlen", "flash", "flash3", "flex", "torch_efficient", "masked")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", BACKENDS)
def test_no_back_end_is_broken_on_this_gpu(name: str, dtype: torch.dtype, device: torch.device):
    """Flash needs the flash-attn package besides."""
    found = probe_one(AttentionBackend(name), device.type, dtype)
    assert found.outcome is not Outcome.BROKEN, found.words
    if name == "masked" or (name == "torch_varlen" and dtype != torch.float32 and device.type == "cuda"):
        assert found.outcome is Outcome.WORKS, found.words


@pytest.mark.parametrize("tokens", [1, 37, 100, 127])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flex_takes_rows_of_less_than_a_block(tokens: int, dtype: torch.dtype, cuda: torch.device):
    """With two heads to a key, forward and backward."""
    layout = packed_layout([tokens], cuda)
    given = [torch.randn(tokens, heads, 32, device=cuda).to(dtype) for heads in (4, 2, 2)]
    made: list[tuple[torch.Tensor, ...]] = []
    for backend in (AttentionBackend.FLEX, AttentionBackend.MASKED):
        leaves = [one.clone().requires_grad_() for one in given]
        out = attend_of(backend)(*leaves, layout, 0.2)
        made.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    bound = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for found, expected in zip(*made, strict=True):
        assert (found - expected).float().norm() <= bound * expected.float().norm() + bound


@pytest.mark.parametrize("name", ["torch_varlen", "flex"])
def test_rows_of_a_real_model_stay_apart(name: str, plan_of: Callable[..., Plan], cuda: torch.device):
    """The start-up check itself; the random numbers of the run go on where they were."""
    plan = plan_of("sft")
    model = build_model(plan, vocab_size=512)
    set_attention(model, AttentionBackend(name))
    before = torch.cuda.get_rng_state()
    found = verify_isolation(model, AttentionBackend(name))
    assert found.packed_seen <= 2e-3
    assert found.shared_alone is not None
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_long_row_needs_no_mask_of_its_length_squared(cuda: torch.device):
    """65,536 tokens: a mask of T x T would be 4 GiB of booleans, and more while it is made."""
    layout = packed_layout([16_384] * 4, cuda)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = block_mask_of(layout)
    assert torch.cuda.max_memory_allocated() - before < 128 * 2**20
    query, key = (torch.randn(65_536, heads, 64, device=cuda, dtype=torch.bfloat16) for heads in (2, 1))
    out = attend_of(AttentionBackend.FLEX)(query, key, key, layout, 0.125)
    assert torch.cuda.max_memory_allocated() - before < 512 * 2**20
    assert torch.isfinite(out).all()
    del mask
