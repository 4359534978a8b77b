"""The trace: two optimizer steps and an evaluation on tensors without data, and what was alive when."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from memtrain.memory.activations import HeaviestBatch
from memtrain.memory.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.trace.fake import bare_model, dummy_micro, fakeify, without_data
from memtrain.trainers.trace.oracle import RULES, pretending
from memtrain.trainers.trace.recorder import Recorder
from memtrain.trainers.trace.steps import (
    Stage,
    one_evaluation,
    one_step,
    own_gradients,
    own_states,
    set_the_stage,
    watch_layers,
)

STEPS = ("first step", "steady step")
"""Optimizer states appear at the end of the first; the peak is mostly in the second."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is traced."""

    recipe: Recipe
    settings: Settings
    config: Mapping[str, Any]
    """The model's configuration, as in config.json."""
    batch: HeaviestBatch
    num_micros: int = 1
    """Micro-batches of a step; two stand for any larger number."""
    num_layers: int | None = None
    """Trace only the first layers; None: all."""
    want_stats: bool = False


def trace(job: Job) -> Recorder:
    """Every allocation of two steps and an evaluation of `job`."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pretending(job.settings.device):
        with unset_fake_temporarily():
            model = bare_model(job.config, job.settings, job.num_layers)
            micro = dummy_micro(job.settings, job.batch)
        fakeify(model)
        recorder = Recorder("cpu", rules=RULES)
        recorder.enter("load")
        micros = [without_data(micro, mode) for _ in range(min(2, job.num_micros))]
        play(model, job, micros, recorder)
    gc.collect()
    return recorder


def play(model: Any, job: Job, micros: list[Any], recorder: Recorder, *, is_marked: bool = True) -> Stage:
    """Run the steps around `model`, real or fake, under `recorder`."""
    with recorder:
        recorder.own([*model.parameters(), *model.buffers()], "weights")
        stage = set_the_stage(model, job.recipe, job.settings, micros)
        own_states(stage, recorder)
        own_gradients(stage, recorder)
        current = [STEPS[0]]
        if is_marked:
            watch_layers(stage, recorder, lambda: current[0])
        for name in STEPS:
            current[0] = name
            one_step(
                stage,
                want_stats=job.want_stats,
                enter=lambda part, name=name: recorder.enter(f"{name}.{part}"),
            )
            own_states(stage, recorder)
        recorder.enter("evaluation")
        one_evaluation(stage)
        recorder.enter("saving")
    return stage
