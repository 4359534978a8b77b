"""The loss of the first update of a rollout, computed in plain Python from lengths, cuts and advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import ONLINE, run_in, steps

from memtrain.trainers.online.rollout.advantages import AdvantageStep

RECIPE = ONLINE + 'rewards:\n  functions: [{{function: "{rewards}:short"}}]\n'
REWARDS = """
def short(completions):
    return [-len(text) / 50 + 3.0 * (number % 3) for number, text in enumerate(completions)]
"""
MAX_TOKENS = 10


def expected(loss: str, window: Any, *, masks: bool) -> float:
    """At ratio 1 an answer's surrogate is minus its advantage at each token.

    Sources: grpo: arXiv:2402.03300, eq. 3; dapo: arXiv:2503.14476, eq. 8; dr_grpo: arXiv:2503.20783, section
    3.2; bnpo and luspo: means over a step's tokens, sums over answers.
    """
    may_learn = [not (cut and masks) for cut in window.is_cut_A]
    lengths = [int(one) for one in window.length_A]
    of_step = [part == 0 for part in window.part_A]
    num_parts = len(set(window.part_A.tolist()))
    learned = [may and here for may, here in zip(may_learn, of_step, strict=True)]
    sums = [
        -float(advantage) * length * learns
        for advantage, length, learns in zip(window.advantage_A, lengths, learned, strict=True)
    ]
    num_answers = sum(of_step)
    step_tokens = sum(length for length, learns in zip(lengths, learned, strict=True) if learns)
    rollout_tokens = sum(length for length, may in zip(lengths, may_learn, strict=True) if may) / num_parts
    if loss == "grpo":
        return sum(one / length for one, length in zip(sums, lengths, strict=True)) / num_answers
    divisor = {
        "dapo": rollout_tokens,
        "bnpo": step_tokens,
        "dr_grpo": num_answers * MAX_TOKENS,
        "luspo": num_answers,
    }[loss]
    return sum(sums) / divisor


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("loss", ["dapo", "grpo", "bnpo", "dr_grpo", "luspo"])
def test_masked_answers_are_in_no_sum_and_in_no_divisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, masks: bool
):
    (tmp_path / "rewards.py").write_text(REWARDS)
    windows: list[Any] = []
    plain = AdvantageStep.weigh

    def weigh(step: AdvantageStep, window: Any) -> None:
        plain(step, window)
        windows.append(window)

    monkeypatch.setattr(AdvantageStep, "weigh", weigh)
    said = (
        *(f"grpo.loss={loss}", f"grpo.mask_truncated={str(masks).lower()}", "grpo.steps_per_rollout=2"),
        # Some answers end at a letter, others are cut.
        *("train.max_steps=2", "eval.every_steps=null", "data.eval_fraction=0", "save.every_steps=2"),
        *("generate.temperature=1.0", "generate.max_tokens=10", "generate.num_generations=8"),
        "generate.stop=[w]",
    )
    recipe = RECIPE.format(method="grpo", cache=tmp_path / "cache", rewards=tmp_path / "rewards.py")
    first = steps(run_in(tmp_path, "grpo", recipe, said, "run"))[0]
    (window,) = windows[:1]
    assert len({int(part) for part in window.part_A}) == 2
    assert first["loss"] == pytest.approx(expected(loss, window, masks=masks), rel=1e-4, abs=1e-6)
    assert np.any(window.is_cut_A), "some answers are cut"
    assert not np.all(window.is_cut_A), "some answers end"
