"""The record of one side's step: its loss, log-probs, gradients, and the weights after it."""

# N scored tokens (or answers, of a reward model)

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.recipe import HAS_ANSWERS
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import Built
from memtrain.trainers.protocols.feed import StepSource, StepWork
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source
from memtrain.trainers.tools.verify.plans import whole_step

MOST_PLAIN_TOKENS = 8192
"""Tokens of a micro-batch of the plain side, where the plan's own step has several. Taste."""


@dataclass(slots=True)
class Recorded:
    """An optimizer step of one side, on the host."""

    loss: float
    score_N: Tensor | None
    """float32 log-probs of the loss tokens (rewards of the answers) in the order of the step; None where
    the step was made without them."""
    gradients: dict[str, Tensor]
    """Before clipping."""
    weights: dict[str, Tensor]
    """Trained weights after the update."""
    rate: float
    """Learning rate of the update."""
    num_micro_batches: int
    longest_answer: int
    """Scored tokens of the sequence that has most, where the loss sums them; 0 where it takes each alone."""


@dataclass(slots=True)
class Side:
    """A built side whose steps can be recorded."""

    plan: Plan
    built: Built
    rollouts: Rollouts
    is_plain: bool
    source: StepSource | None = field(init=False)
    stepper: Stepper = field(init=False)
    _gradients: dict[str, Tensor] = field(init=False, default_factory=dict[str, Tensor])
    _scores: list[Tensor] = field(init=False, default_factory=list[Tensor])

    def __post_init__(self) -> None:
        hooked = {} if self.plan.settings.step_graphs else self.built.trained
        for name, parameter in hooked.items():
            # Before those that step in the backward pass and free the gradient.
            parameter.register_post_accumulate_grad_hook(self._taker(name))
        self.built.scorer.register_forward_hook(self._take_scores)
        self.source = online_source(self.plan, self.built, self.rollouts)
        self.stepper = Stepper(self.plan, self.built, self.source)

    def work(self, number: int) -> StepWork:
        """The work of a step: as the plan deals it, or in as few micro-batches as can be."""
        work = self.stepper.work(number)
        if not self.is_plain:
            return work
        is_cut = len(work.micro_batches) > 1
        return whole_step(work, num_micro_batches=-(-work.num_tokens // MOST_PLAIN_TOKENS) if is_cut else 1)

    def step(
        self,
        number: int,
        *,
        want_stats: bool,
        gradients: dict[str, Tensor] | None = None,
        watched: AbstractContextManager[object] | None = None,
    ) -> Recorded:
        """Make and record a step; with `gradients` the weights move by those, and not by its own.

        `watched`: entered around the forward and backward pass.
        """
        work = self.work(number)
        self._gradients.clear()
        self._scores.clear()
        with watched or nullcontext():
            sums = self.stepper.gradients(work, want_stats=want_stats)
        if self.plan.settings.step_graphs:
            # A recording calls no hook; it leaves the gradients where they are.
            for name, parameter in self.built.trained.items():
                if parameter.grad is not None:
                    self._gradients[name] = parameter.grad.detach().cpu().clone()
        own = dict(self._gradients)
        if gradients is not None:
            for name, parameter in self.built.trained.items():
                given = gradients.get(name)
                parameter.grad = (
                    None if given is None else given.to(parameter.device, parameter.grad_dtype, copy=True)
                )
        self.stepper.update(work)
        feed, recipe = self.stepper.steps.feed, self.plan.recipe
        sums_answers = recipe.online is not None or recipe.method in HAS_ANSWERS
        return Recorded(
            loss=float(sums["loss"]),
            score_N=torch.cat(self._scores) if self._scores else None,
            gradients=own,
            weights=trained_weights(self.built),
            rate=float(self.built.optimizer.param_groups[0]["lr"]),
            num_micro_batches=len(work.micro_batches),
            longest_answer=int(feed.loss_tokens[work.sequences].max(initial=1)) if sums_answers else 0,
        )

    def take_weights(self, weights: dict[str, Tensor]) -> None:
        """Stand where another side stands."""
        with torch.no_grad():
            for name, parameter in self.built.trained.items():
                parameter.copy_(weights[name])

    def _taker(self, name: str):
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None, "The hook is called with a gradient."
            self._gradients[name] = parameter.grad.detach().cpu().clone()

        return take

    def _take_scores(self, scorer: object, inputs: object, answer: Any) -> None:
        # Only passes that are trained on: others are of references and of means over the step.
        if not torch.is_grad_enabled():
            return
        if not isinstance(answer, Tensor):
            answer = getattr(answer, "scored", answer).logp_N
        if answer is not None:
            self._scores.append(answer.detach().float().cpu())


def trained_weights(built: Built) -> dict[str, Tensor]:
    """A copy of the trained weights on the host."""
    return {name: parameter.detach().cpu().clone() for name, parameter in built.trained.items()}
