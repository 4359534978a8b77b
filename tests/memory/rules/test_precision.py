"""Which weights get float32 copies, and the share of updates that rounding loses, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtrain.errors import DoesNotFit
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.rules.precision import SIGNIFICAND_BITS, lost_share, usual_std

GPU = {"train__micro_batch_size": 16, "train__batch_size": 16}


@pytest.fixture
def plan(ask, facts_of, profile_of):
    def made(card: str = "h100", **said: Any) -> Any:
        return ask(facts_of(Hardware.named(card), profile_of(*[512] * 64)), **(GPU | said))

    return made


def reason_of(resolved: Any, setting: str) -> str:
    return next(one.reason for one in resolved.decisions if one.setting == setting)


@pytest.mark.parametrize("lr", [1e-6, 5e-6, 1e-5, 2e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("std", [0.006, 0.02, 0.05])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_share_that_is_lost_is_that_of_torchs_own_rounding(lr: float, std: float, dtype: str):
    """300,000 weights, each moved by an update of one size: the sample's error is below 0.4 %."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(300_000, generator=generator) * std).to(getattr(torch, dtype))
    signs = torch.randint(0, 2, weights.shape, generator=generator) * 2 - 1
    moved = (weights.float() + lr * signs).to(weights.dtype)
    # At an update of exactly half a step the tie decides; none of these rates is one.
    assert lost_share(lr, std, SIGNIFICAND_BITS[dtype]) == pytest.approx(
        float((moved == weights).double().mean()), abs=0.005
    )


def test_the_first_step_of_adamw_in_bfloat16_loses_the_share_that_the_plan_tells():
    """AdamW's first update is the learning rate itself, whatever the gradient is."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter((torch.randn(200_000, generator=generator) * 0.02).bfloat16())
    before = weights.detach().clone()
    weights.grad = torch.randn(200_000, generator=generator).bfloat16()
    torch.optim.AdamW([weights], lr=1e-6, weight_decay=0.0, fused=True).step()
    unmoved = float((weights == before).double().mean())
    assert unmoved > 0.97
    assert lost_share(1e-6, 0.02) == pytest.approx(unmoved, abs=0.005)


def test_no_update_is_lost_that_is_larger_than_every_weight_and_all_are_that_are_tiny():
    assert lost_share(1.0, 0.02) == 0
    assert lost_share(1e-12, 0.02) == pytest.approx(1, abs=1e-6)


def test_the_spread_of_weights_is_the_configurations():
    assert usual_std({"initializer_range": 0.006}) == 0.006
    assert usual_std({}) == usual_std({"initializer_range": None}) == 0.02


def test_half_precision_weights_that_are_trained_get_float32_copies(plan):
    made = plan()
    assert (made.settings.dtype, made.settings.master_weights) == ("bfloat16", True)
    assert "float32 copies receive the updates" in reason_of(made, "master_weights")


@pytest.mark.parametrize(
    ("said", "masters"),
    [
        ({"model__adapter": {"kind": "lora"}}, False),
        ({"model__adapter": {"kind": "lora", "modules_to_save": ["lm_head"]}}, True),
        ({"model__dtype": "float32"}, False),
        ({"optim__master_weights": False}, False),
        ({"optim__kind": "adafactor"}, True),
        ({"optim__kind": "sgd"}, True),
    ],
)
def test_copies_follow_what_is_trained(plan, said: dict[str, Any], masters: bool):
    assert plan(**said).settings.master_weights is masters


@pytest.mark.parametrize(("lr", "share"), [(1e-6, "98.1%"), (1e-5, "84.5%")])
def test_pure_bfloat16_says_what_rounding_loses_at_its_rate(plan, lr: float, share: str):
    made = plan(optim__master_weights=False, optim__lr=lr)
    said = reason_of(made, "master_weights")
    assert f"loses {share} of updates" in said
    assert f"{lr:g}" in said


def test_pure_bfloat16_is_taken_only_where_allowed_and_nothing_else_fits(plan):
    """0.3 billion weights: 4.4 GiB of weights, copies and moments; 2.2 GiB in pure bfloat16."""
    tight = {"memory__budget": "5GiB", "memory__never": ("optimizer_offload", "weights_offload")}
    allowed = {"memory__allow": ("pure_bfloat16",)}
    assert plan(**allowed).settings.master_weights is True
    with pytest.raises(DoesNotFit):
        plan(**tight)
    made = plan(**tight, **allowed)
    assert made.settings.master_weights is False
    assert "rounding to bfloat16 loses" in reason_of(made, "master_weights")


def test_the_precision_of_8_bit_products_is_told(ask, facts_of, profile_of):
    """LLM.int8 multiplies in float16, whatever the activations are in."""
    there = facts_of(Hardware.named("h100"), profile_of(*[512] * 64), presumed=frozenset({"bitsandbytes"}))
    found = ask(there, model__quantize="8bit", model__adapter={"r": 8}, **GPU)
    assert found.settings.dtype == "bfloat16"
    assert "multiplies in float16: activations in another precision are cast" in reason_of(found, "quantize")


def test_the_words_on_copies_name_the_precision_of_the_weights(plan):
    """A T4 computes in float16, whose numbers lie eight times closer than those of bfloat16."""
    there = reason_of(plan("t4"), "master_weights")
    assert "rounding to float16 loses" in there
    assert "rounding to bfloat16 loses" in reason_of(plan(), "master_weights")
