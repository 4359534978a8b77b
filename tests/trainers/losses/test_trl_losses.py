"""Our preference, KTO and reward losses against recorded values and gradients of TRL's own trainers.

Recorded by `benchmarks/record_trl_losses.py`; versions and command are in the file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memtrain.trainers.losses.answers import desensitised_logps, sum_per_answer, wpo_answer_weights
from memtrain.trainers.losses.preference.kto import apo_zero_unpaired_loss, kl_baseline, kto_loss
from memtrain.trainers.losses.preference.pairs import Divergence, PairKnobs, PairLogps
from memtrain.trainers.losses.preference.registry import preference_loss, preference_sums
from memtrain.trainers.losses.preference.reward import bradley_terry_loss

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "trl_losses.json").read_text())
BATCH = RECORDED["batch"]
LENGTHS = torch.tensor(BATCH["lengths"])
REFERENCE = torch.tensor(BATCH["reference"])


def cases(trainer: str) -> list:
    def name(case: dict) -> str:
        changed = {k: v for k, v in case["knobs"].items() if v not in (None, False, 0.0, "reverse_kl")}
        return f"{'+'.join(case.get('parts', {}))}-{changed}"

    return [pytest.param(case, id=name(case)) for case in RECORDED["cases"] if case["trainer"] == trainer]


def token_leaf() -> Tensor:
    return torch.tensor([x for row in BATCH["logps"] for x in row]).requires_grad_()


def assert_same(loss: Tensor, leaf: Tensor, case: dict) -> None:
    loss.backward()
    expected = case["gradient"]
    flat = [x for row in expected for x in row] if isinstance(expected[0], list) else expected
    torch.testing.assert_close(loss.detach(), torch.tensor(case["loss"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaf.grad, torch.tensor(flat), rtol=1e-5, atol=1e-5)


def knobs_of(case: dict) -> PairKnobs:
    recorded = case["knobs"]
    return PairKnobs(
        beta=recorded["beta"],
        label_smoothing=recorded["label_smoothing"],
        divergence=Divergence(recorded.get("f_divergence_type", "reverse_kl")),
        # TRL 1.16 spells the alpha of the paper as 1 - alpha.
        divergence_alpha=1.0 - recorded.get("f_alpha_divergence_coef", 0.5),
    )


@pytest.mark.parametrize("case", cases("dpo"))
def test_preference_losses_agree_with_dpo_trainer(case):
    leaf = token_leaf()
    lengths_c, lengths_r = LENGTHS.chunk(2)
    logps = sum_per_answer(leaf, LENGTHS)
    plain_chosen = logps.chunk(2)[0]
    if case["knobs"]["ld_alpha"] is not None:
        shared = torch.minimum(lengths_c, lengths_r).repeat(2)
        logps = desensitised_logps(leaf, LENGTHS, shared, alpha=case["knobs"]["ld_alpha"])
    pairs = PairLogps(*logps.chunk(2), *REFERENCE.chunk(2), lengths_c, lengths_r, plain_chosen)
    weights = None
    if case["knobs"]["use_weighting"]:
        squares = torch.tensor([x for row in BATCH["log_sum_squares"] for x in row])
        chosen, rejected = wpo_answer_weights(leaf, squares, LENGTHS).chunk(2)
        weights = chosen * rejected
    loss = preference_loss(
        pairs,
        case["parts"],
        knobs_of(case),
        num_pairs=len(lengths_c),
        num_chosen_tokens=lengths_c.sum().item(),
        pair_weights_B=weights,
    )
    assert_same(loss, leaf, case)
    sums = preference_sums(pairs, knobs_of(case))
    for name, value in case["metrics"].items():
        assert sums[name].item() / len(lengths_c) == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("case", cases("kto"))
def test_unpaired_losses_agree_with_kto_trainer(case):
    leaf = token_leaf()
    ratio = sum_per_answer(leaf, LENGTHS) - REFERENCE
    labels = torch.tensor(BATCH["labels"])
    knobs = dict(case["knobs"])
    kind = knobs.pop("loss_type")
    if kind == "kto":
        baseline = kl_baseline(torch.tensor(BATCH["mismatched"]).sum(), len(LENGTHS))
        assert baseline.item() == pytest.approx(case["metrics"]["kl"], abs=1e-6)
        loss = kto_loss(ratio, labels, baseline, num_rows=len(LENGTHS), **knobs)
    else:
        loss = apo_zero_unpaired_loss(ratio, labels, num_rows=len(LENGTHS), **knobs)
    assert_same(loss, leaf, case)


@pytest.mark.parametrize("case", cases("reward"))
def test_reward_loss_agrees_with_reward_trainer(case):
    leaf = torch.tensor(BATCH["rewards"]).requires_grad_()
    loss = bradley_terry_loss(
        *leaf.chunk(2),
        num_pairs=len(LENGTHS) // 2,
        margin_B=torch.tensor(BATCH["margins"]) if case["knobs"]["with_margin"] else None,
        center_coefficient=case["knobs"]["center"] or 0.0,
    )
    assert_same(loss, leaf, case)


@pytest.mark.parametrize("case", cases("free"))
def test_reference_free_losses_agree_with_cpo_and_orpo_trainers(case):
    """TRL's own sums hand these losses log-probs per token for SimPO and ORPO, whole ones for CPO."""
    (name,) = case["parts"]
    scale = torch.ones(len(LENGTHS)) if name == "cpo" else LENGTHS.float()
    per_token = torch.tensor([sum(row) for row in BATCH["logps"]]) / scale
    leaf = per_token.requires_grad_()
    chosen, rejected = (leaf * scale).chunk(2)
    lengths = scale.chunk(2)
    pairs = PairLogps(chosen, rejected, None, None, *lengths)
    loss = preference_loss(pairs, case["parts"], knobs_of(case), num_pairs=len(chosen))
    assert_same(loss, leaf, case)


def test_recorded_values_say_where_they_come_from():
    assert RECORDED["versions"]["trl"].startswith("1.16")
    assert "record_trl_losses.py" in RECORDED["command"]
    assert len(RECORDED["cases"]) > 80
