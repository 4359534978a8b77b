"""The measured peak of a plan's step, without a run folder, for a comparison of two plans."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.memory_meter.live_tensors import TensorPeak, resident
from memtrain.trainers.memory_meter.workspaces import begin_peak, peak_of_tensors
from memtrain.trainers.model.loading.load import local_device


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory and time that a few steps of a plan needed on this device."""

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
    stepper = Stepper(plan, built)
    before = resident(built.held)
    if device.type == "cuda":
        begin_peak(device)
    with TensorPeak() as counted:
        made = [stepper.step(number) for number in range(steps)]
    accelerator.end_training()
    on_device = peak_of_tensors(device) if device.type == "cuda" else 0
    last = made[-1]
    return Measured(on_device or before + counted.peak_bytes, last.seconds, last.num_tokens, last.loss)
