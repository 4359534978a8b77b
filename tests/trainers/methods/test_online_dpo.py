"""Online DPO: which completions are a pair, what its losses are, and how pairs become micro-batches."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from memtrain.trainers.losses.answers import sum_per_answer
from memtrain.trainers.losses.preference.online_pairs import online_pair_loss
from memtrain.trainers.methods.online_dpo import best_and_worst
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.pair_batches import PairFeed
from memtrain.trainers.online.rollout.protocol import ScoredRollout
from memtrain.trainers.online.rollout.rollout_batches import Rollout, new_window

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "trl_online_dpo.json").read_text())
NAN = math.nan


def scored(rewards: list[float], group_size: int, may_learn: list[bool] | None = None) -> ScoredRollout:
    values = torch.tensor(rewards, dtype=torch.float64)[:, None]
    learns = torch.tensor(may_learn or [True] * len(rewards))
    return ScoredRollout(values, torch.ones(1, dtype=torch.float64), group_size, learns)


def test_the_best_and_the_worst_of_a_group_are_its_pair():
    found = best_and_worst(scored([0.2, 1.0, -1.0, 0.5, 3.0, 1.0, 2.0, 0.0], 4))
    assert found.tolist() == [0, 1, -1, 0, 1, 0, 0, -1]


def test_a_group_of_equals_has_no_pair():
    assert best_and_worst(scored([1.0, 1.0, 0.0, 1.0], 2)).tolist() == [0, 0, -1, 1]


def test_the_first_of_several_that_are_equally_good_is_taken():
    assert best_and_worst(scored([0.0, 1.0, 1.0, 0.0], 4)).tolist() == [-1, 1, 0, 0]


def test_no_verdict_is_neither_best_nor_worst():
    assert best_and_worst(scored([NAN, 1.0, 0.0, NAN, NAN, 5.0], 3)).tolist() == [0, 1, -1, 0, 0, 0]


def test_a_completion_that_may_not_be_trained_on_is_in_no_pair():
    may_learn = [False, True, True, True]
    assert best_and_worst(scored([9.0, 1.0, 0.0, 0.5], 4, may_learn)).tolist() == [0, 1, -1, 0]


def test_a_pair_needs_the_margin_that_is_asked_for():
    assert best_and_worst(scored([1.0, 0.5, 1.0, 0.0], 2), 0.5).tolist() == [0, 0, 1, -1]


def test_losses_by_hand():
    """beta 0.5, margins 2 and -1: sigmoid log(1 + e^-1) + log(1 + e^0.5); ipo (2 - 1)^2 + (-1 - 1)^2 = 5."""
    margins = torch.tensor([2.0, -1.0])
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(0.5))) / 4
    assert online_pair_loss(margins, loss="sigmoid", beta=0.5, num_pairs=4).item() == pytest.approx(expected)
    assert online_pair_loss(margins, loss="ipo", beta=0.5, num_pairs=4).item() == pytest.approx(5 / 4)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['loss_type']}-{case['beta']}")
def test_losses_and_gradients_are_those_of_trl(case: dict):
    """TRL has the first completions of all prompts, then the second ones; ours stand prompt by prompt."""
    batch = RECORDED["batch"]
    half = len(batch["lengths"]) // 2
    order = [place for prompt in range(half) for place in (prompt, prompt + half)]
    signs = best_and_worst(scored([batch["rewards"][one] for one in order], 2))
    pairs = []
    for prompt in range(half):
        of_prompt = signs[2 * prompt : 2 * prompt + 2]
        pairs += [order[2 * prompt + int(of_prompt.argmax())], order[2 * prompt + int(of_prompt.argmin())]]
    logp_N = torch.tensor([x for one in pairs for x in batch["logp"][one]], requires_grad=True)
    reference_N = torch.tensor([x for one in pairs for x in batch["reference"][one]])
    lengths_A = torch.tensor([batch["lengths"][one] for one in pairs])
    chosen_B, rejected_B = sum_per_answer(logp_N - reference_N, lengths_A).view(-1, 2).unbind(1)
    loss = online_pair_loss(chosen_B - rejected_B, loss=case["loss_type"], beta=case["beta"], num_pairs=half)
    loss.backward()
    expected = torch.tensor([x for one in pairs for x in case["gradient"][one]])
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    torch.testing.assert_close(logp_N.grad, expected, rtol=1e-5, atol=1e-7)


def window_of_pairs() -> Rollout:
    """Three prompts of 5, 3 and 4 tokens with three completions each; the second prompt has no pair."""
    lengths = [[2, 3, 4], [2, 2, 2], [5, 1, 3]]
    samples = [[Sample(tuple(range(n)), (-1.0,) * n, "stop") for n in group] for group in lengths]
    prompts = [[7] * 5, [8] * 3, [9] * 4]
    window = new_window(0, [0, 1, 2], [0, 0, 0], prompts, samples, 1)
    window.advantage_A = np.array([0, -1, 1, 0, 0, 0, 1, 0, -1], np.float32)
    window.is_trained_A = window.advantage_A != 0
    return window


class OfPairs(PairFeed):
    """A feed without rows or model."""

    def __init__(self, shared: bool = True) -> None:
        self.window = window_of_pairs()
        self.settings = type("Settings", (), {"shared_prompts": shared})()  # type: ignore[assignment]
        self._tokens = np.zeros(0, np.int64)


def test_a_sequence_is_a_pair_chosen_first():
    feed = OfPairs()
    answers = np.flatnonzero(feed.window.is_trained_A)
    assert feed.sequences_of(answers).tolist() == [0, 2]
    assert feed.answers_of(np.array([0, 2])).tolist() == [2, 1, 6, 8]
    assert feed.loss_tokens.tolist() == [7, 0, 8]


@pytest.mark.parametrize(
    ("rows", "tokens", "expected"), [(1, None, [[0], [2]]), (4, None, [[0, 2]]), (4, 20, [[0], [2]])]
)
def test_a_pair_is_never_divided(rows: int, tokens: int | None, expected: list[list[int]]):
    """The first costs 5 + 4 + 3 = 12 tokens, the second 4 + 5 + 3 = 12."""
    feed = OfPairs()
    made = feed.deal(np.flatnonzero(feed.window.is_trained_A), micro_batch_size=rows, micro_tokens=tokens)
    assert [micro_batch.tolist() for micro_batch in made] == expected
    assert feed.tokens.tolist() == [12, 0, 12]


def test_apart_each_answer_pays_for_its_prompt():
    feed = OfPairs(shared=False)
    feed.deal(np.flatnonzero(feed.window.is_trained_A), micro_batch_size=9, micro_tokens=None)
    assert feed.tokens.tolist() == [17, 0, 16]


def test_pairs_that_are_summed_in_parts_are_the_whole():
    margins: Tensor = torch.linspace(-2, 2, 6)
    whole = online_pair_loss(margins, loss="sigmoid", beta=0.3, num_pairs=6)
    parts = sum(
        online_pair_loss(part, loss="sigmoid", beta=0.3, num_pairs=6) for part in margins.split([1, 3, 2])
    )
    torch.testing.assert_close(whole, parts)
