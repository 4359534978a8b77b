"""PPO by hand: rewards of tokens, advantages, the loss, and beta's control."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from memtrain.recipes.sections.methods.ppo import Ppo as PpoRecipe
from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.policy.registry import Norms
from memtrain.trainers.methods.ppo import Ppo, adapted
from memtrain.trainers.model.heads.value_head import Valued
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.advantages import standardised
from memtrain.trainers.online.rollout.protocol import ScoredRollout
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro, Rollout, new_window


def a_window() -> Rollout:
    """Two prompts with one completion each: two tokens, then one that was cut."""
    samples = [[Sample((1, 2), (-1.0, -1.0), "stop")], [Sample((3,), (-1.0,), "length")]]
    window = new_window(0, [0, 1], [0, 0], [[5], [6]], samples, 1)
    window.old_N = np.array([-1.0, -2.0, -0.5], np.float32)
    window.reference_N = np.array([-1.5, -1.0, -0.5], np.float32)
    window.value_N = np.array([0.25, 0.5, 1.0], np.float32)
    return window


def scored(*rewards: float) -> ScoredRollout:
    values = torch.tensor(rewards, dtype=torch.float64)[:, None]
    return ScoredRollout(
        values, torch.ones(1, dtype=torch.float64), 1, torch.ones(len(rewards), dtype=torch.bool)
    )


def weighed(window: Rollout, rewards: tuple[float, float], **knobs: Any) -> tuple[Ppo, dict[str, float]]:
    section = PpoRecipe(normalize_advantages=False, **knobs)
    method = Ppo(section, None, beta=section.beta)
    return method, method.weigh_tokens(window, scored(*rewards))


def test_advantages_and_returns_by_hand():
    """beta 0.1: rewards of tokens -0.1 * 0.5 = -0.05, -0.1 * -1 + 2 = 2.1; and 0 + 3 = 3.

    gamma 0.9, lambda 0.5: last token 2.1 - 0.5 = 1.6; first -0.05 + 0.9 * 0.5 - 0.25 + 0.45 * 1.6 = 0.87; the
    cut one 3 - 1 = 2.
    """
    window = a_window()
    _, reported = weighed(window, (2.0, 3.0), beta=0.1, gamma=0.9, gae_lambda=0.5)
    assert window.token_advantage_N is not None
    assert window.return_N is not None
    assert window.token_advantage_N.tolist() == pytest.approx([0.87, 1.6, 2.0])
    assert window.return_N.tolist() == pytest.approx([1.12, 2.1, 3.0])
    assert window.advantage_A.tolist() == pytest.approx([(0.87 + 1.6) / 2, 2.0])
    # (0.5 - 1) and 0 nats of the two completions.
    assert reported["kl"] == pytest.approx(-0.25)
    assert reported["beta"] == 0.1


def test_a_cut_completion_may_cost():
    window = a_window()
    weighed(window, (2.0, 3.0), beta=0.0, cut_penalty=0.5)
    assert window.return_N is not None
    assert window.return_N[2] == pytest.approx(2.5)
    assert window.return_N[1] == pytest.approx(2.0)


def test_a_completion_without_a_verdict_is_not_trained_on():
    window = a_window()
    weighed(window, (math.nan, 3.0), beta=0.0)
    assert window.is_trained_A.tolist() == [False, True]


@pytest.mark.parametrize(
    ("kl", "expected"), [(6.0, 0.1), (6.6, 0.101), (60.0, 0.102), (0.0, 0.098), (-9.0, 0.098)]
)
def test_beta_follows_the_divergence(kl: float, expected: float):
    """Target 6, a tenth of the horizon seen: 0.1 * (1 + 0.1 * clip(kl / 6 - 1, +-0.2))."""
    assert adapted(0.1, kl, 6.0, 0.1) == pytest.approx(expected)


def test_beta_goes_on_from_a_checkpoint():
    window = a_window()
    method, _ = weighed(window, (2.0, 3.0), beta=0.1, kl_target=1.0, kl_horizon=20)
    # kl -0.25: error -1.25, clipped to -0.2, times 2 / 20.
    assert method.beta == pytest.approx(0.1 * (1 - 0.02))
    again = Ppo(method.section, None, beta=method.section.beta)
    again.go_on(method.kept())
    assert again.beta == method.beta


def test_only_loss_tokens_are_brought_to_mean_zero():
    """1 and 3: mean 2, deviation sqrt(2); the third is not trained on and counts in neither."""
    made = standardised(torch.tensor([1.0, 3.0, 8.0]), torch.tensor([True, True, False]))
    assert made.tolist() == pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4), 6 / (2**0.5 + 1e-4)])


class Answers(nn.Module):
    """A scorer with fixed log-probs and values."""

    def __init__(self) -> None:
        super().__init__()
        self.logp = nn.Parameter(torch.tensor([-1.0, -2.0, -0.5]))
        self.value = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

    def forward(self, *given: Any) -> Valued:
        entropy = torch.tensor([0.1, 0.2, 0.3])
        return Valued(LogprobResult(self.logp, entropy, None), self.value)


def test_the_loss_by_hand():
    """Ratios 1, e^0.5 (clipped at 1.2), 1; advantages 1, 2, -1: policy -(1 + 2.4 - 1) / 3.

    Values against returns 1, 1, 2, with old values 0, 1, 1 and clip 0.2: errors 1, 0 and max(0, (1.2 - 2)^2):
    0.5 * (1 + 0 + 0.64) / 3.
    """
    micro_batch = PolicyMicro(
        answers=SimpleNamespace(  # type: ignore[arg-type]
            micro_batch=SimpleNamespace(targets=None, scored_index=None, model_inputs=dict),
            lengths_A=torch.tensor([2, 1]),
        ),
        advantage_A=torch.zeros(2),
        sampler_N=torch.tensor([-1.0, -2.0, -0.5]),
        old_N=torch.tensor([-1.0, -2.5, -0.5]),
        reference_N=None,
        is_kept_N=None,
        norms=Norms(num_answers=2, num_tokens=3, rollout_tokens=3, max_tokens=4),
        value_N=torch.tensor([0.0, 1.0, 1.0]),
        token_advantage_N=torch.tensor([1.0, 2.0, -1.0]),
        return_N=torch.tensor([1.0, 1.0, 2.0]),
    )
    model = Answers()
    method = Ppo(PpoRecipe(value_coef=0.1), None, beta=0.05)
    made = method.loss(model, micro_batch, denominator=1.0, want_stats=True)
    policy, value = -(1 + 2.4 - 1) / 3, 0.5 * (1 + 0 + 0.64) / 3
    assert made.value.item() == pytest.approx(policy + 0.1 * value, rel=1e-5)
    means = method.means({name: one.item() for name, one in made.sums.items()}, 3.0)
    assert means["loss/policy"] == pytest.approx(policy, rel=1e-5)
    assert means["loss/value"] == pytest.approx(value, rel=1e-5)
    assert means["clip_high"] == pytest.approx(1 / 3)
    made.value.backward()
    assert model.logp.grad is not None
    # The clipped token has no gradient; those of the others are -advantage / 3.
    assert model.logp.grad.tolist() == pytest.approx([-1 / 3, 0.0, 1 / 3])
