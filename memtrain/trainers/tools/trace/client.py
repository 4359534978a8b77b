"""The traced prediction: asked of a process of its own, which loads torch, and remembered on disk."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ConfigDict

import memtrain
from memtrain.errors import LaunchError
from memtrain.memory.model_shape.layer_record import ModelRecord, Treatment
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.models_beside import reward_model_batch
from memtrain.memory.plan.plan import Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section
from memtrain.trainers.runtime.safe_path import safe_path

WORKER = "memtrain.trainers.tools.trace.worker"
LAYERS_WORKER = "memtrain.trainers.tools.trace.layers_worker"
"""The modules that trace, as text, for a higher floor."""


class Job(Section):
    """Message to a process that traces; infinities of configurations arrive as such."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


class Judge(Protocol):
    """A reward model as the plan sees it (RewardShape)."""

    @property
    def config(self) -> Mapping[str, object]: ...  # noqa: D102

    @property
    def dtype(self) -> str: ...  # noqa: D102

    @property
    def is_alike(self) -> bool: ...  # noqa: D102

    @property
    def max_length(self) -> int | None: ...  # noqa: D102


class RewardModelJob(Job):
    """A reward model beside the policy."""

    config: dict[str, Any]
    """The model's configuration, as in config.json."""
    dtype: str = "auto"
    """`auto`: the policy's."""
    is_alike: bool = True
    """See RewardShape."""
    batch: HeaviestBatch
    """The most that it reads at once."""


class TraceJob(Job):
    """A step to trace."""

    recipe: Recipe
    settings: Settings
    config: dict[str, Any]
    """The model's configuration, as in config.json."""
    rows: int
    tokens: int
    scored_tokens: int
    longest: int
    segments: int = 0
    """The heaviest micro-batch (see HeaviestBatch)."""
    passes: HeaviestBatch | None = None
    """The heaviest micro-batch of answers that are scored before they are learnt from; None: none are."""
    judges: tuple[RewardModelJob, ...] = ()
    teacher: dict[str, Any] | None = None
    """Configuration of a teacher beside the student."""
    accumulates: bool
    """A step has several micro-batches."""
    is_whole: bool = False
    """Trace every layer and replay the allocator; else two shallow models stand for the deep one."""

    @property
    def batch(self) -> HeaviestBatch:
        """The heaviest micro-batch."""
        return HeaviestBatch(self.rows, self.tokens, self.scored_tokens, self.longest, segments=self.segments)


class Traced(Section):
    """Result of a trace."""

    prediction: Prediction
    reserved_bytes: int | None
    """Memory that CUDA's caching allocator would reserve for the same allocations; None unless `is_whole`."""
    least_bytes: int | None = None
    """The least that it can do with, by giving cached blocks back in time; None unless `is_whole`."""
    host_bytes: dict[str, int] = {}
    """Bytes that wait in the host's memory, by owner (CUDA)."""
    seconds: float
    is_remembered: bool = False
    """Whether the result was found before, and comes from disk."""


class LayersJob(Job):
    """A model whose layers are to be passed."""

    config: dict[str, Any]
    """The model's configuration, as in config.json."""
    settings: Settings
    treatments: tuple[Treatment, ...] = ()


LAYER_SETTINGS = ("device", "dtype", "attention", "liger", "kernels", "adapter", "quantize")
"""Settings that decide what a layer holds; lengths, treatments and the step do not matter to its record."""
ANY_STEP: Mapping[str, object] = {
    "num_processes": 1,
    "threads": 1,
    "max_length": None,
    "padding_free": True,
    "pad_to_multiple_of": None,
    "batch_size": 1,
    "batch_tokens": None,
    "micro_batch_size": 1,
    "micro_tokens": None,
    "max_steps": 1,
    "checkpoint_every": 0,
    "offload": "none",
    "truncation": "keep_start",
    "packing": "none",
    "group_by_length": False,
    "loss": "full",
    "loss_tile_bytes": 1,
    "optimizer": "adamw",
    "master_weights": False,
    "expandable_segments": False,
}
"""Others that have no default, and say nothing about a layer: an answer for one step is one for all."""
ANY_ADAPTER: Mapping[str, object] = {"path": None, "base": None, "alpha": 32.0, "rslora": False}
"""What of an adapter says nothing about its tensors."""
RUN_BY_TRACES = (
    "memory/hardware",
    "memory/plan",
    "trainers/batches",
    "trainers/build",
    "trainers/distributed",
    "trainers/losses",
    "trainers/memory_meter",
    "trainers/methods",
    "trainers/model",
    "trainers/optim",
    "trainers/reference",
    "trainers/tools/trace",
)
"""Folders of the code that decides what a step holds."""
Answer = TypeVar("Answer", bound=Section)
PACKAGES = ("torch", "transformers", "peft", "liger_kernel", "deepspeed")
"""Packages whose code a trace runs."""


def can_trace(recipe: Recipe, settings: Settings) -> str | None:
    """Reason that a run cannot be traced (then the arithmetic stands alone); None when it can."""
    if uses_zero(settings) and settings.shard_offload != "none":
        return "a trace cannot separate DeepSpeed's host memory from the device's"
    if uses_zero(settings) and find_spec("deepspeed") is None:
        return "DeepSpeed's engine itself is traced, and is not here (pip install 'memtrain[deepspeed]')"
    if settings.background_save and settings.device == "cpu" and uses_zero(settings):
        return "the copy that a background save makes of DeepSpeed's states is not traced"
    if uses_liger(settings) and (find_spec("liger_kernel") is None or find_spec("triton") is None):
        return (
            "Liger's own code is traced, and it is not installed here (pip install 'memtrain[liger]', or "
            "trace with model.liger=off)"
        )
    return None


def uses_liger(settings: Settings) -> bool:
    """Whether anything is computed by Liger's kernels."""
    return settings.liger or settings.loss == "liger"


def job_of(
    recipe: Recipe,
    settings: Settings,
    config: Mapping[str, Any],
    batch: HeaviestBatch,
    *,
    accumulates: bool,
    is_whole: bool = False,
    passes: HeaviestBatch | None = None,
    judges: Sequence[RewardModelJob] = (),
    teacher: Mapping[str, Any] | None = None,
) -> TraceJob:
    """The job that traces these settings."""
    return TraceJob(
        recipe=recipe,
        settings=settings,
        config=dict(config),
        rows=batch.rows,
        tokens=batch.tokens,
        scored_tokens=batch.scored_tokens,
        longest=batch.longest,
        segments=batch.segments,
        accumulates=accumulates,
        is_whole=is_whole,
        passes=passes,
        judges=tuple(judges),
        teacher=None if teacher is None else dict(teacher),
    )


def reward_model_jobs(rewards: Sequence[Judge], longest: int) -> tuple[RewardModelJob, ...]:
    """Reward models that read answers of `longest` tokens with their prompts."""
    return tuple(
        RewardModelJob(
            config=dict(one.config),
            dtype=one.dtype,
            is_alike=one.is_alike,
            batch=reward_model_batch(longest, one.max_length),
        )
        for one in rewards
    )


def traced(job: TraceJob, *, timeout_s: float = 600.0, cache: Path | None = None) -> Traced:
    """Trace `job` in a process of its own; an answer given before by the same versions comes from disk.

    Raises: LaunchError when the trace fails.
    """
    found, is_remembered = _answer(WORKER, job, Traced, timeout_s, cache)
    return found.model_copy(update={"is_remembered": True}) if is_remembered else found


def layers_job(
    config: Mapping[str, Any], settings: Settings, treatments: Collection[Treatment] = ()
) -> LayersJob:
    """The job that measures the layers of a model. Liger's code is measured where it is installed; else
    transformers' own, which keeps more."""
    fields = Settings.model_fields.items()
    plain = {name: one.get_default() for name, one in fields if not one.is_required()}
    plain = {name: value for name, value in plain.items() if name not in LAYER_SETTINGS}
    has_liger = find_spec("liger_kernel") is not None and find_spec("triton") is not None
    own: dict[str, object] = {"liger": settings.liger and has_liger}
    if settings.adapter is not None:
        own["adapter"] = settings.adapter.model_copy(update=dict(ANY_ADAPTER))
    alone = settings.model_copy(update={**plain, **ANY_STEP, **own})
    return LayersJob(config=dict(config), settings=alone, treatments=tuple(sorted(treatments)))


def layer_record(job: LayersJob, *, timeout_s: float = 300.0, cache: Path | None = None) -> ModelRecord:
    """The record of the layers of `job`, in the same way.

    Raises: LaunchError when they cannot be passed.
    """
    return _answer(LAYERS_WORKER, job, ModelRecord, timeout_s, cache)[0]


def _answer(
    worker: str, job: Job, kind: type[Answer], timeout_s: float, cache: Path | None
) -> tuple[Answer, bool]:
    """(the answer of a process, whether it was given before and comes from disk).

    A file that cannot be read is measured again; where none can be written the answer is not kept.
    """
    text = job.model_dump_json()
    file = (cache or cache_folder()) / f"{_key(text)}.json"
    try:
        return kind.model_validate_json(file.read_bytes()), True
    except (OSError, ValueError):
        found = _asked(worker, text, timeout_s)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(found)
        os.replace(unfinished, file)
    return kind.model_validate_json(found), False


def _asked(worker: str, text: str, timeout_s: float) -> str:
    """The answer of a process, as JSON."""
    # Tracing moves no data: one thread, no GPU.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | safe_path()
    try:
        done = subprocess.run(
            [sys.executable, "-m", worker],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the trace did not finish within {timeout_s:g} s",
            "--trace",
            "leave it out: the computed prediction still holds",
        ) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(
            f"the step could not be traced: {last.rstrip('.')}",
            "--trace",
            "leave it out: the computed prediction still holds",
        )
    return done.stdout.splitlines()[-1]


def cache_folder() -> Path:
    """Folder of remembered traces: `$XDG_CACHE_HOME/memtrain/traces`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memtrain" / "traces"


def _key(text: str) -> str:
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    return hashlib.sha256("\n".join([text, *versions, _sources()]).encode()).hexdigest()[:32]


@cache
def _sources() -> str:
    """Digest of the code that passes and traces run: an edited step is another step."""
    folder = Path(memtrain.__file__).parent
    digest = hashlib.sha256()
    for part in RUN_BY_TRACES:
        for file in sorted((folder / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
