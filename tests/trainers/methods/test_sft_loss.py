"""The method `sft` on a micro-batch: each form of its loss, and its sums, from logits in plain float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from memtrain.recipes.sections.methods.sft import Sft as SftRecipe
from memtrain.trainers.batches.collate import MicroBatch, Piece, pad_right
from memtrain.trainers.methods.sft import Sft
from memtrain.trainers.model.heads.lm_head import Scorer

DENOMINATOR = 37.0
"""Loss tokens of a whole step, of which a micro-batch has some."""
SMOOTHING, Z = 0.1, 0.01


def micro_batch() -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for length, first in ((12, 4), (7, 1), (9, 8)):
        is_loss = np.arange(length) >= first
        ids = torch.randint(0, 128, (length,), generator=generator).int().numpy()
        pieces.append(Piece(ids, is_loss))
    return pad_right(pieces, pad_id=0)


def by_hand(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits of every scored position [N, V], targets [N]) in float64."""
    logits = model(input_ids=batch.input_ids, attention_mask=None, position_ids=batch.position_ids).logits
    return logits.reshape(-1, logits.shape[-1])[batch.scored_index].double(), batch.targets.long()


FORMS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "nll": ({}, lambda logp, z: -logp[0]),
    "smoothed": (
        {"label_smoothing": SMOOTHING},
        lambda logp, z: -(1 - SMOOTHING) * logp[0] - SMOOTHING * logp[1],
    ),
    "z loss": ({"z_loss": Z}, lambda logp, z: -logp[0] + Z * z.square()),
    "dft": ({"loss": "dft"}, lambda logp, z: -logp[0].exp().detach() * logp[0]),
}
"""Keys of the recipe; the loss of a token from its (log-prob, mean log-prob of the vocabulary) and logsumexp.
Sources: Szegedy et al. 2016, arXiv:1512.00567, section 7; PaLM, arXiv:2204.02311, section 5; DFT,
arXiv:2508.05629, eq. 9."""


@pytest.mark.parametrize("want_stats", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_micro_batch_brings_its_share_of_the_mean_over_the_step(tiny_qwen3, form: str, want_stats: bool):
    keys, formula = FORMS[form]
    model = tiny_qwen3()
    batch = micro_batch()
    method = Sft(SftRecipe(**keys))
    scorer = Scorer(model)
    made = method.loss(scorer, batch, denominator=DENOMINATOR, want_stats=want_stats)
    logits, targets = by_hand(model, batch)
    every = logits.log_softmax(-1)
    logp = torch.stack([every.gather(1, targets[:, None])[:, 0], every.mean(-1)])
    expected = formula(logp, logits.logsumexp(-1)).sum() / DENOMINATOR
    assert made.value.item() == pytest.approx(expected.item(), rel=1e-5)
    made.value.backward()
    found = {name: weight.grad.double() for name, weight in model.named_parameters()}
    model.zero_grad()
    expected.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad.double(), rtol=2e-4, atol=1e-6)
    if not want_stats:
        assert made.sums == {}
        return
    entropy = -(every.detach().exp() * every.detach()).sum()
    assert float(made.sums["entropy"]) == pytest.approx(float(entropy), rel=1e-4)
    if form != "dft":
        correct = (logits.argmax(-1) == targets).sum()
        assert float(made.sums["accuracy"]) == float(correct)
    if form != "nll":
        assert float(made.sums["nll"]) == pytest.approx(-float(logp[0].sum()), rel=1e-5)


def test_halves_of_a_step_add_up_to_it(tiny_qwen3):
    model = tiny_qwen3()
    method, scorer = Sft(SftRecipe()), Scorer(model)
    ids = torch.randint(0, 128, (4, 10), generator=torch.Generator().manual_seed(1)).int().numpy()
    pieces = [Piece(row, np.arange(10) >= 3) for row in ids]
    whole = method.loss(scorer, pad_right(pieces, pad_id=0), denominator=28.0, want_stats=False).value
    parts = [
        method.loss(scorer, pad_right(some, pad_id=0), denominator=28.0, want_stats=False).value
        for some in (pieces[:1], pieces[1:])
    ]
    assert sum(one.item() for one in parts) == pytest.approx(whole.item(), rel=1e-6)
