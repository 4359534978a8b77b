"""Bytes of a rank under DeepSpeed's ZeRO: the engine's own, beside weights, copies and states.

Source: measured with deepspeed 0.19.8 on two gloo ranks (torch 2.13, CPU, float32; 4 layers of width 256,
tied and untied, with and without checkpointing): counted live tensors told which buffers live together. In
half precision, and with more ranks, it was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.estimate.activations import layer_backward, norm_backward
from memtrain.memory.estimate.head import head_bytes
from memtrain.memory.estimate.kept import Kept
from memtrain.memory.estimate.sharded.zero_config import bucket_of, stage_of
from memtrain.memory.estimate.static import (
    num_trained,
    static_bytes,
    trains_head,
    waits_on_host,
    weights_bytes,
)
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings

Moment = dict[str, int]
"""Bytes by owner at one moment."""


LIVE_NUMBERS = 1_000_000_000
"""Gathered weights that stay until they are used again, by DeepSpeed's defaults.

Source: deepspeed 0.19.8, zero/config.py, `stage3_max_live_parameters` and `stage3_max_reuse_distance`."""

TO_SAVE = "states to save"
"""Owner of weights that the main rank gathers in host memory for writing."""


def between_steps(settings: Settings, shape: ModelShape) -> Moment:
    """Bytes that stage 3 holds from its beginning: this rank's part of all gradients, and the reduce
    buffer."""
    if stage_of(settings) < 3:
        return {}
    return {"gradients": _part(settings, shape), "reduce buffers": _bucket(settings, shape)}


def gathered_module(load: Workload) -> int:
    """Bytes of the largest module that stage 3 gathers, module by module, not layer by layer."""
    if stage_of(load.settings) < 3:
        return 0
    shape = load.shape
    return _live(load, load.a * max(shape.num_embedding, shape.num_head, _matrix(shape)))


def _live(load: Workload, needed: int) -> int:
    """Bytes of weights that stage 3 has gathered where so many are needed: in another tool's run as many
    stay as DeepSpeed's defaults let, which every known file of a tool has (`LIVE_NUMBERS`)."""
    if load.batch.foreign is None:
        return needed
    return max(needed, load.a * min(load.shape.num_parameters, LIVE_NUMBERS))


def zero_moments(
    load: Workload,
    resting: Mapping[str, int],
    last: Mapping[str, int],
    kept: Kept,
    *,
    holds: bool,
) -> list[Moment]:
    """The moments of an optimizer step at which memory can be highest.

    `resting`: what rests from the step's start on, `last`: at its end. `kept`: see estimate. `holds`: the
    step has several micro-batches, so gradients are there from the start of each.
    """
    settings, shape = load.settings, load.shape
    everything, of_last, first, at_loss = kept
    head = head_bytes(load, trains_head=trains_head(settings))
    is_third, trains_all = stage_of(settings) == 3, settings.adapter is None
    part = _part(settings, shape)
    before, after = {
        1: (static_bytes(settings, shape).gradients if holds else 0, static_bytes(settings, shape).gradients),
        2: (part if holds else 0, 2 * part if holds else part),
        3: (part, part),
    }[stage_of(settings)]
    outer = load.a * max(shape.num_embedding, shape.num_head)
    # When the last layer's backward pass begins, only those of the head are there (stage 2: its buckets too).
    early = max(before, min(after, outer)) if trains_all and stage_of(settings) != 2 else after
    layer = load.a * shape.num_per_layer(expert=shape.num_expert_layers > 0)
    fresh = (2 * load.a * _matrix(shape) if is_third else layer) if trains_all else 0
    # The head's gradient waits for the embedding's, where they are one weight.
    fresh += load.a * shape.num_embedding if is_third and trains_all and shape.tied else 0
    recomputed = layer if settings.checkpoint_every else load.a * _matrix(shape)
    rest: Moment = dict(resting) | {"reduce buffers": _bucket(settings, shape)}
    forward = rest | {"gradients": before, "activations": at_loss + head.norm}
    backward = rest | {"gradients": after + fresh, "recomputation": layer_backward(load)}
    backward |= {"gathered weights": _live(load, recomputed) if is_third else 0}
    seen = {"gathered weights": _live(load, outer) if is_third else 0}
    made = outer if is_third and trains_all else 0
    return [
        forward | seen | {"logits": head.forward},
        forward | seen | {"logits": head.backward},
        forward | seen | {"gradients": before + made, "logits": norm_backward(load)},
        backward | {"activations": everything - of_last, "gradients": early + fresh},
        backward | {"activations": first},
        # While the update is made gradients lie once as they came and once end to end; stages 1 and 2 take
        # their norm in float64 before, in the first step before there is a state. Source: deepspeed 0.19.8,
        # stage_1_and_2.py, get_grad_norm_direct.
        *([] if is_third else [dict(resting) | {"gradients": 3 * part}]),
        dict(last)
        | {"reduce buffers": _bucket(settings, shape) if is_third else 0}
        | {"gradients": 2 * part},
    ]


def saved_whole(settings: Settings, shape: ModelShape) -> int:
    """Bytes that the main rank gathers in host memory to save them: states, and weights that are cut."""
    trained = num_trained(settings, shape)
    moments = 2 * 4 * trained if settings.optimizer == "adamw" else 0
    copies = 4 * trained if settings.master_weights else 0
    whole = settings.model_copy(update={"engine": "ddp"})
    weights = weights_bytes(whole, shape) if stage_of(settings) == 3 and settings.adapter is None else 0
    return moments + copies + weights


def _part(settings: Settings, shape: ModelShape) -> int:
    """Bytes of the float32 gradients of one rank; none where its states wait on the host, and they beside
    them.

    Source: deepspeed 0.19.8, stage3.py (`grad_partitions_flat_buffer` lies on `self.device`, which is the
    host's with `offload_optimizer`) and stage_1_and_2.py (`single_partition_of_fp32_groups`).
    """
    if waits_on_host(settings):
        return 0
    return 4 * -(-num_trained(settings, shape) // settings.num_processes)


def _bucket(settings: Settings, shape: ModelShape) -> int:
    """The buffer that gradients are reduced in: in stage 3 one, of the float32 numbers that ranks exchange;
    else of the weights' precision, two of them where that goes on beside the computation.

    Source: deepspeed 0.19.8, stage3.py (`ipg_buckets`) and stage_1_and_2.py; seen in traces.
    """
    if stage_of(settings) == 3:
        return 4 * bucket_of(shape)
    size = 4 if settings.dtype == "float32" else 2
    return bucket_of(shape) * size * (2 if settings.device == "cuda" else 1)


def _matrix(shape: ModelShape) -> int:
    """Numbers of the largest matrix of a layer."""
    return max(part.num_inputs * part.num_outputs for part in shape.linears)
