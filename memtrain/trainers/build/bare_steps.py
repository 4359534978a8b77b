"""The optimizer steps of a plan on this process alone, without a run folder: to measure and compare."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import Built
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.optim.loss_scaling import LossScaling
from memtrain.trainers.optim.step import DistributedStep, forward_backward, set_rate, update
from memtrain.trainers.protocols.feed import Steps, StepSource, StepWork
from memtrain.trainers.protocols.method import LooksAhead, StepPreview
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.seed import seed_step


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
    engine: DistributedStep = field(init=False)
    device: torch.device = field(init=False)
    steps: StepSource = field(init=False)

    def __post_init__(self) -> None:
        settings, train = self.plan.settings, self.plan.recipe.train
        self.device = local_device(settings)
        self.steps = self.source or Steps(self.built.train, settings, train.seed, train.shuffle)
        if settings.in_backward:
            self.engine = InBackward(self.built.optimizer, self.parameters).engine()
        elif settings.dtype == "float16":
            self.engine = LossScaling(DistributedStep(), TrainState()).engine()
        else:
            self.engine = DistributedStep()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer steps."""
        return list(self.built.trained.values())

    def work(self, number: int) -> StepWork:
        """Work of optimizer step `number`."""
        return self.steps.work(number, rank=0, num_ranks=1)

    def gradients(
        self, work: StepWork, *, want_stats: bool = False, is_trial: bool = False
    ) -> dict[str, Tensor]:
        """Forward and backward of one step; the sums, `loss` among them, on the device.

        `is_trial`: its sequences are put together for this, and are no step's.
        """
        feed, method, seed = self.steps.feed, self.built.method, self.plan.recipe.train.seed
        set_rate(self.built.optimizer, self.plan.recipe.optim.lr)
        if isinstance(method, LooksAhead):
            ahead = StepPreview(feed, work.sequences, work.micros, self.device, 1, is_trial=is_trial)
            method.before_step(self.built.scorer, ahead)
        return forward_backward(
            self.built.scorer,
            method,
            (feed.micro_batch(sequences).to(self.device) for sequences in work.micros),
            denominator=work.denominator,
            engine=self.engine,
            num_micros=len(work.micros),
            want_stats=want_stats,
            seed_micro=lambda index: seed_step(seed, work.step, index),
        )

    def update(self, work: StepWork) -> Tensor:
        """Move the weights by their gradients, and what follows them; the norm before clipping."""
        optim = self.plan.recipe.optim
        norm = update(
            self.built.optimizer,
            self.parameters,
            lr=optim.lr,
            max_grad_norm=optim.max_grad_norm,
            engine=self.engine,
        )
        if self.built.follower is not None:
            self.built.follower.stepped(work.step + 1)
        return norm

    def step(self, number: int, *, want_stats: bool = False) -> Stepped:
        """Make a whole step."""
        work = self.work(number)
        started = time.perf_counter()
        sums = self.gradients(work, want_stats=want_stats)
        norm = self.update(work)
        loss, size = float(sums["loss"]), float(norm)  # Waits for the device.
        seconds = time.perf_counter() - started
        return Stepped(loss, size, work.num_tokens, work.num_sequences, seconds)
