"""Losses of unpaired feedback by hand, and their baseline for any batch size."""

from __future__ import annotations

import pytest
import torch

from memtrain.trainers.losses.preference.kto import apo_zero_unpaired_loss, kl_baseline, kto_loss

RATIO = torch.tensor([2.0, -2.0])
LABEL = torch.tensor([True, False])


def test_kto_by_hand():
    """beta 0.5, z 1: (1.2 (1 - sigmoid(0.5)) + 0.7 (1 - sigmoid(1.5))) / 2 = (0.453049 + 0.127698) / 2."""
    loss = kto_loss(
        RATIO, LABEL, torch.tensor(1.0), num_rows=2, beta=0.5, desirable_weight=1.2, undesirable_weight=0.7
    )
    assert loss.item() == pytest.approx(0.290373, abs=2e-6)


def test_apo_zero_unpaired_by_hand():
    """beta 0.5: (1 - sigmoid(1) + sigmoid(-1)) / 2 = 0.268941."""
    loss = apo_zero_unpaired_loss(RATIO, LABEL, num_rows=2, beta=0.5)
    assert loss.item() == pytest.approx(0.268941, abs=2e-6)


def test_baseline_is_a_mean_that_is_never_negative_and_never_learns():
    ratio = torch.tensor([3.0, -1.0], requires_grad=True)
    assert kl_baseline(ratio.sum(), 2).item() == 1.0
    assert kl_baseline(-ratio.sum(), 2).item() == 0.0
    assert not kl_baseline(ratio.sum(), 2).requires_grad


def test_one_row_at_a_time_equals_one_batch():
    """The baseline and the count are of the whole step: a micro-batch of one row is exact."""
    baseline = kl_baseline(torch.tensor(1.5), 3)
    whole = kto_loss(RATIO, LABEL, baseline, num_rows=2, beta=0.1)
    rows = [kto_loss(RATIO[i : i + 1], LABEL[i : i + 1], baseline, num_rows=2, beta=0.1) for i in range(2)]
    torch.testing.assert_close(sum(rows), whole)


def test_desirable_answers_rise_and_undesirable_ones_fall():
    leaf = RATIO.clone().requires_grad_()
    kto_loss(leaf, LABEL, torch.tensor(0.0), num_rows=2, beta=0.1).backward()
    assert leaf.grad[0] < 0 < leaf.grad[1]


def test_no_row_of_one_kind_is_fine():
    leaf = RATIO.clone().requires_grad_()
    apo_zero_unpaired_loss(leaf, torch.tensor([True, True]), num_rows=2, beta=0.1).backward()
    assert (leaf.grad < 0).all()
