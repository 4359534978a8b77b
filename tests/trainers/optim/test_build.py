"""Optimizers: who is decayed, steps by hand, and a stop in the middle that nobody can tell."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.optim import master_weights as optim_master
from memtrain.trainers.optim.build import build_optimizer, parameter_groups
from memtrain.trainers.optim.step import clip_gradients, set_rate

SETTINGS = Settings(
    device="cpu", num_processes=1, threads=1, dtype="float32", attention="transformers", liger=False,
    adapter=None,
    quantize="none", max_length=64, truncation="keep_start", packing="none", cross_document_attention=False,
    padding_free=False, pad_to_multiple_of=None, group_by_length=False, batch_size=2, batch_tokens=None,
    micro_batch_size=2, micro_tokens=None, max_steps=10, checkpoint_every=0, offload="none", loss="full",
    loss_tile_bytes=1 << 20, optimizer="adamw", master_weights=False, expandable_segments=False,
)  # fmt: skip
TinyModel = Callable[..., Any]


def settings_of(kind: str, master_weights: bool = False) -> Settings:
    return SETTINGS.model_copy(update={"optimizer": kind, "master_weights": master_weights})


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on made-up gradients that depend on the step alone."""
    for step in steps:
        torch.manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_matrices_decay_and_norms_and_biases_do_not(tiny_llama: TinyModel):
    model = tiny_llama(attention_bias=True)
    decayed, others = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1
    assert others["weight_decay"] == 0.0
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in others["params"])
    assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_a_tied_weight_is_stepped_once(tiny_llama: TinyModel):
    model = tiny_llama(tie_word_embeddings=True)
    parameters = [p for group in parameter_groups(model, 0.0) for p in group["params"]]
    assert len(parameters) == len({id(p) for p in parameters})


def test_a_frozen_model_has_no_optimizer(tiny_llama: TinyModel):
    with pytest.raises(LaunchError, match="no parameter of the model is trainable"):
        build_optimizer(tiny_llama().requires_grad_(False), Optim(), SETTINGS)


def test_a_step_of_adamw_by_hand():
    """First step: both bias-corrected moments are g and g^2, so w becomes w (1 - lr wd) - lr g / (|g| +
    eps)."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(2.0)
    optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.5, eps=1.0), SETTINGS)
    model.weight.grad, model.bias.grad = torch.full((1, 1), 3.0), torch.full((1,), 3.0)
    optimizer.step()
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1 * 3 / 4)
    assert model.bias.item() == pytest.approx(2.0 - 0.1 * 3 / 4)


def test_two_steps_of_adamw_by_hand():
    """betas 0.5, 0.75; gradients 1, 3: m = (0.25 + 1.5) / 0.75, v = (0.1875 + 2.25) / 0.4375."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = build_optimizer(model, Optim(lr=0.1, betas=(0.5, 0.75), weight_decay=0.0), SETTINGS)
    for gradient in (1.0, 3.0):
        model.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
    second = (0.25 + 1.5) / 0.75 / math.sqrt((0.1875 + 2.25) / 0.4375)
    assert model.weight.item() == pytest.approx(2.0 - 0.1 - 0.1 * second, rel=1e-6)


def test_muon_makes_the_update_orthogonal_and_as_large_as_adamws():
    """Singular values of a Newton-Schulz step lie in 0.7..1.2; AdamW's size is 0.2 sqrt(max(rows,
    columns))."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16))
    before = model[1].weight.detach().clone()
    rows = model[0].weight.detach().clone()
    optimizer = build_optimizer(model, Optim(kind="muon", lr=0.1), settings_of("muon"))
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    sign = model[0].weight.grad.sign()
    optimizer.step()
    values = torch.linalg.svdvals(before - model[1].weight.detach()) / (0.1 * 0.2 * math.sqrt(16))
    assert values.min() > 0.6
    assert values.max() < 1.3
    torch.testing.assert_close(rows - model[0].weight.detach(), 0.1 * sign, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "sgd"])
def test_a_resumed_run_is_the_uninterrupted_one(
    tiny_llama: TinyModel, tmp_path, kind: str, master_weights: bool, dtype: torch.dtype
):
    """Five steps, against two, a save to disk, and three more in a new model and optimizer."""
    recipe, settings = Optim(kind=kind, weight_decay=0.1), settings_of(kind, master_weights)
    whole = tiny_llama().to(dtype)
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    train(whole, build_optimizer(whole, recipe, settings), range(5))

    optimizer = build_optimizer(first, recipe, settings)
    train(first, optimizer, range(2))
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(state["model"])
    optimizer = build_optimizer(second, recipe, settings)
    optimizer.load_state_dict(state["optimizer"])
    train(second, optimizer, range(2, 5))

    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_master_weights_keep_updates_that_bfloat16_rounds_away():
    """100 steps of 1e-4 from 1.0: bfloat16 next to 1 is 0.996, so it never moves; the copy reaches 0.99."""
    plain, exact = (nn.Linear(1, 1, bias=False, dtype=torch.bfloat16) for _ in range(2))
    for model in (plain, exact):
        nn.init.ones_(model.weight)
    recipe = Optim(kind="sgd", lr=1e-4)
    optimizers = [
        build_optimizer(plain, recipe, settings_of("sgd")),
        build_optimizer(exact, recipe, settings_of("sgd", master_weights=True)),
    ]
    for _ in range(100):
        for model, optimizer in zip((plain, exact), optimizers, strict=True):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    assert plain.weight.item() == 1.0
    assert exact.weight.item() == torch.tensor(0.99).bfloat16().item()


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_master_weights_are_the_float32_run_rounded(tiny_llama: TinyModel, monkeypatch, kind: str):
    """Whatever the bucket size (here every parameter is a bucket of its own), with decay and a schedule."""
    monkeypatch.setattr(optim_master, "MASTER_BUCKET", 1)
    half = tiny_llama().bfloat16()
    full = copy.deepcopy(half).float()
    recipe = Optim(kind=kind, weight_decay=0.1)
    optimizer = build_optimizer(half, recipe, settings_of(kind, master_weights=True))
    reference = build_optimizer(full, recipe, settings_of(kind))
    for step in range(3):
        torch.manual_seed(step)
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            p.grad = torch.randn(p.shape).bfloat16()
            q.grad = p.grad.float()
        for one in (optimizer, reference):
            set_rate(one, recipe.lr / (step + 1))
            one.step()
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(p, q.bfloat16())


def test_float32_parameters_among_half_ones_are_stepped_once_in_place(monkeypatch):
    monkeypatch.setattr(optim_master, "MASTER_BUCKET", 1)
    model = nn.Sequential(nn.Linear(2, 2, bias=False, dtype=torch.bfloat16), nn.Linear(2, 2, bias=False))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = build_optimizer(model, Optim(kind="sgd", lr=0.5), settings_of("sgd", master_weights=True))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(model[1].weight, before[1] - 0.5)
    assert torch.equal(model[0].weight, (before[0].float() - 0.5).bfloat16())
    assert len(optimizer.state_dict()["state"]) == 1


def test_clipping_scales_to_the_norm_and_returns_the_one_before():
    """Gradients 3 and 4: norm 5, so a limit of 1 leaves 3/5 and 4/5."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([first, second], 1.0).item() == 5.0
    assert [first.grad.item(), second.grad.item()] == pytest.approx([0.6, 0.8])
    assert clip_gradients([first, second], 2.0).item() == pytest.approx(1.0)
    assert clip_gradients([first, second], float("inf")).item() == pytest.approx(1.0)
    assert [first.grad.item(), second.grad.item()] == pytest.approx([0.6, 0.8])


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16():
    """Norm of 1,000 ones: 31.62; in bfloat16 it would be 31.625."""
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    norm = clip_gradients([parameter], 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(1000), rel=1e-6)


@pytest.mark.parametrize("kind", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_bitsandbytes_optimizers_are_refused_off_cuda(tiny_llama: TinyModel, kind: str):
    with pytest.raises(LaunchError, match=f"optim.kind: {kind} needs a CUDA device"):
        build_optimizer(tiny_llama(), Optim(kind=kind), settings_of(kind))
