"""Models beside the policy: a value model that is trained with it, reward models that judge completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memtrain.memory.estimate.activations import layer_forward, norm_kept
from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.sharded.sharding import gathered, share
from memtrain.memory.estimate.static import gradient_bytes, static_bytes, weights_bytes
from memtrain.memory.estimate.workload import DTYPE_BYTES, Workload
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.heaviest_batch import HeadOutput
from memtrain.memory.plan.models_beside import reward_model_batch, reward_model_settings
from memtrain.memory.plan.plan import Owned, PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings

STEPS = ("first step", "steady step")
OF_VALUE = "value model's step"
"""Owner of what a value model's own passes and gradients hold."""


@dataclass(frozen=True, slots=True)
class RewardShape:
    """A reward model as the plan sees it."""

    shape: ModelShape
    dtype: str
    """`auto`: the policy's."""
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    """The model's configuration, as in config.json."""
    is_alike: bool = True
    """Whether its architecture is the policy's, so that its rows lie as the policy's do; else they are
    padded."""
    max_length: int | None = None
    """Longest prompt with completion that it reads; None: all of it."""

    def weights_bytes(self, settings: Settings) -> int:
        """The model's weights on one rank, without a head over the vocabulary."""
        own = reward_model_settings(settings, self.dtype, is_alike=self.is_alike)
        return share(DTYPE_BYTES[own.dtype] * headless(self.shape).num_parameters, own, of="weights")


def headless(shape: ModelShape) -> ModelShape:
    """The same without an LM head of its own, with one number in its place."""
    counts = None if shape.counts is None else replace(shape.counts, num_head=0)
    return replace(shape, tied=True, counts=counts)


def with_beside(
    prediction: Prediction,
    load: Workload,
    activations: int,
    rewards: Sequence[RewardShape],
    *,
    accumulates: bool = True,
) -> Prediction:
    """The prediction with the bytes of the models beside the policy in every phase.

    A value model of its own holds weights, gradients, optimizer states and (in a step) as many activations
    as the policy keeps, which are there while the policy's backward pass runs. One that shares the policy's
    trunk is a row of numbers, and not counted. `activations`: bytes that the policy's layers keep.
    `accumulates`: see `estimate`.
    Source: derived from the order of autograd, later parts first; held against measured peaks by
    tests/runs/test_online_pairs.py.
    """
    judges = sum(one.weights_bytes(load.settings) for one in rewards)
    if load.settings.value != "own" and not judges:
        return prediction

    def added(phase: PhasePeak) -> dict[str, int]:
        moment = {owned.owner: owned.num_bytes for owned in phase.owners}
        return {"reward models": judges} | value_model(
            load, activations, phase.phase, moment, accumulates=accumulates
        )

    return prediction.model_copy(
        update={"phases": tuple(_with(phase, added(phase)) for phase in prediction.phases)}
    )


def value_load(load: Workload) -> Workload:
    """The load of a value model of its own: no vocabulary, and a number for each token."""
    alone = {"value": "none", "reference": "none"}
    shape = replace(headless(load.shape), tied=False, ends_in="score")
    batch = load.batch._replace(scored_tokens=0, asks=HeadOutput.NLL)
    return Workload(load.settings.model_copy(update=alone), shape, batch)


def value_model(
    load: Workload, activations: int, phase: str, moment: Mapping[str, int], *, accumulates: bool = True
) -> dict[str, int]:
    """Bytes that a value model of its own adds to a moment of a phase; nothing where there is none.

    Where the policy holds no activations a step makes its update, and in the first step there are no states
    before it. The model's backward pass comes after the policy's: of a single micro-batch its gradients are
    not there while the policy's activations are, and a moment of that pass has counted them.
    """
    if load.settings.value != "own":
        return {}
    passes = moment.get("activations", 0) > 0 or OF_VALUE in moment
    if phase == "load" and shards_weights(load.settings) and not load.settings.loads_shards:
        return {"value model": weights_bytes(load.settings, headless(load.shape))}
    static = static_bytes(load.settings, headless(load.shape))
    # Its final norm, and the rows that its head reads, widened to float32.
    picked = (load.a + (4 if load.is_half else 0)) * load.S * load.shape.width
    kept = activations + norm_kept(load, load.shape.width, num_scales=1) + picked
    # ZeRO-2 lays its part of the gradients end to end beside what was summed before; ZeRO-3 holds its part
    # from the beginning (zero_moments).
    engine = load.settings.engine if load.settings.num_processes > 1 else "ddp"
    added_up = accumulates or engine != "ddp"
    gradients = gradient_bytes(load.settings, headless(load.shape), accumulates=added_up)
    made = gradients * {"zero2": 2, "zero3": 0}.get(engine, 1)
    if passes and not accumulates and engine == "ddp":
        made = 0
    held = gradients if engine == "zero3" and phase != "load" else 0
    is_before = phase == "load" or (phase == STEPS[0] and passes)
    states = 0 if is_before else static.optimizer + static.master
    found = {"value model": static.weights + states + held}
    if phase in STEPS and OF_VALUE not in moment:
        found[OF_VALUE] = made + (kept if passes else 0)
    return found


def reward_scoring_bytes(settings: Settings, rewards: Sequence[RewardShape], longest: int) -> int:
    """Most that a reward model holds beside its weights while it reads, of all of them in turn."""
    loads = [
        Workload(
            reward_model_settings(settings, one.dtype, is_alike=one.is_alike),
            one.shape,
            reward_model_batch(longest, one.max_length),
        )
        for one in rewards
    ]
    return max(
        (layer_forward(load) + positions_and_mask(load) + _gathered(load) for load in loads), default=0
    )


def _gathered(load: Workload) -> int:
    """Whole weights of a reward model in shards while it reads."""
    return gathered(load.settings, headless(load.shape)) if shards_weights(load.settings) else 0


def _with(phase: PhasePeak, more: dict[str, int]) -> PhasePeak:
    owners = [*phase.owners, *(Owned(owner=name, num_bytes=size) for name, size in more.items() if size)]
    return PhasePeak(
        phase=phase.phase,
        num_bytes=phase.num_bytes + sum(more.values()),
        owners=tuple(sorted(owners, key=lambda one: -one.num_bytes)),
    )
