"""The optimizer steps of a plan on this process alone, without a run folder: to measure and compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import Built
from memtrain.trainers.build.engine import begin, scaled_by
from memtrain.trainers.build.step import OptimizerStep, capture_passes, whole
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.protocols.feed import Steps, StepSource, StepWork
from memtrain.trainers.protocols.position import TrainState


@dataclass(frozen=True, slots=True)
class Stepped:
    """Facts of an optimizer step that was made."""

    loss: float
    grad_norm: float
    num_tokens: int
    """Without padding."""
    num_sequences: int
    seconds: float
    """Wall time, with the making of its micro-batches."""


@dataclass(slots=True)
class Stepper:
    """Makes the steps of `plan` as the training loop does, at the recipe's highest learning rate.

    Weights that are stepped in the backward pass get their hooks here: those who want to see a gradient
    register theirs before.
    """

    plan: Plan
    built: Built
    source: StepSource | None = None
    """Source of the steps' work; without one the rows of `built`."""
    training: OptimizerStep = field(init=False)
    steps: StepSource = field(init=False)

    def __post_init__(self) -> None:
        settings, recipe = self.plan.settings, self.plan.recipe
        train = recipe.train
        self.steps = self.source or Steps(self.built.train, settings, train.seed, train.shuffle)
        self.training = begin(self.built.parts, recipe, settings, scaled_by(TrainState()))
        self.training.device = local_device(settings)
        capture_passes(self.training, self.built.scorer, settings, lambda text: None)
        self.training.source, self.training.lr_at = self.steps, lambda step: recipe.optim.lr

    @property
    def device(self) -> torch.device:
        """Device of the micro-batches."""
        return self.training.device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer steps."""
        return list(self.training.parameters)

    def work(self, number: int) -> StepWork:
        """Work of optimizer step `number`."""
        return self.steps.work(number, rank=0, num_ranks=1)

    def gradients(
        self, work: StepWork, *, want_stats: bool = False, is_trial: bool = False
    ) -> dict[str, Tensor]:
        """Forward and backward of one step; the sums, `loss` among them, on the device.

        `is_trial`: its sequences are put together for this, and are no step's.
        """
        parts = whole(work.micro_batches)
        return self.training.gradients(work, parts, want_stats=want_stats, is_trial=is_trial)

    def update(self, work: StepWork) -> Tensor:
        """Move the weights by their gradients, and what follows them; the norm before clipping."""
        return self.training.update(work.step)

    def step(self, number: int, *, want_stats: bool = False) -> Stepped:
        """Make a whole step."""
        work = self.work(number)
        started = time.perf_counter()
        sums = self.gradients(work, want_stats=want_stats)
        norm = self.update(work)
        loss, size = float(sums["loss"]), float(norm)  # Waits for the device.
        seconds = time.perf_counter() - started
        return Stepped(loss, size, work.num_tokens, work.num_sequences, seconds)
