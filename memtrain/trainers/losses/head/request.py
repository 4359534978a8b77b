"""Requests to an LM head for a set of tokens: their log-probs, or their weighted NLL."""

# N scored tokens

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from memtrain.trainers.losses.head.linear import (
    SUM_ALONE,
    LogprobOptions,
    LogprobResult,
    NllOptions,
    NllResult,
    Pairs,
    linear_logprob,
    linear_nll,
)
from memtrain.trainers.losses.head.linear_full import full_logprob, full_nll
from memtrain.trainers.losses.head.linear_liger import liger_nll
from memtrain.trainers.losses.head.tiles import TILE_BYTES, LogitRule


class HeadForm(NamedTuple):
    """Form of the head and the loss, and the model's changes of its logits."""

    is_chunked: bool = True
    """In tiles of logits; else all logits at once."""
    tile_bytes: int = TILE_BYTES
    softcap: float | None = None
    scale: float = 1.0
    is_liger: bool = False
    """NLL by Liger's kernel; log-probs are in tiles of ours all the same."""
    kernel: str = "torch"
    """Kernels of a tile, as `Settings.loss_kernel`."""

    def rule(self, temperature: float = 1.0) -> LogitRule:
        """Rule by which head outputs become logits at a temperature."""
        return LogitRule(self.scale, self.softcap, temperature, self.tile_bytes, self.kernel)


class Request(Protocol):
    """A question to the LM head.

    Requests are opaque objects on purpose: FSDP2's mixed precision rounds every float tensor it finds in
    the arguments of a module call (in tuples, dicts and dataclasses too), the loss weights among them.
    """

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> Any:
        """The result, from the head's operands; runs inside the head's module call."""
        ...

    def about(self, which_n: Tensor) -> Request:
        """The same question about some of the tokens, by their places among the N."""
        ...


class LogprobRequest:
    """Log p of each target with the other requested outputs: a `LogprobResult`."""

    def __init__(
        self,
        targets_N: Tensor,
        *,
        temperature: float = 1.0,
        want_entropy: bool = False,
        want_log_sum_squares: bool = False,
        learns_entropy: bool = True,
    ) -> None:
        self.targets_N = targets_N
        self.temperature = temperature
        self.options = LogprobOptions(want_entropy, want_log_sum_squares, learns_entropy)

    def about(self, which_n: Tensor) -> LogprobRequest:
        """The same question about some of the tokens."""
        return LogprobRequest(self.targets_N[which_n], temperature=self.temperature, **self.options._asdict())

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> LogprobResult:
        """The answer of `linear_logprob`, or of the plain form."""
        compute = linear_logprob if form.is_chunked else full_logprob
        return compute(pairs, self.targets_N, form.rule(self.temperature), self.options, bias=bias)


class NllRequest:
    """Sum over tokens of weight * NLL, smoothed, plus z-loss: an `NllResult`."""

    def __init__(self, targets_N: Tensor, weights_N: Tensor, options: NllOptions = SUM_ALONE) -> None:
        self.targets_N = targets_N
        self.weights_N = weights_N
        self.options = options

    def about(self, which_n: Tensor) -> NllRequest:
        """The same question about some of the tokens: their part of the sum."""
        return NllRequest(self.targets_N[which_n], self.weights_N[which_n], self.options)

    def answer(self, pairs: Pairs, bias: Tensor | None, form: HeadForm) -> NllResult:
        """The answer of `linear_nll`, of Liger's kernel, or of the plain form."""
        compute = liger_nll if form.is_liger else linear_nll if form.is_chunked else full_nll
        return compute(pairs, self.targets_N, self.weights_N, form.rule(), self.options, bias=bias)
