"""Stepping each weight inside the backward pass: the same bits, and gradients never there together."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.optim.step import DistributedStep, set_rate, update

WIDTH, NUM_LAYERS = 64, 8


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def train(model: nn.Module, settings: Any, optim: Optim, *, is_inside: bool) -> tuple[list[float], int]:
    """Losses and norms of four steps, and the most that was alive in the last."""
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, optim, settings)
    engine = InBackward(optimizer, parameters).engine() if is_inside else DistributedStep()
    reported: list[float] = []
    peak = 0
    for step in range(4):
        rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
        set_rate(optimizer, 1e-2)
        with TensorPeak() as counted:
            loss = model(rows).square().sum()
            engine.backward(loss)
            norm = update(optimizer, parameters, lr=1e-2, max_grad_norm=None, engine=engine)
        reported += [loss.item(), norm.item()]
        peak = counted.peak_bytes
    return reported, peak


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "sgd"])
def test_the_bits_are_those_of_a_step_after_the_pass(make_settings, kind: str):
    optim = Optim(kind=kind, lr=1e-2, weight_decay=0.1, max_grad_norm=None)
    settings = make_settings(optimizer=kind)
    plain = make_model()
    inside = copy.deepcopy(plain)
    assert (
        train(plain, settings, optim, is_inside=False)[0] == train(inside, settings, optim, is_inside=True)[0]
    )
    for one, other in zip(plain.parameters(), inside.parameters(), strict=True):
        assert torch.equal(one, other)


def test_float32_copies_are_stepped_in_the_pass_to_the_same_bits(make_settings):
    optim = Optim(lr=1e-2, weight_decay=0.1, max_grad_norm=None)
    settings = make_settings(dtype="bfloat16", master_weights=True)
    plain = make_model().bfloat16()
    inside = copy.deepcopy(plain)
    rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    states: list[dict[str, Any]] = []
    for model in (plain, inside):
        optimizer = build_optimizer(model, optim, settings)
        parameters = list(model.parameters())
        engine = InBackward(optimizer, parameters).engine() if model is inside else DistributedStep()
        for _ in range(3):
            engine.backward(model(rows).float().square().sum())
            update(optimizer, parameters, lr=1e-2, max_grad_norm=None, engine=engine)
        states.append(optimizer.state_dict())
    for one, other in zip(plain.parameters(), inside.parameters(), strict=True):
        assert torch.equal(one, other)
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for index, one in states[0]["state"].items():
        other = states[1]["state"][index]
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("is_half", [False, True])
def test_a_step_in_the_pass_looks_at_few_weights_of_all(make_settings, monkeypatch, is_half: bool):
    """Hundreds of weights would each be looked at hundreds of times."""
    model = make_model().bfloat16() if is_half else make_model()
    settings = make_settings(dtype="bfloat16" if is_half else "float32", master_weights=is_half)
    optimizer = build_optimizer(model, Optim(lr=1e-2, max_grad_norm=None), settings)
    seen: list[int] = []
    inner = torch.optim.AdamW.step

    def counted(self: torch.optim.AdamW, *given: Any) -> Any:
        seen.append(sum(len(group["params"]) for group in self.param_groups))
        return inner(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    engine = InBackward(optimizer, list(model.parameters())).engine()
    engine.backward(model(torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype)).float().sum())
    # A bias waits for the matrix of its layer.
    assert seen == [2] * NUM_LAYERS
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2 * NUM_LAYERS


def test_a_tied_weight_is_stepped_once_by_the_sum_of_its_uses(make_settings):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.table(rows[:, :8].abs().long() % WIDTH).mean(1) @ self.table.weight.T

    torch.manual_seed(0)
    plain = Tied()
    inside = copy.deepcopy(plain)
    optim = Optim(lr=1e-2, max_grad_norm=None)
    plain_reported = train(plain, make_settings(), optim, is_inside=False)[0]
    assert plain_reported == train(inside, make_settings(), optim, is_inside=True)[0]
    assert torch.equal(plain.table.weight, inside.table.weight)


def test_gradients_are_never_there_together(make_settings):
    """After the pass all eight layers' gradients are alive; inside it one layer's matrix and bias at most."""
    optim = Optim(kind="sgd", lr=1e-2, max_grad_norm=None)
    settings = make_settings(optimizer="sgd")
    one_layer = 4 * WIDTH * (WIDTH + 1)
    activations = 4 * 2 * WIDTH * (NUM_LAYERS + 4)
    _, after = train(make_model(), settings, optim, is_inside=False)
    _, inside = train(make_model(), settings, optim, is_inside=True)
    assert after >= NUM_LAYERS * one_layer
    assert inside <= one_layer + activations


def test_a_rehearsal_moves_nothing_and_makes_the_states(make_settings):
    model = make_model()
    before = copy.deepcopy(model)
    optimizer = build_optimizer(model, Optim(max_grad_norm=None), make_settings())
    engine = InBackward(optimizer, list(model.parameters())).engine()
    set_rate(optimizer, 0.0)
    with engine.dry_step(True):
        model(torch.ones(2, WIDTH)).sum().backward()
    assert len(optimizer.state) == 2 * NUM_LAYERS
    assert not any(state["exp_avg"].any() for state in optimizer.state.values()), "states of no gradient"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
