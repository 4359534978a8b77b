"""Liger's kernel itself needs CUDA; here a stand-in with its signature and meaning takes its place."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memtrain.errors import LaunchError
from memtrain.trainers.losses.head.linear import NllOptions, linear_nll
from memtrain.trainers.losses.head.linear_liger import MODULE, liger_nll
from memtrain.trainers.losses.head.tiles import LogitRule


class StandIn:
    """LigerFusedLinearCrossEntropyFunction of liger-kernel 0.8.5, by its documented meaning."""

    @staticmethod
    def apply(
        hidden, weight, target, bias, ce_weight, ignore_index, z, smoothing, reduction, softcap, _, accum
    ) -> tuple[Any, ...]:
        assert ce_weight is None
        assert accum is torch.float32
        logits = F.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(
            logits, target, reduction="none", label_smoothing=smoothing, ignore_index=ignore_index
        )
        loss = loss + z * logits.logsumexp(-1).square()
        return (loss if reduction == "none" else loss.sum()), None, None, None


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch):
    module: Any = ModuleType(MODULE)
    module.LigerFusedLinearCrossEntropyFunction = StandIn
    monkeypatch.setitem(sys.modules, MODULE, module)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 16, generator=generator, requires_grad=True)
    weight = torch.randn(37, 16, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, 37, (13,), generator=generator)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    ("terms", "rule"),
    [
        ({}, LogitRule()),
        ({"label_smoothing": 0.1}, LogitRule()),
        ({"z_loss": 1e-3}, LogitRule()),
        ({}, LogitRule(softcap=5.0, scale=0.5)),
    ],
)
def test_ligers_loss_and_ours_are_the_same(uniform: bool, terms: dict[str, float], rule: LogitRule):
    results = []
    for loss_of in (linear_nll, liger_nll):
        hidden, weight, targets = operands()
        weights = torch.full((13,), 0.25) if uniform else torch.linspace(0.1, 1.0, 13)
        options = NllOptions(want_stats=True, weight_of_all=0.25 if uniform else None, **terms)
        result = loss_of([(hidden, weight)], targets, weights, rule, options)
        result.loss.backward()
        results.append((result.loss, hidden.grad, weight.grad, result.logp_N, result.entropy_N))
    for ours, ligers in zip(*results, strict=True):
        torch.testing.assert_close(ours, ligers, rtol=1e-5, atol=1e-6)


def test_an_adapter_on_the_head_is_refused_with_the_way_out():
    hidden, weight, targets = operands()
    with pytest.raises(LaunchError, match="this one has an adapter"):
        liger_nll([(hidden, weight), (hidden, weight)], targets, torch.ones(13))
