"""Bytes of a rank under FSDP2: which groups are whole at a moment of a step, and which gradients travel.

With n ranks a rank keeps 1/n of weights, gradients and states. Beside these, in the order of a step: a group
that is gathered is there twice while it is cut out of the buffer that arrived; in a forward pass the buffer
of the group before is there until then; the backward pass keeps a group once, and the buffer of the one that
is next; the gradients of the group before lie end to end until those of the present one are summed.

Source: Zhao et al. 2023 (FSDP), arXiv:2304.11277, section 3.2; which buffers live together was read in
torch 2.13's `fully_shard` (_fsdp_param_group.py), and is held against traces by
tests/trainers/tools/trace/test_trace.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memtrain.memory.estimate.activations import (
    layer_backward,
    layer_boundary,
    layer_kept,
    norm_backward,
    norm_kept,
)
from memtrain.memory.estimate.experts import stacks_backward
from memtrain.memory.estimate.head import HeadBytes, head_bytes
from memtrain.memory.estimate.kept import Kept
from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.sharded.sharding import GATHERED, Group, Groups, groups
from memtrain.memory.estimate.static import gradient_bytes, shards_wait, trains_head
from memtrain.memory.estimate.streamed_layers import (
    final_norm_backward,
    forward_of_layer,
    streamed_backward,
)
from memtrain.memory.estimate.workload import Workload

Moment = dict[str, int]
"""Bytes by owner at one moment."""


class Turn(NamedTuple):
    """A layer that has its turn in the backward pass."""

    activations: int
    """Bytes kept by the modules below."""
    summed: int
    """A rank's part of the gradients that are summed before, in its first micro-batch."""
    on_its_way: int
    """Gradients of the group above, end to end."""
    ahead: int
    """The group below, which is gathered meanwhile."""
    recomputation: int


def fsdp_moments(
    load: Workload,
    resting: Mapping[str, int],
    kept: Kept,
    taught: Mapping[str, int],
    *,
    holds: bool,
    asked: int,
) -> list[Moment]:
    """The moments of forward and backward passes at which memory can be highest.

    `resting`: what rests from the step's start on. `kept`: see estimate. `taught`: a teacher's side of the
    loss, before the loss itself counts it; the teacher's head is gathered until that is made. `holds`: the
    step has several micro-batches, so a rank's gradients are there from the start of each. `asked`: bytes of
    a reference's pass between the policy's two.
    """
    cut = groups(load.settings, load.shape)
    own = own_gradients(load, accumulates=holds)
    rest = dict(resting) | {"gradients": own if holds else 0}
    # Gradients of a streamed layer's weights are in its sums until its last slice is through.
    is_added = load.trains_all and not load.settings.slice_tokens
    largest = load.a * load.shape.largest_linear if is_added else 0
    boundary = layer_boundary(load)
    teacher = load.batch.teacher
    in_loss = rest | {"teacher's pass": 0 if teacher is None else teacher.head}
    moments = [*_forward(load, cut, rest | dict(taught), kept), *_loss(load, cut, in_loss, kept, asked)]
    for turn in _turns(load, cut, own, kept):
        whole = cut.root.weights + cut.layer.weights + turn.ahead
        backward = rest | {"gathered weights": whole, "reduce buffers": turn.on_its_way}
        held = (own if holds else turn.summed) + cut.root.gradients
        moments += [
            backward
            | {"activations": turn.activations, "recomputation": turn.recomputation}
            | {"gradients": held + largest},
            backward
            | {"activations": turn.activations + 2 * boundary, "gradients": held + cut.layer.gradients},
        ]
    return [*moments, *_embedding(load, cut, rest, own)]


def pass_moments(load: Workload, resting: Mapping[str, int]) -> list[Moment]:
    """The moments of a pass without gradients: when groups are gathered, in a layer, and in the head."""
    cut, base = groups(load.settings, load.shape), dict(resting)
    scores = head_bytes(load, trains_head=trains_head(load.settings)).evaluation
    layer = {"activations": forward_of_layer(load) + positions_and_mask(load)}
    return [
        *_forward(load, cut, base, Kept(0, 0, 0, 0)),
        base | layer | {"gathered weights": cut.root.weights + GATHERED * cut.layer.weights},
        base | {"gathered weights": _in_head(cut), "logits": scores},
    ]


def _forward(load: Workload, cut: Groups, rest: Moment, kept: Kept) -> list[Moment]:
    """Moments of gathered groups: the first layer, another one, the head."""
    everything, of_last, *_ = kept
    outer = GATHERED * cut.root.weights + cut.embedding.weights
    first = max(GATHERED * cut.embedding.weights, outer + GATHERED * cut.layer.weights)
    layer = cut.root.weights + (GATHERED + 1) * cut.layer.weights
    head = GATHERED * cut.head.weights + cut.layer.weights if cut.head.weights else 0
    boundary = layer_boundary(load)
    return [
        rest | {"gathered weights": first, "activations": boundary + positions_and_mask(load)},
        rest | {"gathered weights": layer, "activations": everything - of_last + boundary},
        rest | {"gathered weights": head, "activations": everything + 2 * boundary},
    ]


def _loss(load: Workload, cut: Groups, rest: Moment, kept: Kept, asked: int) -> list[Moment]:
    """The head and the final norm, both ways."""
    head, boundary = head_bytes(load, trains_head=trains_head(load.settings)), layer_boundary(load)
    loss = rest | {"activations": kept.at_loss + head.norm}
    # A tied head has the backbone's turn: the last layer is on its way while the loss goes back.
    ahead = 0 if cut.head.weights else cut.layer.weights
    read = cut.root.weights + GATHERED * max(cut.layer.weights, cut.head.weights)
    summed = 0 if rest["gradients"] else _held(load, cut.head.gradients)
    # The last gradient of a group is let go when the group is summed: here it is the only one.
    summing = cut.head.gradients + _part(load, cut.head.sent + _rounded(cut.head))
    leaving = rest["gradients"] + summed + cut.root.gradients
    return [
        loss | {"gathered weights": _in_head(cut), "logits": head.forward},
        loss | {"gathered weights": read, "logits": head.kept, "reference's pass": asked},
        loss | {"gathered weights": cut.root.weights + cut.head.weights + ahead, "logits": head.backward},
        loss
        | {"gradients": rest["gradients"] + summing, "logits": _hidden_gradients(load, head)}
        | {"reduce buffers": cut.head.sent},
        loss
        | {"gathered weights": cut.root.weights + cut.layer.weights, "reduce buffers": cut.head.sent}
        | {"gradients": leaving, "logits": _norm_backward(load)},
        loss
        | {"gradients": leaving, "logits": 2 * boundary, "reduce buffers": cut.head.sent}
        | {"gathered weights": cut.root.weights + GATHERED * cut.layer.weights},
    ]


def _norm_backward(load: Workload) -> int:
    """Of the norm after the layers."""
    return final_norm_backward(load) if load.settings.slice_tokens else norm_backward(load)


def _hidden_gradients(load: Workload, head: HeadBytes) -> int:
    """Gradients of the scored rows that the loss's backward pass leaves while the head's gradient is
    summed."""
    return load.S * load.shape.width * (load.a + (4 if load.is_half else 0)) if head.weight_gradient else 0


def _in_head(cut: Groups) -> int:
    """Whole weights in the loss's forward pass: the head twice, or a tied one and the last layer's buffer."""
    return cut.root.weights + (GATHERED * cut.head.weights or cut.layer.weights)


def _turns(load: Workload, cut: Groups, own: int, kept: Kept) -> list[Turn]:
    """The last layer, the layer below, and the first: kept bytes shrink, bytes on their way change."""
    everything, of_last, first, _ = kept
    num_layers, every = load.shape.num_layers, load.settings.checkpoint_every
    after_head = _held(load, cut.head.gradients)
    after_all = own - _held(load, cut.layer.gradients + cut.embedding.gradients + cut.root.gradients)
    after_last = min(after_all, after_head + _held(load, cut.layer.gradients))
    is_streamed = load.settings.slice_tokens > 0
    is_plain = not is_streamed and (not every or (num_layers - 2) % every != 0)
    below = everything - (of_last or layer_boundary(load)) - (layer_kept(load) if is_plain else 0)
    backward = max(layer_backward(load), stacks_backward(load, layer_kept(load)))
    if is_streamed:
        backward = sum(streamed_backward(load).values())
    # A frozen embedding needs no gradient, so the first norm of all keeps nothing.
    unneeded = 0 if load.trains_all or is_streamed else norm_kept(load, load.shape.width, num_scales=1)
    turns = [Turn(everything - of_last, after_head, cut.head.sent, cut.layer.weights, backward)]
    if num_layers > 2:
        below = max(first, below)
        turns.append(Turn(below, after_last, cut.layer.sent, cut.layer.weights, backward))
    if num_layers > 1:
        outer = cut.embedding.weights
        turns.append(Turn(first, max(0, after_all), cut.layer.sent, outer, backward - unneeded))
    return turns


def _embedding(load: Workload, cut: Groups, rest: Moment, own: int) -> list[Moment]:
    """The embedding's gradient, and a tied head's, which waited for it."""
    outer = cut.root if cut.root.weights else cut.embedding
    made = 3 * outer.gradients if cut.root.weights else outer.gradients
    held = rest["gradients"] or own - _held(load, outer.gradients)
    summed = _part(load, outer.sent + _rounded(outer))
    # The last gradient of a group is let go when the group is summed: the only one of an embedding alone.
    summing = max(outer.gradients, summed) if cut.root.weights else outer.gradients + summed
    return [
        rest
        | {"gathered weights": outer.weights, "reduce buffers": cut.layer.sent}
        | {"gradients": held + made, "activations": layer_boundary(load)},
        rest | {"gradients": held + summing, "reduce buffers": outer.sent},
    ]


def own_gradients(load: Workload, *, accumulates: bool) -> int:
    """A rank's part of all gradients, as far as it stays on the device: none of it does where shards wait on
    the host, which each part of a gradient joins as soon as it is summed."""
    if shards_wait(load.settings):
        return 0
    return gradient_bytes(load.settings, load.shape, accumulates=accumulates)


def _held(load: Workload, num_bytes: int) -> int:
    """A rank's part of gradients that were summed before."""
    return 0 if shards_wait(load.settings) else _part(load, num_bytes)


def _rounded(group: Group) -> int:
    """Bytes of the gradients of a group that are summed in float32 and rounded then."""
    return group.gradients if group.sent > group.gradients else 0


def _part(load: Workload, num_bytes: int) -> int:
    """A rank's part of gradients."""
    return -(-num_bytes // load.settings.num_processes)
