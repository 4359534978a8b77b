"""Advantages by hand: two groups of two or three rewards."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.online.rollout.advantages import (
    decoupled_advantages,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    weighted_rewards,
    zero_std_groups,
)

REWARDS = torch.tensor([1.0, 0.0, 3.0, 3.0])
NAN = math.nan


def test_group_advantages_by_hand():
    """Groups (1, 0) and (3, 3): means 0.5 and 3, deviations sqrt(0.5) and 0."""
    deviation = math.sqrt(0.5) + 1e-4
    assert group_advantages(REWARDS, 2, "none").tolist() == pytest.approx([0.5, -0.5, 0, 0])
    assert group_advantages(REWARDS, 2, "group").tolist() == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, 0, 0]
    )
    batch = 1.5 + 1e-4  # mean 1.75; squares 0.5625 + 3.0625 + 2 * 1.5625 = 6.75; / 3 = 2.25
    assert group_advantages(REWARDS, 2, "batch").tolist() == pytest.approx([0.5 / batch, -0.5 / batch, 0, 0])


def test_leave_one_out_advantages_by_hand():
    """Group (1, 0, 5): the others' means 2.5, 3, 0.5."""
    made = leave_one_out_advantages(torch.tensor([1.0, 0.0, 5.0]), 3, normalise=False)
    assert made.tolist() == pytest.approx([-1.5, -3.0, 4.5])


def test_normalised_advantages_have_mean_zero_and_deviation_one():
    made = leave_one_out_advantages(torch.tensor([1.0, 0.0, 5.0, 1.0, 1.0, 2.0]), 3, normalise=True)
    assert made.mean().item() == pytest.approx(0, abs=1e-6)
    assert made.std().item() == pytest.approx(1, abs=1e-3)


def test_an_answer_without_a_verdict_moves_nothing():
    rewards = torch.tensor([1.0, NAN, 0.0, 2.0, NAN, NAN])
    made = leave_one_out_advantages(rewards, 3, normalise=False)
    assert made.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    made = group_advantages(rewards, 3, "none")
    assert made.tolist() == pytest.approx([0.5, 0.0, -0.5, 0.0, 0.0, 0.0])


def test_rewards_are_weighted_and_missing_ones_left_out():
    rewards = torch.tensor([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]])
    made = weighted_rewards(rewards, torch.tensor([1.0, 0.5]))
    assert made[:2].tolist() == [2.0, 1.0]
    assert made[2].isnan()


def test_decoupled_advantages_give_every_reward_the_same_say():
    """The second reward is ten times the first: summed first it would drown it; here they cancel."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 10.0], [1.0, 10.0], [0.0, 0.0]])
    made = decoupled_advantages(rewards, torch.ones(2), 2)
    assert made[:2].tolist() == pytest.approx([0, 0], abs=1e-3)
    assert made[2] == pytest.approx(-made[3].item())
    assert made[2] > 1


def test_zero_std_groups_are_found():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert zero_std_groups(rewards, 2).tolist() == [True, False, True, True]


def test_generalised_advantages_by_hand():
    """gamma, lambda 0.5. r 0, 2 and V 1, 2: deltas 0 + 1 - 1 = 0 and 2 - 2 = 0. r 1 and V 0: 1."""
    advantage, returns = generalised_advantages(
        torch.tensor([0.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 0.0]), [2, 1], gamma=0.5, lam=0.5
    )
    assert advantage.tolist() == [0.0, 0.0, 1.0]
    assert returns.tolist() == [1.0, 2.0, 1.0]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=6),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_generalised_advantages_are_the_sum_of_discounted_deltas(tokens, gamma, lam):
    reward = torch.tensor([r for r, _ in tokens], dtype=torch.float64)
    value = torch.tensor([v for _, v in tokens], dtype=torch.float64)
    later = torch.cat([value[1:], value.new_zeros(1)])
    delta = reward + gamma * later - value
    expected = [
        sum((gamma * lam) ** (s - t) * delta[s].item() for s in range(t, len(tokens)))
        for t in range(len(tokens))
    ]
    made, _ = generalised_advantages(reward, value, [len(tokens)], gamma=gamma, lam=lam)
    assert made.tolist() == pytest.approx(expected, abs=1e-9)
