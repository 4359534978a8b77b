"""The measured peak of a plan's step, without a run folder: what a comparison of two plans needs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from memtrain.memory.plan import Plan
from memtrain.trainers.build import build
from memtrain.trainers.engine import make_accelerator
from memtrain.trainers.feed import Steps
from memtrain.trainers.model.load import local_device
from memtrain.trainers.optim_backward import InBackward
from memtrain.trainers.step import Engine, forward_backward, set_rate, update
from memtrain.trainers.trace.recorder import TensorPeak
from memtrain.trainers.worker import resident


@dataclass(frozen=True, slots=True)
class Measured:
    """What a few steps of a plan needed on this device."""

    peak_bytes: int
    """Highest sum of live tensors: weights, gradients, optimizer state, activations."""
    seconds: float
    """Wall time of the last step."""
    num_tokens: int
    """Tokens of the last step, without padding."""
    loss: float
    """Loss of the last step."""


def measure(plan: Plan, *, steps: int = 2) -> Measured:
    """Make the first `steps` optimizer steps of `plan` on this process and throw the result away.

    Two are needed: optimizer state appears in the first and adds to the second.
    """
    accelerator = make_accelerator(plan.settings)
    built = build(plan)
    device = local_device(plan.settings)
    parameters = [parameter for parameter in built.scorer.parameters() if parameter.requires_grad]
    work = Steps(built.train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle)
    before = resident(built.weights)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = loss = 0.0
    num_tokens = 0
    engine = InBackward(built.optimizer, parameters).engine() if plan.settings.in_backward else Engine()
    with TensorPeak() as counted:
        for step in range(steps):
            asked = work.work(step, rank=0, num_ranks=1)
            started = time.perf_counter()
            set_rate(built.optimizer, plan.recipe.optim.lr)
            sums = forward_backward(
                built.scorer,
                built.method,
                (built.train.micro_batch(sequences).to(device) for sequences in asked.micros),
                denominator=asked.denominator,
                engine=engine,
                num_micros=len(asked.micros),
                want_stats=False,
            )
            update(
                built.optimizer,
                parameters,
                lr=plan.recipe.optim.lr,
                max_grad_norm=plan.recipe.optim.max_grad_norm,
                engine=engine,
            )
            loss = float(sums["loss"])
            seconds, num_tokens = time.perf_counter() - started, asked.num_tokens
    accelerator.end_training()
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Measured(on_device or before + counted.peak_bytes, seconds, num_tokens, loss)
