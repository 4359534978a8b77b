"""The reward model's loss by hand."""

from __future__ import annotations

import pytest
import torch

from memtrain.trainers.losses.preference.reward import bradley_terry_loss, reward_sums

CHOSEN, REJECTED = torch.tensor([1.5, 0.0]), torch.tensor([-0.5, 0.0])


def test_bradley_terry_by_hand():
    """-log sigmoid(2) = 0.126928 and log 2 = 0.693147, over 2 pairs."""
    loss = bradley_terry_loss(CHOSEN, REJECTED, num_pairs=2)
    assert loss.item() == pytest.approx((0.126928 + 0.693147) / 2, abs=2e-6)


def test_margin_and_centring_by_hand():
    """Gaps 2 - 1 and 0 - 0: 0.313262 + 0.693147; sums of rewards 1 and 0: + 0.1 * (1^2 + 0^2)."""
    loss = bradley_terry_loss(
        CHOSEN, REJECTED, num_pairs=1, margin_B=torch.tensor([1.0, 0.0]), center_coefficient=0.1
    )
    assert loss.item() == pytest.approx(0.313262 + 0.693147 + 0.1, abs=2e-6)


def test_a_tie_is_half_a_win():
    sums = reward_sums(CHOSEN, REJECTED)
    assert {name: value.item() for name, value in sums.items()} == {
        "rewards/chosen": 1.5,
        "rewards/rejected": -0.5,
        "rewards/margins": 2.0,
        "rewards/accuracies": 1.5,
    }
