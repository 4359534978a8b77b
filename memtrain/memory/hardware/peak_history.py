"""Peaks of runs that ended beside what was predicted of them, and what the next prediction learns from it.

A correction is a share of the predicted peak, bounded, told on a line of its own. A run that did not rehearse
may never have met its heaviest batch: it says only how much more was needed, never how much less.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from memtrain.memory.hardware.calibration import folder, versions, write_whole
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings

BOUND = 0.1
"""Most that a prediction is corrected by. Taste: beyond, something else is wrong, and is not to be hidden."""
KEPT = 5
"""Runs of a kind that are remembered; the one that needed most counts."""
FILE = "runs.json"
KIND = (
    *("device", "num_processes", "context_parallel", "context_by", "engine", "shard_offload", "loads_shards"),
    *("checkpoint_layout", "background_save", "dtype", "attention", "liger", "adapter", "quantize"),
    *("padding_free", "shared_prompts", "sampler", "sampler_sleep", "gather_weights", "reference", "value"),
    *("checkpoint_every", "offload", "offload_keep", "slice_tokens", "loss", "optimizer", "master_weights"),
    *("in_backward", "optimizer_offload"),
)
"""Settings that change which tensors are there, or where: runs that differ in one of them err apart."""

NOT_OF_THE_KIND = {
    "threads": "threads of the CPU hold no tensors",
    "zero_bucket": "a size, given by the model; whether there is one is the engine's",
    "max_length": "a size of the rows",
    "truncation": "which rows and tokens are kept",
    "max_prompt": "a size of the rows",
    "max_completion": "a size of the rows",
    "group_prompts": "how many answers share a prompt; that they share one is shared_prompts",
    "packing": "how full the rows are; that they lie end to end is padding_free's",
    "documents_see_each_other": "where attention looks, not what it keeps",
    "positions_by_row": "which positions padding has, not how many",
    "sampler_bytes": "a size, beside the tensors of the run",
    "sampler_keys_bytes": "a part of sampler_bytes",
    "sampler_context": "a size, of another process",
    "rollout_rows": "a size of the rollout",
    "pass_factor": "a size of the passes without gradients",
    "pad_to_multiple_of": "a size of the rows",
    "group_by_length": "the order of the rows",
    "batch_rows": "a size of the step",
    "batch_tokens": "a size of the step",
    "micro_rows": "a size of the micro-batch",
    "micro_tokens": "a size of the micro-batch",
    "max_steps": "how long the run is",
    "offload_disk": "the folder of what host memory has no room for; no prediction of a peak reads it",
    "offload_host_bytes": "a size, in host memory; no prediction of a peak reads it",
    "loss_tile_bytes": "a size of the loss",
    "expandable_segments": "the allocator's slack, which is beside the peak",
    "beside_bytes": "what the device needs beside tensors, and so beside the peak",
    "rehearse": "told of every run that is noted: one that did not rehearse only raises a prediction",
    "recovery": "what may change later; the peak is that of the plan until then",
}
"""All other settings, each with the reason why runs that differ in it correct one another."""


@dataclass(frozen=True, slots=True)
class History:
    """Ratios of measured to predicted peaks, by the kind of run."""

    ratios: Mapping[str, tuple[float, ...]]

    def correction(self, kind: str, predicted_bytes: int) -> int:
        """Bytes to add to a prediction of this kind (below zero: to take off); 0 where nothing is known."""
        known = self.ratios.get(kind, ())
        if not known:
            return 0
        return round(min(BOUND, max(-BOUND, max(known) - 1)) * predicted_bytes)


EMPTY = History({})


def kind_of_run(settings: Settings, shape: ModelShape, method: str) -> str:
    """A key of runs whose predictions err alike: model, method, strategies and versions."""
    model = (shape.model_type, shape.num_layers, shape.width, shape.mlp_width, shape.vocab_size, shape.tied)
    chosen = {name: str(getattr(settings, name)) for name in KIND}
    words = repr((method, model, sorted(chosen.items()), sorted(versions().items())))
    return hashlib.sha256(words.encode()).hexdigest()[:20]


def read_history() -> History:
    """What is remembered; nothing where the store is off, empty or unreadable."""
    base = folder()
    if base is None:
        return EMPTY
    try:
        kept = json.loads((base / FILE).read_text())
        return History({str(kind): tuple(map(float, ratios)) for kind, ratios in kept.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return EMPTY


def note_run(kind: str, *, predicted_bytes: int, measured_bytes: int, is_rehearsed: bool) -> None:
    """Remember a run that ended. `predicted_bytes`: without a correction."""
    base = folder()
    if base is None or not kind or not predicted_bytes or not measured_bytes:
        return
    ratio = measured_bytes / predicted_bytes
    if not is_rehearsed and ratio < 1:
        return
    ratios = dict(read_history().ratios)
    ratios[kind] = (*ratios.get(kind, ()), round(ratio, 6))[-KEPT:]
    write_whole(base / FILE, json.dumps(ratios, indent=1))
