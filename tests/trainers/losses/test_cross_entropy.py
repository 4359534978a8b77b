"""The losses of supervised fine-tuning, by hand and against one large batch."""

from __future__ import annotations

import math

import pytest
import torch

from memtrain.trainers.losses.head.request import HeadForm
from memtrain.trainers.methods.sft import dft_loss, sft_request
from memtrain.trainers.model.heads.lm_head import Scorer

VOCAB = 128


def test_sft_loss_is_the_mean_over_the_tokens_of_the_step():
    """Logits (log 3, 0), targets 0 and 1, of a step with 8 loss tokens: (log(4/3) + log 4) / 8."""
    pairs = [(torch.ones(2, 1), torch.tensor([[3.0], [1.0]]).log())]
    loss = sft_request(torch.tensor([0, 1]), num_tokens=8).answer(pairs, None, HeadForm()).loss
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 8)


def test_dft_weighs_tokens_by_their_own_probability():
    """p = 3/4 and 1/4 of 2 tokens: (3/4 log(4/3) + 1/4 log 4) / 2; d/d logp = -p / 2."""
    logp = torch.tensor([0.75, 0.25]).log().requires_grad_()
    loss = dft_loss(logp, num_tokens=2)
    loss.backward()
    assert loss.item() == pytest.approx((0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / 2)
    torch.testing.assert_close(logp.grad, torch.tensor([-0.375, -0.125]))


def test_padding_and_micro_batches_do_not_move_the_gradient(tiny_llama):
    """Two ragged rows, padded together, against each alone: same loss, same gradients, to fp32 rounding."""
    model = tiny_llama()
    scorer = Scorer(model)
    g = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, VOCAB, (n,), generator=g) for n in (13, 6)]
    num_tokens = sum(len(row) - 1 for row in rows)

    def loss_of(ids: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        targets = ids.flatten()[index + 1]
        request = sft_request(targets, num_tokens=num_tokens, label_smoothing=0.1, z_loss=1e-3)
        loss = scorer({"input_ids": ids}, index, request).loss
        loss.backward()
        return loss.detach()

    padded = torch.stack([torch.nn.functional.pad(row, (0, 13 - len(row))) for row in rows])
    together = loss_of(padded, torch.cat([torch.arange(12), 13 + torch.arange(5)]))
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    apart = sum(loss_of(row[None], torch.arange(len(row) - 1)) for row in rows)
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7)


def test_learning_a_few_tokens_by_heart(tiny_qwen3):
    """Thirty steps of the real path bring a random model from log(vocabulary) to next to nothing."""
    model = tiny_qwen3()
    scorer = Scorer(model)
    ids = torch.randint(1, VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = scorer({"input_ids": ids}, torch.arange(11), sft_request(ids[0, 1:], num_tokens=11)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(VOCAB), abs=0.5)
    assert losses[-1] < 0.1
