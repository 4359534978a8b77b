"""The memory-efficient back end: its kernel needs CUDA; here a stand-in with its shapes and meaning."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import set_attention, torch_efficient
from memtrain.trainers.model.attention.masked import attend as attend_masked
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.streamed.apply import stream_layers

LAYOUTS = {
    "rows": packed_layout([40, 7, 33]),
    "rows of one length": packed_layout([33, 33]),
    "some of one length": packed_layout([7, 32, 32, 32, 9]),
    "prompts with completions": shared_layout([(35, [40, 9]), (5, [13])]),
}


def scores_of(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    score = query @ key.transpose(-1, -2) * scale
    if is_causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), float("-inf"))
    return score


def forward(query, key, value, bias, computes_lse, dropout, is_causal, *, scale) -> tuple[Tensor, ...]:
    assert bias is None
    assert computes_lse
    assert dropout == 0.0
    score = scores_of(query, key, is_causal, scale)
    lse = score.logsumexp(-1)
    padded = torch.full((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32), float("inf"))
    padded[..., : lse.shape[-1]] = lse
    state = torch.zeros((), dtype=torch.int64)
    return (score - lse[..., None]).exp() @ value, padded, state, state


def backward(grad, query, key, value, bias, out, lse, seed, offset, dropout, mask, is_causal, *, scale: Any):
    """Flash attention's backward pass, with the log-sum-exp and output that it is given.

    It reads the output as CUDA's kernel does in half precision: tokens lie heads x width apart.
    """
    length, (heads, width) = query.shape[-2], (out.shape[1], out.shape[3])
    steps = (out.stride(0), out.stride(1), heads * width, 1)
    out = out.as_strided(out.shape, steps)
    assert lse.shape[-1] % 32 == 0
    assert lse.is_contiguous()
    assert torch.isinf(lse[..., length:]).all()
    assert mask == [True, True, True, False]
    weight = (scores_of(query, key, is_causal, scale) - lse[..., :length, None]).exp()
    dweight = grad @ value.transpose(-1, -2)
    dscore = weight * (dweight - (grad * out).sum(-1, keepdim=True)) * scale
    return dscore @ key, dscore.transpose(-1, -2) @ query, weight.transpose(-1, -2) @ grad, None


def test_the_stand_in_has_the_shapes_of_the_kernel():
    """torch knows the kernel's shapes without a GPU."""
    query = torch.empty(2, 4, 37, 64, device="meta")
    ops = torch.ops.aten
    made = ops._scaled_dot_product_efficient_attention(query, query, query, None, True, 0.0, True, scale=0.1)
    assert [tuple(one.shape) for one in made] == [(2, 4, 37, 64), (2, 4, 64), (), ()]
    real = torch.randn(2, 4, 37, 64)
    assert [one.shape for one in forward(real, real, real, None, True, 0.0, True, scale=0.1)] == [
        one.shape for one in made
    ]
    grads = ops._scaled_dot_product_efficient_attention_backward(
        query, query, query, query, None, *made, 0.0, [True, True, True, False], True, scale=0.1
    )
    assert [None if one is None else one.shape for one in grads] == [query.shape] * 3 + [None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in in place of the kernel."""
    kernels = {"_scaled_dot_product_efficient_attention": forward}
    kernels["_scaled_dot_product_efficient_attention_backward"] = backward
    monkeypatch.setattr(torch_efficient, "aten", SimpleNamespace(**kernels))


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_output_and_gradients_are_those_of_the_masked_back_end(
    name: str, heads: tuple[int, int], stand_in: None
):
    layout: Layout = LAYOUTS[name]
    T = layout.num_tokens
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(T, count, 16, generator=generator) for count in (heads[0], heads[1], heads[1])]
    weight = torch.randn(T, heads[0], 16, generator=generator)
    made: list[tuple[Tensor, ...]] = []
    for attend in (torch_efficient.attend, attend_masked):
        leaves = [one.clone().requires_grad_() for one in given]
        out = attend(*leaves, layout, 0.25)
        made.append((out, *torch.autograd.grad(out, leaves, weight)))
    for found, expected in zip(*made, strict=True):
        assert torch.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_goes_in_slices(name: str, tiny_model: Callable[..., Any], stand_in: None):
    """By the log-sum-exp that it returns: loss and gradients of layers in slices, and of whole rows."""
    model, layout = tiny_model(num_hidden_layers=2), LAYOUTS[name]
    set_attention(model, AttentionBackend.TORCH_EFFICIENT)
    ids = torch.randint(0, 128, (1, layout.num_tokens), generator=torch.Generator().manual_seed(0))
    made: list[tuple[Tensor, ...]] = []
    for slice_tokens in (0, 24):
        stream_layers(model, slice_tokens)
        given = {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout}
        loss = model.train()(**given, use_cache=False).logits.square().mean()
        made.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for found, expected in zip(*made, strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
