"""Requests to an LM head in distillation: the loss, the teacher's hidden states, its likeliest tokens."""

# N scored tokens, V vocabulary, D hidden size, K likeliest tokens

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memtrain.trainers.losses.distill.full import full_distill
from memtrain.trainers.losses.distill.linear import DistillResult, DistillTerms, linear_distill
from memtrain.trainers.losses.distill.teachers import Teacher, TopKTeacher, WholeTeacher
from memtrain.trainers.losses.head.linear import Pairs
from memtrain.trainers.losses.head.request import HeadForm
from memtrain.trainers.losses.head.tiles import (
    Operands,
    bend_,
    head_outputs_,
    num_tile_tokens,
    products_for,
    spans,
    wide_dtype,
    without_autocast,
)

MakeTeacher = Callable[[Pairs, Tensor | None, HeadForm], Teacher]


class DistillRequest:
    """Sum over tokens of weight * loss: a `DistillResult`. `teacher` may be made from the student's head."""

    def __init__(
        self, targets_N: Tensor, weights_N: Tensor, teacher: Teacher | MakeTeacher, terms: DistillTerms
    ) -> None:
        self.targets_N = targets_N
        self.weights_N = weights_N
        self.teacher = teacher
        self.terms = terms

    def about(self, which_n: Tensor) -> DistillRequest:
        """The same request for some of the tokens: their part of the sum."""
        assert isinstance(self.teacher, TopKTeacher), "Ranks that share rows have the teacher from a file."
        part = self.teacher.about(which_n)
        return DistillRequest(self.targets_N[which_n], self.weights_N[which_n], part, self.terms)

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> DistillResult:
        """The answer of `linear_distill`, or of the plain form."""
        teacher = self.teacher
        if not isinstance(teacher, WholeTeacher | TopKTeacher):
            teacher = teacher(pairs, bias, form)
        compute = linear_distill if form.is_chunked else full_distill
        return compute(pairs, self.targets_N, self.weights_N, teacher, form.rule(), self.terms, bias=bias)


class Inside:
    """Calls a function inside the head's module call, where its weights are: on its operands."""

    def __init__(self, ask: Callable[[Pairs, Tensor | None, HeadForm], Any]) -> None:
        self.ask = ask

    def about(self, which_n: Tensor) -> Inside:
        """Not asked of slices of rows."""
        raise AssertionError("A teacher is asked about whole rows.")

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> Any:
        """The function's own result."""
        return self.ask(pairs, bias, form)


class HiddenStates(NamedTuple):
    """Hidden states [N, D] behind a number that mixed precision may not round."""

    one: Tensor
    hidden: tuple[Tensor, ...]


def own_hidden(pairs: Pairs, bias: Tensor | None, form: HeadForm) -> HiddenStates:
    """The hidden states that a head reads."""
    return HiddenStates(torch.ones(()), tuple(hidden for hidden, _ in pairs))


class TopKResult(NamedTuple):
    """Per token: log-probs [N, K], the ids [N, K] they are of, and the log-prob [N] of all others."""

    logp_NK: Tensor
    ids_NK: Tensor
    tail_N: Tensor


class TopKRequest:
    """The K likeliest tokens at each place under the softmax at a temperature: a `TopKResult`.

    Only the first `num_columns` of the vocabulary are looked at: those that a student has too.
    """

    def __init__(self, num_kept: int, temperature: float, num_columns: int) -> None:
        self.num_kept = num_kept
        self.temperature = temperature
        self.num_columns = num_columns

    def about(self, which_n: Tensor) -> TopKRequest:
        """The same of any tokens."""
        return self

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> TopKResult:
        """Likeliest first, one tile of logits at a time."""
        rule = form.rule(self.temperature)
        columns = min(self.num_columns, pairs[0][1].shape[0])
        operands = Operands(
            tuple(hidden for hidden, _ in pairs),
            tuple(weight[:columns] for _, weight in pairs),
            None if bias is None else bias[:columns],
        )
        products = products_for(operands, rule)
        num_tokens, kept = len(operands.hidden[0]), min(self.num_kept, columns)
        step = num_tile_tokens(columns, 2 + (rule.softcap is not None), rule, products.wide)
        device, wide = operands.hidden[0].device, wide_dtype(*operands.hidden, *operands.weight)
        tile = torch.empty(min(step, num_tokens), columns, dtype=wide, device=device)
        parts: list[TopKResult] = []
        with torch.no_grad(), without_autocast(device):
            for low, high in spans(num_tokens, step):
                part_TV = tile[: high - low]
                rows = tuple(hidden[low:high] for hidden in operands.hidden)
                head_outputs_(part_TV, operands._replace(hidden=rows), products)
                bend_(part_TV, rule, want_slope=False)
                parts.append(_likeliest_(part_TV, kept))
        if not parts:
            empty = torch.empty(0, kept, device=device)
            return TopKResult(empty, empty.int(), torch.empty(0, device=device))
        return TopKResult(*(torch.cat(one) for one in zip(*parts, strict=True)))


def _likeliest_(logits_TV: Tensor, kept: int) -> TopKResult:
    top_TK, ids_TK = logits_TV.topk(kept, -1)
    highest_T = top_TK[:, 0]
    logits_TV.sub_(highest_T[:, None]).exp_()
    log_sums_T = logits_TV.sum(-1).log()
    # Summed without the kept ones: 1 less their sum would lose digits.
    tail_T = logits_TV.scatter_(1, ids_TK, 0.0).sum(-1).log() - log_sums_T
    return TopKResult((top_TK - highest_T[:, None]) - log_sums_T[:, None], ids_TK.int(), tail_T)
