"""Log-probs of a batch's answers under a scorer, for DPO and KTO."""

# A answers, N loss tokens

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.losses.answers import desensitised_logps, sum_per_answer, wpo_answer_weights
from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.head.request import LogprobRequest


class AnswerLogps(NamedTuple):
    """Per answer [A], fp32."""

    logp_A: Tensor
    """Sum over its loss tokens; tokens past the shorter answer of its pair are scaled by `ld_alpha`."""
    plain_A: Tensor
    """The same without that scale."""
    weight_A: Tensor | None
    """Likelihood that the policy writes the answer (WPO), a constant, where it was asked for."""


def answer_logps(
    model: nn.Module, batch: AnswerBatch, *, ld_alpha: float | None = None, want_weights: bool = False
) -> AnswerLogps:
    """Log-probs of the answers of `batch`; `ld_alpha` takes answers two by two, as pairs."""
    request = LogprobRequest(batch.micro_batch.targets, want_log_sum_squares=want_weights)
    scored: LogprobResult = model(batch.micro_batch.model_inputs(), batch.micro_batch.scored_index, request)
    plain_A = sum_per_answer(scored.logp_N, batch.lengths_A)
    logp_A = plain_A
    if ld_alpha is not None:
        shorter_A = batch.lengths_A.view(-1, 2).amin(1).repeat_interleave(2, output_size=len(batch.lengths_A))
        logp_A = desensitised_logps(scored.logp_N, batch.lengths_A, shorter_A, alpha=ld_alpha)
    weight_A = None
    if want_weights:
        assert scored.log_sum_squares_N is not None
        weight_A = wpo_answer_weights(scored.logp_N, scored.log_sum_squares_N, batch.lengths_A)
    return AnswerLogps(logp_A, plain_A, weight_A)
