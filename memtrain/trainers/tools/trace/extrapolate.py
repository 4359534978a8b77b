"""Peaks of a deep model from two shallow ones: every phase and owner grows by the same bytes with each layer.

Source: measured, CPU, torch 2.13: exact for 30 of 30 recipes at 28 to 64 layers from 3 and 4 layers. Under
DeepSpeed's ZeRO it is not: a rank's part, buckets and the largest weights are held against one another, and
shallow models were 16 % below to 42 % above a model of 14 layers. Every layer is traced there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from memtrain.memory.model_shape.config_parts import has_experts_at
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.plan import Owned, PhasePeak
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import OFFLOAD_BUCKET
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.optim.offload import STATES
from memtrain.trainers.tools.trace.fake_model import KINDS, bare_model
from memtrain.trainers.tools.trace.trace import STEPS, Job, trace

FEWEST = 3
"""A first, a last and a middle layer."""
PHASES = ("load", *STEPS, "evaluation", "rewards", "log-probs", "saving")
Owners = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Traced:
    """Result of the traces of a job."""

    phases: tuple[PhasePeak, ...]
    host: Owners
    """Bytes in the host's memory, by owner."""
    recorder: Recorder | None = None
    """Of the whole model, where that was traced."""


def predict_by_trace(job: Job, *, is_whole: bool = False) -> Traced:
    """The peak of each phase with its owners, and the bytes on the host."""
    depth = num_layers(job)
    leading, repeats = kinds_repeat(job.config)
    period = math.lcm(max(1, job.settings.checkpoint_every), repeats)
    staying = max(num_staying(job.settings), num_of_buckets(job, depth) - FEWEST)
    is_whole = is_whole or uses_zero(job.settings)
    depths = None if is_whole else shallow_depths(depth, period, staying, leading)
    if depths is None:
        found = trace(job)
        return Traced(phases_of(named_owners(found.recorder)), found.host, found.recorder)
    low, high = (trace(replace(job, num_layers=count)) for count in depths)
    factor = (depth - depths[0]) / (depths[1] - depths[0])
    parts = extrapolated(named_owners(low.recorder), named_owners(high.recorder), factor)
    return Traced(phases_of(parts), extrapolated({"": low.host}, {"": high.host}, factor)[""])


def num_layers(job: Job) -> int:
    """Layers of the model."""
    return int(make_config(job.config).get_text_config().num_hidden_layers)


def kinds_repeat(config: Mapping[str, Any]) -> tuple[int, int]:
    """(leading layers of kinds of their own, layers after which kinds repeat from there on).

    Kinds: sliding and full attention, layers with and without positions, dense MLPs and experts. The period
    is the depth where nothing repeats.
    """
    known = make_config(config).get_text_config()
    depth, named = int(known.num_hidden_layers), known.to_dict()
    lists = [kinds for name in KINDS if isinstance(kinds := getattr(known, name, None), list) and kinds]
    kinds = [(has_experts_at(named, at), *(str(one[at]) for one in lists)) for at in range(depth)]
    found = ((first, period) for period in range(1, depth + 1) for first in (_leading(kinds, period),))
    return min(found, key=lambda one: (sum(one), one))


def _leading(kinds: list[Any], period: int) -> int:
    """Layers before the first from which on each has the kind of the layer a period later."""
    differing = (at + 1 for at in reversed(range(len(kinds) - period)) if kinds[at] != kinds[at + period])
    return next(differing, 0)


def num_staying(settings: Settings) -> int:
    """The last layers, whose inputs stay on the device where those of all others travel, and a group more.

    Inputs travel two at a time: only from a second middle group on is the highest moment that of any depth.
    """
    if settings.offload != "boundaries":
        return 0
    return (settings.offload_keep + 1) * max(1, settings.checkpoint_every)


def num_of_buckets(job: Job, depth: int) -> int:
    """Layers of which the states fill two buckets, where the states wait on the host and take turns on the
    device; 0 where all of them fit into two. With fewer the states of a shallow model come at once, and would
    be taken to grow with depth.
    """
    if not job.settings.optimizer_offload:
        return 0
    one, two = (_state_bytes(job, count) for count in (1, 2))
    states = one + (depth - 1) * (two - one)
    filled = 2 * OFFLOAD_BUCKET
    return 0 if states <= filled else math.ceil(depth * filled / states) + 1


def _state_bytes(job: Job, num_layers: int) -> int:
    """Bytes of both moments of the trained weights of the first layers and of what is beside these."""
    model = bare_model(job.config, job.settings, num_layers)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    wide = job.settings.master_weights
    return sum(STATES * weight.numel() * (4 if wide else weight.itemsize) for weight in trained)


def shallow_depths(depth: int, period: int, num_staying: int = 0, leading: int = 0) -> tuple[int, int] | None:
    """Two depths with every kind of layer, which repeat as in `depth`; None: tracing all is cheaper.

    `num_staying`, `leading`: layers of other kinds at the end and the beginning, as many whatever the depth.
    """
    least = max(FEWEST + num_staying, period) + leading
    low = least + (depth - least) % period
    high = low + period
    return (low, high) if high < depth else None


def extrapolated(low: Mapping[str, Owners], high: Mapping[str, Owners], factor: float) -> dict[str, Owners]:
    """Bytes of each owner in each phase, where `low` is 0 and `high` is 1 on the line to `factor`."""
    found: dict[str, Owners] = {}
    for phase, owners in high.items():
        start = low.get(phase, owners)
        names = {*owners, *start}
        line = {n: start.get(n, 0) + factor * (owners.get(n, 0) - start.get(n, 0)) for n in names}
        found[phase] = {name: max(0, round(size)) for name, size in line.items()}
    # While states appear one by one, the highest moment moves with depth. With all states there it does not,
    # and it is no lower.
    first, steady = (f"{step}.optimizer" for step in STEPS)
    if first in found:
        found[first] = found[steady]
    return found


def named_owners(recorder: Recorder) -> Mapping[str, Owners]:
    """Bytes by owner at the peak of each part of a phase; the unclaimed is named by where it was made."""
    return recorder.owners_at_peaks(_made_in)


def phases_of(parts: Mapping[str, Owners]) -> tuple[PhasePeak, ...]:
    """The highest part of each phase."""
    peaks: list[PhasePeak] = []
    for phase in PHASES:
        candidates = [owners for part, owners in parts.items() if part.split(".")[0] == phase]
        if not candidates:
            continue
        highest = max(candidates, key=lambda owners: sum(owners.values()))
        owned = sorted(((name, size) for name, size in highest.items() if size), key=lambda item: -item[1])
        peaks.append(
            PhasePeak(
                phase=phase,
                num_bytes=sum(highest.values()),
                owners=tuple(Owned(owner=name, num_bytes=size) for name, size in owned),
            )
        )
    return tuple(peaks)


def _made_in(part: str) -> str:
    """The owner of an allocation that an operator made in a part of a phase."""
    for word, owner in (
        (".forward", "activations"),
        (".head", "logits"),
        (".backward", "recomputation"),
        (".optimizer", "optimizer scratch"),
    ):
        if word in part:
            return owner
    return "activations"
