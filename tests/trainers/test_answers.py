"""Log-probs of answers from log-probs of tokens."""

from __future__ import annotations

import math

import torch

from memtrain.trainers.losses.answers import (
    desensitised_logps,
    place_in_answer,
    sum_per_answer,
    wpo_answer_weights,
)

LENGTHS = torch.tensor([3, 0, 2])
LOGP = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])


def test_sums_per_answer_and_their_gradient():
    """(-1 - 2 - 3, nothing, -4 - 5); each token's gradient is its answer's."""
    leaf = LOGP.clone().requires_grad_()
    sums = sum_per_answer(leaf, LENGTHS)
    (sums * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert sums.tolist() == [-6.0, 0.0, -9.0]
    assert leaf.grad.tolist() == [1.0, 1.0, 1.0, 100.0, 100.0]


def test_no_token_at_all_sums_to_zeros():
    leaf = torch.zeros(0, requires_grad=True)
    sums = sum_per_answer(leaf, torch.zeros(2, dtype=torch.long))
    sums.sum().backward()
    assert sums.tolist() == [0.0, 0.0]
    assert leaf.grad.shape == (0,)


def test_places_count_from_the_start_of_each_answer():
    answer, place = place_in_answer(LENGTHS, 5)
    assert answer.tolist() == [0, 0, 0, 2, 2]
    assert place.tolist() == [0, 1, 2, 0, 1]


def test_desensitising_scales_the_tail_of_the_longer_answer():
    """Shared length 2 of lengths 3 and 2, alpha 0.5: -1 - 2 - 0.5 * 3 = -4.5, and -4 - 5 = -9."""
    lengths, shared = torch.tensor([3, 2]), torch.tensor([2, 2])
    assert desensitised_logps(LOGP, lengths, shared, alpha=0.5).tolist() == [-4.5, -9.0]
    assert desensitised_logps(LOGP, lengths, shared, alpha=1.0).tolist() == [-6.0, -9.0]


def test_wpo_weight_is_the_mean_likelihood_over_the_expected_one():
    """Two tokens, log p -4 and -5, log sum p^2 -3 and -2: exp((-1 - 3) / 2) = e^-2."""
    squares = torch.tensor([0.0, 0.0, 0.0, -3.0, -2.0])
    logp = LOGP.clone().requires_grad_()
    weights = wpo_answer_weights(logp, squares, LENGTHS)
    torch.testing.assert_close(weights, torch.tensor([math.exp(-2), 1.0, math.exp(-2)]))
    assert not weights.requires_grad
