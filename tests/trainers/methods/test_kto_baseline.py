"""KTO's baseline z: over the whole step, whatever its micro-batches, ranks, and ranks that share rows."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from memtrain.recipes.sections.methods.preference import Kto as KtoRecipe
from memtrain.trainers.methods import kto
from memtrain.trainers.protocols.method import StepPreview

NUM_ITEMS = 12


class Feed:
    """Items that are sequences of their own; a mismatched pair is its two numbers."""

    weights = np.ones(NUM_ITEMS, np.int64)
    prompts_of_items = np.arange(NUM_ITEMS)
    num_items = NUM_ITEMS

    def items_of(self, sequences):
        return np.asarray(sequences)

    def mismatched(self, prompts, answers, *, is_trial=False):
        pairs = np.stack([prompts, answers], axis=1)
        return SimpleNamespace(pairs=pairs, to=lambda device: SimpleNamespace(pairs=pairs))


def ratios_of(method, model, batch) -> torch.Tensor:
    """log policy - log reference of each pair: numbers that depend on both of its items."""
    return torch.tensor([1.0 + 0.1 * int(p) + 0.01 * int(a) for p, a in batch.pairs])


def baseline(
    monkeypatch: pytest.MonkeyPatch, shares: list[list[list[int]]], rank: int, *, num_sharing: int = 1
) -> float:
    """z on `rank`, of a step whose micro-batches are `shares[rank]`, all of which see the whole step."""
    monkeypatch.setattr(kto.Kto, "_log_ratios", ratios_of)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(kto.dist, "all_reduce", asked.append)

    def alone(micro_batches: list[list[int]]) -> kto.Kto:
        method = kto.Kto(KtoRecipe(), None)
        preview = StepPreview(
            Feed(),
            np.arange(NUM_ITEMS),
            [np.array(one) for one in micro_batches],
            torch.device("cpu"),
            len(shares),
            num_sharing=num_sharing,
            is_trial=False,
        )
        method.before_step(nn.Identity(), preview)
        return method

    # What each rank sends is added to what this one has, as the exchange does.
    for micro_batches in shares:
        alone(micro_batches)
    sent = [float(one) for one in asked]
    monkeypatch.setattr(kto.dist, "all_reduce", lambda total: total.fill_(sum(sent)))
    return float(alone(shares[rank]).baseline)


def expected() -> float:
    """The mean ratio over the step's mismatched pairs, in plain Python."""
    feed = Feed()
    partners = kto.partners_of(feed, np.arange(NUM_ITEMS))
    assert sorted(partners.tolist()) == list(range(NUM_ITEMS)), "each answer is one prompt's partner"
    pairs = np.stack([np.arange(NUM_ITEMS), partners], axis=1)
    return float(ratios_of(None, None, SimpleNamespace(pairs=pairs)).double().mean())


WHOLE = [list(range(NUM_ITEMS))]
HALVES = [[list(range(6))], [list(range(6, 9)), list(range(9, 12))]]


@pytest.mark.parametrize("shares", [[WHOLE], [[[n] for n in range(NUM_ITEMS)]]])
def test_z_is_the_mean_over_the_step_whatever_its_micro_batches(monkeypatch, shares):
    assert baseline(monkeypatch, shares, 0) == pytest.approx(expected(), rel=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_z_is_that_of_all_ranks(monkeypatch, rank: int):
    assert baseline(monkeypatch, HALVES, rank) == pytest.approx(expected(), rel=1e-6)


@pytest.mark.parametrize("num_sharing", [2, 4])
def test_ranks_that_hold_the_same_rows_count_them_once(monkeypatch, num_sharing: int):
    """Under context parallelism each of a group measures whole rows."""
    shares = [WHOLE] * num_sharing
    assert baseline(monkeypatch, shares, 0, num_sharing=num_sharing) == pytest.approx(expected(), rel=1e-6)


def test_groups_that_share_rows_and_ranks_that_do_not_go_together(monkeypatch):
    shares = [HALVES[0], HALVES[0], HALVES[1], HALVES[1]]
    assert baseline(monkeypatch, shares, 3, num_sharing=2) == pytest.approx(expected(), rel=1e-6)
