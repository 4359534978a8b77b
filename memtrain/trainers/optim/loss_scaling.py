"""Loss scaling for float16: the loss is scaled up, so that small gradients do not become 0 on their way.

The scale is a power of two, so that dividing by it changes no bit of a gradient, and it is part of the run's
state: a run that goes on goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.errors import Diverged
from memtrain.trainers.optim.step import DistributedStep, set_wide
from memtrain.trainers.protocols.position import TrainState

GROWTH_STEPS = 2_000
"""Steps in a row without an overflow after which the scale doubles.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2; numbers of torch.amp.GradScaler.
"""
LARGEST = 2.0**24
"""Scale that is not exceeded: float16 ends at 65,504, and a loss of 2^-8 reaches it then."""


@dataclass(slots=True)
class LossScaling:
    """Wraps how a step reaches the weights: losses scaled, gradients scaled back, overflows left out.

    A step whose gradients are not finite moves nothing and halves the scale. It is told, and counted. Every
    rank does the same: the gradients that are looked at are the sums over all ranks.
    """

    inner: DistributedStep
    position: TrainState
    has_overflowed: bool = False
    """In the step at hand."""

    def engine(self) -> DistributedStep:
        """The engine of a run in float16."""
        return replace(
            self.inner,
            begin=summed_wide(self.inner),
            backward=lambda loss: self.inner.backward(loss * self.position.loss_scale),
            clip=self._clip,
            step=self._step,
            dry_step=self._dry_step,
        )

    @contextmanager
    def _dry_step(self, makes_states: bool) -> Iterator[None]:
        """Context of a step that is only tried: the scale and its counts are as before after it."""
        state = self.position
        before = state.loss_scale, state.scaled_steps, state.skipped_steps
        try:
            with self.inner.dry_step(makes_states):
                yield
        finally:
            state.loss_scale, state.scaled_steps, state.skipped_steps = before

    @torch.no_grad()
    def _clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients back and clip them; the norm before clipping, 0 where it is left out."""
        gradients = [one.grad for one in parameters if one.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.position.loss_scale)
        norm = self.inner.clip(parameters, max_norm)
        self.has_overflowed = not bool(torch.isfinite(norm))
        return torch.zeros_like(norm) if self.has_overflowed else norm

    def _step(self, optimizer: Optimizer) -> None:
        state = self.position
        if not self.has_overflowed:
            self.inner.step(optimizer)
            state.scaled_steps += 1
            if state.scaled_steps >= GROWTH_STEPS and state.loss_scale < LARGEST:
                state.loss_scale, state.scaled_steps = 2 * state.loss_scale, 0
            return
        state.loss_scale, state.scaled_steps = state.loss_scale / 2, 0
        state.skipped_steps += 1
        if state.loss_scale < 1.0:
            raise Diverged(
                f"gradients overflow float16 whatever the loss is scaled by (step {state.step + 1})",
                "model.dtype",
                "set model.dtype: float32, or lower optim.lr; the last checkpoint is from before",
            )


def summed_wide(inner: DistributedStep) -> Callable[[nn.Module, int], None]:
    """Beginning of a step in float16: gradients are float32, of one micro-batch too.

    Scaled back, most are too small for float16.
    """

    def begin(model: nn.Module, num_micro_batches: int) -> None:
        inner.begin(model, num_micro_batches)
        set_wide(model.parameters(), is_wide=True)

    return begin


def skipped_words(position: TrainState) -> str:
    """Sentence on a step that was left out."""
    return (
        f"step {position.step + 1} moved nothing: its gradients overflow float16; the loss is scaled by "
        f"{position.loss_scale:,.0f} from now on (left out so far: {position.skipped_steps})"
    )
