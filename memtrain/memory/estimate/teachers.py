"""A teacher in memory beside its student: weights, its pass before the student's, and its hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.sharded.sharding import GATHERED, gathered, groups
from memtrain.memory.estimate.static import reference_bytes
from memtrain.memory.estimate.streamed_layers import forward_of_layer
from memtrain.memory.estimate.weights_offload import fetched_head
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.heaviest_batch import HeaviestBatch, TeacherLoad
from memtrain.memory.plan.models_beside import teacher_settings
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.methods.distill import Distill

LIKELY_BYTES = 8
"""Bytes of one of the teacher's likeliest tokens: its id and its log-prob, in 4 bytes each."""


@dataclass(frozen=True, slots=True)
class TeacherShape:
    """A teacher as the plan sees it."""

    shape: ModelShape
    dtype: str
    """`auto`: the student's."""
    path: str
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    """The model's configuration, as in config.json."""


def teacher_load(
    settings: Settings,
    student: ModelShape,
    section: Distill | None,
    teacher: TeacherShape | None,
    batch: HeaviestBatch,
) -> TeacherLoad | None:
    """Bytes and work that a teacher adds to a micro-batch; None for a run without one."""
    if settings.teacher == "none":
        return None
    assert section is not None, "A run with a teacher has a section for it."
    if settings.teacher == "file":
        # The last number is the log-prob of all other tokens.
        likely = LIKELY_BYTES * settings.teacher_top_k + 4
        return TeacherLoad(0, 0, 0, 0, likely, student.vocab_size, 0.0, _whole_logits(section))
    own, shape = settings.model_copy(update={"adapter": None}), student
    weights = head = 0
    if settings.teacher == "model":
        assert teacher is not None, "A recipe with a teacher has looked at it."
        own, shape = teacher_settings(settings, teacher.dtype), teacher.shape
        weights = reference_bytes(own.model_copy(update={"reference": "copy"}), shape)
    load = Workload(own, shape, batch)
    whole = 0
    if shards_weights(settings):
        # The student's pass is made inside the call of the teacher's head, which is gathered meanwhile.
        cut = groups(own, shape)
        head = GATHERED * (cut.head.weights or cut.root.weights) if settings.teacher == "model" else 0
        whole = gathered(own, shape)
    return TeacherLoad(
        weights=weights,
        one_pass=forward_of_layer(load) + positions_and_mask(load) + whole,
        final=2 * DTYPE_BYTES[own.dtype] * load.N * shape.width,
        head=head,
        each_scored=DTYPE_BYTES[own.dtype] * shape.width,
        num_columns=min(shape.vocab_size, student.vocab_size),
        relative=shape.num_parameters / max(1, student.num_parameters),
        logits=_whole_logits(section),
        fetched_head=fetched_head(own, shape) if settings.teacher == "model" else 0,
    )


def fetched_heads(load: Workload) -> int:
    """Bytes of the weights of heads that the loss fetches from the host: the model's and its teacher's."""
    taught = load.batch.teacher.fetched_head if load.batch.teacher is not None else 0
    return fetched_head(load.settings, load.shape) + taught


def _whole_logits(section: Distill) -> tuple[float, float, float, float]:
    """See `TeacherLoad.logits`. Cross-entropy keeps log-probs of its own; a mixture is one more of them."""
    with_nll = 1 if section.cross_entropy_weight else 0
    if section.kind == "file":
        # A byte for each number says which tokens are kept.
        return 3 + with_nll, 6.25 + with_nll, 6 + with_nll, 3.25
    if section.beta in (0, 1):
        return 3 + with_nll, 6 + with_nll, 6 + with_nll, 6
    return 6 + with_nll, 10 + with_nll, 9 + with_nll, 7


def taught_states(load: Workload) -> dict[str, int]:
    """The side that the loss compares with, from before the student's pass until the loss."""
    teacher = load.batch.teacher
    return {} if teacher is None else {"teacher's pass": teacher.head + teacher.each_scored * load.S}


def taught_moment(load: Workload) -> dict[str, int]:
    """A teacher's pass before the student's; nothing where there is none."""
    teacher = load.batch.teacher
    if teacher is None:
        return {}
    states = teacher.head + teacher.each_scored * load.S
    return {"teacher's pass": max(teacher.one_pass, teacher.final + states)}
