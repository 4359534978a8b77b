"""Triton's kernels of a tile give the torch form's scores and gradients, run by Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest tests/trainers/losses/head/test_fused_tiles.py

Whether kernels are interpreted is settled when triton is first imported, so the variable is set beforehand.
"""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.trainers.losses.head import linear, tiles
from memtrain.trainers.losses.head.linear import LogprobOptions, NllOptions, linear_logprob
from memtrain.trainers.losses.head.linear import linear_nll as nll
from memtrain.trainers.losses.head.tiles import LogitRule

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton (pip install triton) and TRITON_INTERPRET=1 from the start",
)
COLUMNS = 70
"""Several blocks of 32 columns and a part of one."""


@pytest.fixture(autouse=True)
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU, in blocks of 32 columns, wherever the rule asks for them."""
    from memtrain.trainers.losses.head import triton_tiles

    monkeypatch.setattr(triton_tiles, "BLOCK", 32)
    for module in (linear,):
        monkeypatch.setattr(module, "is_fused", lambda rule, wide, device: rule.kernel == "triton")


def operands(scale: float = 1.0) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 12, generator=generator) * scale
    weight = torch.randn(COLUMNS, 12, generator=generator)
    bias = torch.randn(COLUMNS, generator=generator)
    targets = torch.randint(0, COLUMNS, (9,), generator=generator)
    for one in (hidden, weight, bias):
        one.requires_grad_()
    return [(hidden, weight)], bias, targets


def outcome(kernel: str, form: str, **rule: Any) -> list[Tensor]:
    """Loss, statistics and gradients of a head in tiles of two tokens."""
    pairs, bias, targets = operands(20.0 if form == "large logits" else 1.0)
    asked = LogitRule(tile_bytes=2 * 4 * COLUMNS * 2, kernel=kernel, **rule)
    weights = torch.linspace(0.1, 1.0, 9)
    if form == "log-probs":
        found = linear_logprob(pairs, targets, asked, LogprobOptions(True, True), bias=bias)
        assert found.entropy_N is not None
        assert found.log_sum_squares_N is not None
        loss = (found.logp_N * weights).sum() + (found.entropy_N.square() * weights).sum()
        reported = [found.logp_N, found.entropy_N, found.log_sum_squares_N]
    else:
        options = NllOptions(label_smoothing=0.1, z_loss=0.01, want_stats=True)
        result = nll(pairs, targets, weights, asked, options, bias=bias)
        loss, reported = result.loss, [result.logp_N, result.entropy_N, result.correct_N]
    loss.backward()
    grads = [pairs[0][0].grad, pairs[0][1].grad, bias.grad]
    return [one.detach().float() for one in (loss, *reported, *grads) if one is not None]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("rule", [{}, {"scale": 0.5, "temperature": 0.7}])
@pytest.mark.parametrize("form", ["nll", "large logits", "log-probs"])
def test_the_kernels_are_the_torch_form_to_rounding(form: str, rule: dict[str, float]):
    plain, fused = (outcome(kernel, form, **rule) for kernel in ("torch", "triton"))
    assert len(plain) == len(fused) == 7
    # log Z of some 200 has steps of 1.5e-5, and probabilities are exp(z - log Z): as where torch recomputes.
    bound = 1e-5 if form == "large logits" else 2e-6
    for one, other in zip(plain, fused, strict=True):
        assert (one - other).norm() <= bound * one.norm(), "sums in another order"


def test_the_gradient_of_some_columns_is_those_columns_of_the_whole():
    """Weights in half precision have their gradients made by columns."""
    generator = torch.Generator().manual_seed(1)
    tile = torch.randn(3, COLUMNS, generator=generator)
    targets = torch.tensor([0, 41, 69])
    rule = LogitRule(kernel="triton")
    log_z = tile.logsumexp(-1)
    factors = tiles.Coefficients(torch.rand(3), -torch.rand(3), None, None)
    given = (targets, log_z, None, factors, rule)
    whole = tiles.fused_gradient_(tile.clone(), *given)
    part = tiles.fused_gradient_(tile.clone()[:, 40:], *given, 40)
    assert torch.equal(part, whole[:, 40:])


@pytest.mark.parametrize("first", [0, 33])
def test_a_rounded_gradient_lies_where_the_head_outputs_were(first: int):
    """In the first half of each row, also in columns of a wider scratch; no other number is touched."""
    generator = torch.Generator().manual_seed(2)
    scratch = torch.randn(3, COLUMNS + 8, generator=generator)
    before, tile = scratch.clone(), scratch[:, :COLUMNS]
    targets, log_z = torch.tensor([0, 41, 69]), tile.logsumexp(-1)
    factors = tiles.Coefficients(torch.rand(3), -torch.rand(3), torch.rand(3), torch.rand(3))
    given = (targets, log_z, torch.rand(3), factors, LogitRule(0.5, kernel="triton"), first)
    whole = tiles.fused_gradient_(tile.clone(), *given)
    rounded = tiles.fused_gradient_(tile, *given, narrow=torch.float16)
    assert rounded.data_ptr() == scratch.data_ptr()
    assert torch.equal(rounded, whole.half())
    assert torch.equal(scratch[:, COLUMNS // 2 :], before[:, COLUMNS // 2 :])


@pytest.mark.parametrize("tile_bytes", [2 * 4 * COLUMNS, 2**20])
@pytest.mark.parametrize(
    ("form", "dtype"), [("nll", torch.bfloat16), ("nll", torch.float16), ("log-probs", torch.float16)]
)
def test_a_head_of_halves_has_the_numbers_of_a_copied_tile(
    form: str, dtype: torch.dtype, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Where products of halves are summed wide; in tiles of tokens, or of columns under a small budget."""
    monkeypatch.setattr(tiles, "sums_half_in_fp32", lambda device, dtype: True)
    monkeypatch.setattr(tiles, "_multiply_", multiply_as_cuda_)
    narrow = gradients_of_halves(form, dtype, tile_bytes)
    real, seen = tiles.fused_gradient_, set[torch.dtype | None]()

    def whole(*given: Any, narrow: torch.dtype | None = None) -> Tensor:
        seen.add(narrow)
        return real(*given[:7], narrow=None)

    for module in (linear,):
        monkeypatch.setattr(module, "fused_gradient_", whole)
    copied = gradients_of_halves(form, dtype, tile_bytes)
    assert seen == {dtype}
    assert len(narrow) == len(copied) == 2
    # Triton's interpreter cuts digits off where a GPU rounds to bfloat16.
    bound = 0.0 if dtype == torch.float16 else 2**-7
    assert all(
        (one - other).norm() <= bound * other.norm() for one, other in zip(narrow, copied, strict=True)
    )


def multiply_as_cuda_(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """Products of halves summed in the dtype of `out`."""
    found = left.to(out.dtype) @ right.to(out.dtype)
    out.copy_(out + found if add else found)


def gradients_of_halves(form: str, dtype: torch.dtype, tile_bytes: int) -> list[Tensor]:
    pairs, _, targets = operands()
    hidden, weight = (one.detach().to(dtype).requires_grad_() for one in pairs[0])
    half = [(hidden, weight)]
    rule, weights = LogitRule(tile_bytes=tile_bytes, kernel="triton"), torch.linspace(0.1, 1.0, 9)
    if form == "nll":
        nll(half, targets, weights, rule, NllOptions(want_stats=True)).loss.backward()
    else:
        found = linear_logprob(half, targets, rule, LogprobOptions(want_entropy=True))
        assert found.entropy_N is not None
        (found.logp_N * weights + found.entropy_N.square()).sum().backward()
    return [one.grad for one in (hidden, weight) if one.grad is not None]


def test_a_kernel_that_is_wrong_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    tiles.check_kernels(torch.device("cpu"))
    real = tiles.fused_gradient_
    monkeypatch.setattr(tiles, "fused_gradient_", lambda *given, **named: real(*given, **named).mul_(1.001))
    with pytest.raises(tiles.LaunchError, match="off by"):
        tiles.check_kernels(torch.device("cpu"))
