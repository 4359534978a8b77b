"""Our policy losses and advantages against recorded values and gradients of TRL's GRPO and RLOO trainers.

Recorded by `benchmarks/record_trl_policy.py`; versions and command are in the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.policy.registry import (
    Clip,
    Norms,
    PolicyBatch,
    PolicyKnobs,
    entropy_threshold,
    mismatch,
    policy_loss,
)
from memtrain.trainers.losses.policy.sequence_level import (
    answer_log_ratio,
    penalised_rewards,
    sequence_clipped_loss,
)
from memtrain.trainers.online.rollout.advantages import (
    decoupled_advantages,
    group_advantages,
    leave_one_out_advantages,
    weighted_rewards,
)

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "trl_policy.json").read_text())
BATCH = RECORDED["batch"]
LENGTHS = torch.tensor(BATCH["lengths"])
NORMS = Norms(
    num_answers=len(LENGTHS),
    num_tokens=float(LENGTHS.sum()),
    rollout_tokens=RECORDED["rollout_tokens"] / 2,
    max_tokens=RECORDED["max_tokens"],
)
USUAL = {"token", "sum_then_normalize", 0.2, 1.0, 0.0, None}


def cases(trainer: str) -> list:
    def name(case: dict) -> str:
        knobs = case["knobs"].items()
        return "-".join(f"{k}={v}" for k, v in knobs if isinstance(v, list) or v not in USUAL) or "plain"

    return [pytest.param(case, id=name(case)) for case in RECORDED["cases"] if case["trainer"] == trainer]


def flat(name: str) -> Tensor:
    return torch.tensor([x for row in BATCH[name] for x in row])


def rewards_of(case: dict) -> Tensor:
    return torch.tensor([[math.nan if x is None else x for x in row] for row in case["rewards"]])


def knobs_of(recorded: dict) -> PolicyKnobs:
    return PolicyKnobs(
        loss=recorded["loss_type"],
        level=recorded["importance_sampling_level"],
        clip=Clip(recorded["epsilon_low"], recorded["epsilon_high"], recorded["delta"]),
        cispo_max_weight=recorded["epsilon_high"],
        beta=recorded["beta"],
        unbiased_kl=recorded["use_bias_correction_kl"],
        entropy_coef=recorded["entropy_coef"],
        off_policy_limit=recorded["off_policy_mask_threshold"],
    )


def batch_of(recorded: dict, logp: Tensor, entropy: Tensor) -> PolicyBatch:
    kept = mismatch_N = None
    if recorded["top_entropy_quantile"] < 1:
        kept = entropy >= entropy_threshold(entropy.detach(), recorded["top_entropy_quantile"])
    if recorded["mode"]:
        mismatch_N = mismatch(
            flat("old"),
            flat("sampler"),
            LENGTHS,
            recorded["mode"],
            lowest=recorded["clip_min"],
            highest=recorded["clip_max"],
        ).weight_N
    return PolicyBatch(
        logp_N=logp,
        lengths_A=LENGTHS,
        advantage_A=torch.tensor(BATCH["advantages"]),
        old_logp_N=flat("old") if recorded["has_old"] else None,
        sampler_logp_N=flat("sampler") if recorded["mode"] else None,
        reference_N=flat("reference"),
        entropy_N=entropy,
        mismatch_N=mismatch_N,
        is_kept_N=kept,
    )


@pytest.mark.parametrize("case", cases("grpo"))
def test_losses_agree_with_grpo_trainer(case):
    logp, entropy = flat("logp").requires_grad_(), flat("entropy").requires_grad_()
    batch = batch_of(case["knobs"], logp, entropy)
    kept = None if batch.is_kept_N is None else float(batch.is_kept_N.sum())
    made = policy_loss(batch, knobs_of(case["knobs"]), replace(NORMS, kept_tokens=kept))
    made.value.backward()
    expected = torch.tensor([x for row in case["gradient"] for x in row])
    torch.testing.assert_close(made.value.detach(), torch.tensor(case["loss"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.grad, expected, rtol=1e-5, atol=1e-5)
    if case["entropy_gradient"]:
        expected = torch.tensor([x for row in case["entropy_gradient"] for x in row])
        torch.testing.assert_close(entropy.grad, expected, rtol=1e-5, atol=1e-5)


OURS = {"kl": "kl", "entropy": "entropy", "clip_ratio/low_mean": "clip_low", "cispo_clip_ratio": "clip_high"}


# With a sequence level TRL counts answers where we count tokens; with delta it counts what that has moved.
ALIKE = [
    case
    for case in cases("grpo")
    if case.values[0]["knobs"]["importance_sampling_level"] == "token"
    and case.values[0]["knobs"]["delta"] is None
]


@pytest.mark.parametrize("case", ALIKE)
def test_metrics_agree_with_grpo_trainer(case):
    knobs = knobs_of(case["knobs"])
    sums = policy_loss(batch_of(case["knobs"], flat("logp"), flat("entropy")), knobs, NORMS).sums
    for theirs, ours in OURS.items():
        if theirs in case["metrics"]:
            mean = sums[ours].item() / NORMS.num_tokens
            assert mean == pytest.approx(case["metrics"][theirs], abs=1e-5), theirs


@pytest.mark.parametrize("case", cases("rloo"))
def test_losses_agree_with_rloo_trainer(case):
    logp = flat("logp").requires_grad_()
    clip = Clip(case["knobs"]["epsilon_low"], case["knobs"]["epsilon_high"])
    ratio = answer_log_ratio(logp, flat("old"), LENGTHS)
    loss = sequence_clipped_loss(ratio, torch.tensor(BATCH["advantages"]), clip, num_answers=len(LENGTHS))
    loss.backward()
    expected = torch.tensor([x for row in case["gradient"] for x in row])
    torch.testing.assert_close(loss.detach(), torch.tensor(case["loss"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", cases("grpo_advantages"))
def test_advantages_agree_with_grpo_trainer(case):
    rewards, knobs = rewards_of(case), case["knobs"]
    weights = torch.tensor(knobs["weights"])
    if knobs["aggregation"] == "normalize_then_sum":
        made = decoupled_advantages(rewards, weights, RECORDED["group"])
    else:
        made = group_advantages(weighted_rewards(rewards, weights), RECORDED["group"], knobs["scale"])
    torch.testing.assert_close(made, torch.tensor(case["advantages"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", cases("rloo_advantages"))
def test_advantages_agree_with_rloo_trainer(case):
    knobs = case["knobs"]
    rewards = weighted_rewards(rewards_of(case), torch.tensor(knobs["weights"]))
    if knobs["reward_clip_range"]:
        rewards = rewards.clamp(*knobs["reward_clip_range"])
    if knobs["beta"]:
        kl = sum_per_answer(flat("old") - flat("reference"), LENGTHS)
        rewards = penalised_rewards(rewards, kl, beta=knobs["beta"])
    made = leave_one_out_advantages(rewards, RECORDED["group"], normalise=knobs["normalize_advantages"])
    torch.testing.assert_close(made, torch.tensor(case["advantages"]), rtol=1e-5, atol=1e-5)


def test_recorded_values_say_where_they_come_from():
    assert RECORDED["versions"]["trl"].startswith("1.16")
    assert "record_trl_policy.py" in RECORDED["command"]
    assert len(RECORDED["cases"]) > 80
