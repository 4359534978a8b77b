"""Every optimizer against its formula, in every precision of weights, on tensors of every alignment.

The references are written here, in float64, from the papers; each step begins at the weights that the
optimizer had, so that a step is held to one rounding of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.optim.build import build_optimizer

RATE, DECAY, BETAS, EPS, MOMENTUM = 0.02, 0.3, (0.9, 0.95), 1e-8, 0.95
# Vectors of kernels for CPUs hold 8, 16 or 32 numbers: whole ones, remainders, and both.
SHAPES = ((1,), (7,), (16,), (33,), (1, 1), (4, 8), (5, 13), (32, 33), (64, 16))
State = dict[str, Any]
Formula = Callable[[Tensor, Tensor, State, int, float], Tensor]


def sgd(w: Tensor, g: Tensor, state: State, step: int, decay: float) -> Tensor:
    """w - lr (g + wd w)."""
    return w - RATE * (g + decay * w)


def adamw(w: Tensor, g: Tensor, state: State, step: int, decay: float) -> Tensor:
    """arXiv:1711.05101, algorithm 2."""
    m = state["m"] = BETAS[0] * state.get("m", 0.0) + (1 - BETAS[0]) * g
    v = state["v"] = BETAS[1] * state.get("v", 0.0) + (1 - BETAS[1]) * g * g
    ahead = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
    return w - RATE * (ahead + decay * w)


def adafactor(w: Tensor, g: Tensor, state: State, step: int, decay: float) -> Tensor:
    """arXiv:1804.04235, algorithm 4 of matrices and 2 of vectors: decay 1 - t^-0.8, updates clipped to 1."""
    beta, squares = 1 - step**-0.8, g * g + 1e-30
    if g.dim() == 2:
        r = state["r"] = beta * state.get("r", 0.0) + (1 - beta) * squares.mean(1)
        c = state["c"] = beta * state.get("c", 0.0) + (1 - beta) * squares.mean(0)
        update = g / (r[:, None] * c[None] / r.mean()).sqrt()
    else:
        v = state["v"] = beta * state.get("v", 0.0) + (1 - beta) * squares
        update = g / v.sqrt()
    update = update / max(1.0, float(update.square().mean().sqrt()))
    return w - RATE * (update + decay * w)


def muon(w: Tensor, g: Tensor, state: State, step: int, decay: float) -> Tensor:
    """Jordan et al. 2024 with arXiv:2502.16982, eq. 4; vectors by AdamW."""
    if g.dim() < 2:
        return adamw(w, g, state, step, decay)
    m = state["m"] = MOMENTUM * state.get("m", 0.0) + (1 - MOMENTUM) * g
    x = (1 - MOMENTUM) * g + MOMENTUM * m
    x = x / x.norm()
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    x = x.T if g.shape[0] > g.shape[1] else x
    return w * (1 - RATE * decay) - RATE * 0.2 * max(g.shape) ** 0.5 * x


FORMULAS: dict[str, Formula] = {"sgd": sgd, "adamw": adamw, "adafactor": adafactor, "muon": muon}


class Weights(nn.Module):
    """Matrices and vectors of many sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for shape in SHAPES
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [name for name, facts in OPTIMIZERS.items() if not facts.is_bitsandbytes])
def test_an_optimizer_moves_every_weight_by_its_formula(
    kind: str, dtype: torch.dtype, make_settings: Callable[..., Settings]
):
    """`sgd` moved no vector of half-precision weights on a CPU (torch's fused kernel)."""
    model = Weights(dtype)
    recipe = Optim(kind=kind, lr=RATE, betas=BETAS, eps=EPS, momentum=MOMENTUM, weight_decay=DECAY)
    optimizer = build_optimizer(model, recipe, make_settings(optimizer=kind))
    states: list[State] = [{} for _ in SHAPES]
    info = torch.finfo(dtype)
    made = torch.Generator().manual_seed(1)
    # A share of the update: moments are kept in the weights' precision, Muon's iteration is in bfloat16.
    slack = {"sgd": 1.0, "adamw": 8.0, "adafactor": 2.0, "muon": 8.0}[kind] * info.eps
    slack = 0.1 if kind == "muon" else slack + 1e-5
    for step in (1, 2, 3):
        before = [p.detach().clone() for p in model.all]
        for p in model.all:
            p.grad = torch.randn(p.shape, generator=made).to(dtype)
        gradients = [p.grad.double() for p in model.all]
        optimizer.step()
        for p, w, g, state in zip(model.all, before, gradients, states, strict=True):
            decay = DECAY if p.dim() >= 2 else 0.0
            expected = FORMULAS[kind](w.double(), g, state, step, decay)
            update = (expected - w.double()).abs()
            # Two roundings of the weight: the decay's, where a kernel writes it apart, and the update's.
            allowed = 2 * info.eps * w.double().abs().maximum(expected.abs()) + slack * (update + RATE)
            assert ((p.detach().double() - expected).abs() <= allowed).all(), (tuple(p.shape), step)
            due = update > 2 * info.eps * w.double().abs()
            assert (p.detach() != w)[due].all()
