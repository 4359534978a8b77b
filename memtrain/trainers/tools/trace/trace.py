"""The trace: two optimizer steps and an evaluation on tensors without data, and their live tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from memtrain.memory.plan.engine_kinds import is_sharded, shards_weights, writes_shards
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.models_beside import teacher_settings
from memtrain.memory.plan.plan import COPY
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.checkpoints.pinned_copy import HostCopies
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.offload.weights import chosen, weights_of
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.reference.reference import EmaReference
from memtrain.trainers.runtime.weight_layout import local_of
from memtrain.trainers.tools.trace.bitsandbytes import as_fake_bitsandbytes
from memtrain.trainers.tools.trace.client import RewardModelJob
from memtrain.trainers.tools.trace.dummy_batches import DUMMIES, Subject
from memtrain.trainers.tools.trace.fake_host import bytes_on_host
from memtrain.trainers.tools.trace.fake_host_shards import shards_on_host
from memtrain.trainers.tools.trace.fake_model import bare_model, fakeify
from memtrain.trainers.tools.trace.fake_ranks import as_fake_ranks, layout_without_data, slicing_without_data
from memtrain.trainers.tools.trace.fake_zero import as_fake_zero, own_parts, zero_without_data
from memtrain.trainers.tools.trace.liger import as_fake_liger
from memtrain.trainers.tools.trace.operator_rules import RULES, kernel_scratch, with_operator_rules
from memtrain.trainers.tools.trace.reward_models import BareRewardModel, bare_reward_model, one_scoring
from memtrain.trainers.tools.trace.setup import StepSetup, build_step
from memtrain.trainers.tools.trace.steps import (
    gradients_of,
    one_evaluation,
    one_pass,
    one_step,
    own_gradients,
    own_states,
    tensors_of,
    watch_layers,
)

STEPS = ("first step", "steady step")
"""Optimizer states appear at the end of the first; the peak is mostly in the second."""


@dataclass(frozen=True, slots=True)
class Job:
    """Subject of a trace."""

    recipe: Recipe
    settings: Settings
    config: Mapping[str, Any]
    """The model's configuration, as in config.json."""
    batch: HeaviestBatch
    num_micro_batches: int = 1
    """Micro-batches of a step; two stand for any larger number."""
    num_layers: int | None = None
    """Trace only the first layers; None: all."""
    want_stats: bool = False
    passes: HeaviestBatch | None = None
    """Batch that an online method scores without gradients before the update; None without such a pass."""
    judges: tuple[RewardModelJob, ...] = ()
    """Reward models beside the policy."""
    teacher: Mapping[str, Any] | None = None
    """Configuration of a teacher beside the student."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Records of a trace."""

    recorder: Recorder
    host: Mapping[str, int]
    """Bytes in the host's memory by owner, of a CUDA run."""


def trace(job: Job, *, skips_tiles: bool = True) -> Trace:
    """Every allocation of two steps and an evaluation of `job`."""
    settings = job.settings
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        with_operator_rules(settings.device, skips_tiles=skips_tiles),
        as_fake_liger(settings),
        as_fake_ranks(settings),
        shards_on_host(settings),
        as_fake_zero(settings),
        zero_without_data(settings),
        slicing_without_data(settings) as rules,
    ):
        with unset_fake_temporarily():
            cast = bare_models(job, "meta")
        for model in cast.models:
            own = frozen_settings(job) if model is cast.copy else settings
            fakeify(model, on_host=chosen(model, own) if settings.device == "cuda" else ())
        cast = replace(
            cast,
            micro_batches=[with_tensors(micro_batch, mode.from_tensor) for micro_batch in cast.micro_batches],
            passes=with_tensors(cast.passes, mode.from_tensor),
            judges=[judge.without_data(mode.from_tensor) for judge in cast.judges],
        )
        recorder = Recorder("cpu", rules=RULES | rules, scratch=kernel_scratch(settings.attention))
        recorder.enter("load")
        stage = run_steps(cast, job, recorder, is_fake=True)
        host = _on_host(stage)
        del cast, stage
    gc.collect()
    return Trace(recorder, host)


@dataclass(frozen=True, slots=True)
class Models:
    """Models and micro-batches, real or without data."""

    model: Any
    copy: Any | None
    """The reference, or the teacher, that is held beside the policy."""
    micro_batches: list[Any]
    passes: Any | None
    """Batch that an online method scores before it learns."""
    own: Any | None = None
    """A value model beside the policy."""
    judges: Sequence[BareRewardModel] = ()
    """Reward models beside it."""

    @property
    def models(self) -> list[nn.Module]:
        """All that hold weights."""
        judges = [judge.scorer for judge in self.judges]
        return [model for model in (self.model, self.copy, self.own, *judges) if model is not None]


def bare_models(job: Job, device: str) -> Models:
    """The models of a job on `device`, and its micro-batches on the CPU."""
    recipe, settings = job.recipe, job.settings
    head = METHODS[recipe.method].head
    module = import_module(METHODS[recipe.method].trainer)
    model = bare_model(job.config, settings, job.num_layers, device, head=head)
    copy = None
    if settings.reference in ("copy", "synced"):
        copy = bare_model(job.config, settings, job.num_layers, device, is_reference=True)
    if settings.teacher == "model":
        assert job.teacher is not None, "A job with a teacher has its configuration."
        copy = bare_model(job.teacher, frozen_settings(job), device=device, is_reference=True)
    own = None
    if settings.value == "own":
        own = bare_model(job.config, settings, job.num_layers, device, head="score")
    subject, make = Subject(recipe, settings), DUMMIES[module.feed]
    micro_batches = [make(subject, job.batch) for _ in range(min(2, job.num_micro_batches))]
    passes = None if job.passes is None else make(subject, job.passes)
    judges = [bare_reward_model(recipe, settings, judged, device) for judged in job.judges]
    return Models(model, copy, micro_batches, passes, own, judges)


def frozen_settings(job: Job) -> Settings:
    """Settings of the model that is held beside the policy."""
    taught = job.recipe.taught
    if taught is not None:
        return teacher_settings(job.settings, taught.teacher_dtype)
    return job.settings.model_copy(update={"adapter": None})


def run_steps(
    cast: Models, job: Job, recorder: Recorder, *, is_fake: bool = False, is_marked: bool = True
) -> StepSetup:
    """Run the steps around models, real or fake, under `recorder`."""
    with ExitStack() as held:
        held.enter_context(recorder)
        recorder.own([*cast.model.parameters(), *cast.model.buffers()], "weights")
        if cast.copy is not None:
            owner = "reference" if job.settings.teacher == "none" else "teacher"
            recorder.own([*cast.copy.parameters(), *cast.copy.buffers()], owner)
        own_gradients(cast.model, recorder)
        if cast.own is not None:
            recorder.own([*cast.own.parameters(), *cast.own.buffers()], "value model")
            own_gradients(cast.own, recorder)
        for judge in cast.judges:
            recorder.own(judge.weights, "reward models")
        in_shards = is_sharded(job.settings)
        if in_shards:
            held.enter_context(recorder.resizing())
        with as_fake_bitsandbytes(job.settings):
            stage = build_step(
                cast.model,
                cast.copy,
                job.recipe,
                job.settings,
                cast.micro_batches,
                own=cast.own,
                is_fake=is_fake,
            )
        if isinstance(stage.optimizer, ZeroOptimizer):
            own_parts(stage.scorer, stage.optimizer, recorder)
        elif in_shards:
            recorder.own(map(local_of, stage.scorer.parameters()), "weights")
        for judge in cast.judges:
            layout_without_data(job.settings).lay_frozen(judge.scorer)
            recorder.own(map(local_of, judge.weights), "reward models")
        own_states(stage, recorder)
        if job.settings.loads_shards:
            # Each rank reads its own rows: the whole model that was cut here was never there.
            recorder.begin_phase_again()
        current = [STEPS[0]]
        if is_marked:
            watch_layers(cast.model, recorder, lambda: current[0])
            if cast.own is not None:
                watch_layers(cast.own, recorder, lambda: f"{current[0]}.value")
        for name in STEPS:
            current[0] = name
            one_step(
                stage,
                want_stats=job.want_stats,
                enter=lambda part, name=name: recorder.enter(f"{name}.{part}"),
                stepped=lambda: recorder.own(gradients_of(stage), "gradients"),
            )
            own_states(stage, recorder)
            if name == STEPS[0]:
                held.enter_context(_saved_beside(stage, recorder))
        _after_steps(cast, job, stage, recorder)
        recorder.enter("saving")
    return stage


@contextmanager
def _saved_beside(stage: StepSetup, recorder: Recorder) -> Iterator[None]:
    """Buffers that a save in the background fills after the first step, where the host is the device: they
    stay for the saves that follow. Of shards the main process has them all, or each its own."""
    copies, optimizer, reference = HostCopies(), stage.optimizer, stage.reference
    settings = stage.settings
    count = settings.num_processes if shards_weights(settings) and not writes_shards(settings) else 1
    if stage.settings.background_save and stage.settings.device == "cpu":
        held = optimizer.held() if isinstance(optimizer, MasterWeights) else []
        followed = reference.kept_state().values() if isinstance(reference, EmaReference) else ()
        with recorder.owned_by(COPY):
            for tensor in (*stage.parameters, *tensors_of(optimizer.state), *held, *followed):
                own = local_of(tensor)
                copies.tensor(own if count == 1 else _whole(own, count))
    yield


def _whole(rows: Tensor, count: int) -> Tensor:
    """A tensor as the main process gathers it from so many, which have as many rows each."""
    return torch.empty((count * rows.shape[0], *rows.shape[1:]), dtype=rows.dtype) if rows.dim() else rows


def _after_steps(cast: Models, job: Job, stage: StepSetup, recorder: Recorder) -> None:
    """The phases beside a step: rewards, passes before an update, or an evaluation."""
    for judge in cast.judges:
        recorder.enter("rewards")
        one_scoring(judge)
    if cast.passes is not None:
        recorder.enter("log-probs")
        one_pass(stage, cast.passes)
    elif not METHODS[job.recipe.method].is_online:
        recorder.enter("evaluation")
        one_evaluation(stage)


def _on_host(stage: StepSetup) -> dict[str, int]:
    """Bytes by owner: the ring of offloaded activations, the optimizer's states, and shards that wait there
    with the sums of their gradients."""
    ring = sum(offloader.pool.num_bytes for offloader in stage.offloaders)
    held = stage.optimizer.held() if isinstance(stage.optimizer, MasterWeights) else []
    states = bytes_on_host([*tensors_of(stage.optimizer.state), *held])
    on_gpu = stage.settings.device == "cuda"
    found = {"offloaded activations": ring if on_gpu else 0, "optimizer states": states}
    weights = weights_of(stage.scorer)
    if weights is not None and on_gpu:
        gradients = weights.pool.num_bytes + bytes_on_host(gradients_of(stage))
        return found | {"weights": weights.host_bytes, "gradients": gradients}
    shards = bytes_on_host(stage.parameters)
    return found | ({"weights": shards, "gradients": shards} if shards else {})
