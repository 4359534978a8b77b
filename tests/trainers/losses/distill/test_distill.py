"""Distillation in tiles against whole logits under autograd, and formulas against figures made by hand."""

import math

import pytest
import torch

from memtrain.trainers.losses.distill.full import divergence, full_distill
from memtrain.trainers.losses.distill.linear import DistillTerms, linear_distill
from memtrain.trainers.losses.distill.request import TopKRequest
from memtrain.trainers.losses.distill.teachers import TopKTeacher, WholeTeacher
from memtrain.trainers.losses.head.request import HeadForm
from memtrain.trainers.losses.head.tiles import LogitRule

N, D, V = 23, 8, 40
RULE = LogitRule(scale=1.3, softcap=5.0, tile_bytes=8 * V * 5 * 6)
"""Tiles of six tokens at most."""


def operands(dtype: torch.dtype = torch.float64, columns: int = V, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pairs = [(drawn(N, D), drawn(columns, D)), (drawn(N, 3), drawn(columns, 3))]
    return [(h.requires_grad_(), w.requires_grad_()) for h, w in pairs], drawn(columns).requires_grad_()


def whole_teacher(columns: int) -> WholeTeacher:
    generator = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (N, columns))
    return WholeTeacher((hidden,), (weight,), None, LogitRule(scale=0.7))


def top_k(num_kept: int, temperature: float) -> TopKTeacher:
    teacher = whole_teacher(V)
    request = TopKRequest(num_kept, temperature, V)
    found = request.answer(
        [(teacher.hidden[0], teacher.weight[0])], None, HeadForm(scale=0.7, tile_bytes=2048)
    )
    return TopKTeacher(found.ids_NK, found.logp_NK, found.tail_N)


TEACHERS = {
    "whole": lambda temperature: whole_teacher(V),
    "of more columns": lambda temperature: whole_teacher(V + 9),
    "of fewer columns": lambda temperature: whole_teacher(V - 9),
    "top k": lambda temperature: top_k(5, temperature),
}


def graded(compute, teacher, terms: DistillTerms, rule: LogitRule = RULE):
    pairs, bias = operands()
    targets = torch.arange(N) % 30
    weights = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    result = compute(pairs, targets, weights, teacher, rule, terms, bias=bias)
    (result.loss * 3).backward()
    return result, [t.grad for pair in pairs for t in pair] + [bias.grad]


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "share"), [(1.0, 0.0), (2.5, 0.4), (1.0, 0.4)])
def test_tiles_give_the_plain_loss_and_gradients(kind: str, beta: float, temperature: float, share: float):
    terms, teacher = DistillTerms(beta, temperature, share), TEACHERS[kind](temperature)
    tiled, gradients = graded(linear_distill, teacher, terms)
    plain, expected = graded(full_distill, teacher, terms)
    for own, other in zip([*tiled, *gradients], [*plain, *expected], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


def test_divergences_are_those_of_the_paper():
    """s = (1/2, 1/2), t = (1/4, 3/4); with beta 1/2 the mixture is (3/8, 5/8)."""
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    mixed = (
        0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(1.2)) + 0.25 * math.log(4 / 3) + 0.25 * math.log(0.8)
    )
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.5, mixed)):
        torch.testing.assert_close(divergence(student, teacher, beta), torch.tensor([expected]))


def test_all_tokens_kept_are_the_whole_teacher():
    terms = DistillTerms(0.5, 2.0)
    _, whole = graded(linear_distill, whole_teacher(V), terms)
    _, kept = graded(linear_distill, top_k(V, 2.0), terms)
    for own, other in zip(kept, whole, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_truncated_teacher_bounds_the_loss_from_below(beta: float):
    """Events put together have no larger divergence, and more of them no smaller one."""
    terms = DistillTerms(beta)
    found = [graded(linear_distill, top_k(k, 1.0), terms)[0].divergence_N for k in (1, 4, 16, V)]
    whole = graded(linear_distill, whole_teacher(V), terms)[0].divergence_N
    for fewer, more in zip(found, [*found[1:], whole], strict=True):
        assert (fewer <= more + 1e-6).all()


def test_the_gradient_of_forward_kl_is_off_by_at_most_twice_the_tail():
    """The bound that docs/distill.md states, for the L1 norm over the vocabulary."""
    plain = LogitRule()
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(teacher):
        pairs = [(logits.clone().requires_grad_(), torch.eye(V, dtype=torch.float64))]
        ones = torch.ones(N, dtype=torch.float64)
        linear_distill(
            pairs, torch.zeros(N, dtype=torch.long), ones, teacher, plain, DistillTerms(0.0)
        ).loss.backward()
        return pairs[0][0].grad

    part = top_k(5, 1.0)
    off_N = (gradient(part) - gradient(whole_teacher(V))).abs().sum(-1)
    assert (off_N <= 2 * part.tail_N.exp() + 1e-9).all()
    assert off_N.max() > 0.01


def test_in_half_precision_gradients_are_those_of_wide_sums():
    pairs, _ = operands(torch.bfloat16)
    wide = [(h.detach().float().requires_grad_(), w.detach().float().requires_grad_()) for h, w in pairs]
    teacher, terms = (
        whole_teacher(V)._replace(hidden=(whole_teacher(V).hidden[0].float(),)),
        DistillTerms(0.5),
    )
    teacher = teacher._replace(weight=(teacher.weight[0].float(),))
    weights, targets = torch.ones(N), torch.zeros(N, dtype=torch.long)
    for given in (pairs, wide):
        linear_distill(given, targets, weights, teacher, LogitRule(), terms).loss.backward()
    for (h, w), (wide_h, wide_w) in zip(pairs, wide, strict=True):
        torch.testing.assert_close(h.grad.float(), wide_h.grad, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(w.grad.float(), wide_w.grad, rtol=1e-2, atol=1e-3)
