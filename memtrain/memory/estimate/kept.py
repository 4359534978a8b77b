"""Bytes that layers keep from the forward to the backward pass, under every treatment of activations."""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import (
    keeps_its_input,
    kept_despite,
    layer_boundary,
    layer_kept,
    norm_kept,
)
from memtrain.memory.estimate.experts import widest_mlp
from memtrain.memory.estimate.positions import positions_and_mask
from memtrain.memory.estimate.workload import Workload, once


class Kept(NamedTuple):
    """Bytes kept by all layers together.

    A layer at work (`layer_backward`) holds what it kept, so that is not to be counted twice.
    """

    everything: int
    """By all layers, when the last one is at work."""
    of_last: int
    """Of these by the last layer that is at work."""
    beside_first: int
    """Beside the first layer."""
    at_loss: int
    """By all layers, when none is at work."""


def kept_bytes(load: Workload) -> int:
    """Bytes that all layers keep for the backward pass."""
    return kept(load).at_loss


@once
def kept(load: Workload) -> Kept:
    """The bytes that layers keep.

    Of inputs that wait on the host, one is there besides those of the last `offload_keep` layers: the last
    that left, or the next that is fetched.
    """
    settings, num_layers = load.settings, load.shape.num_layers
    every, full = settings.checkpoint_every, layer_kept(load)
    boundary, tables = layer_boundary(load), positions_and_mask(load)
    if settings.offload == "all":
        waiting = min(full, load.a * load.N * (5 * widest_mlp(load) + 2 * load.shape.width))
        return Kept(waiting + tables, waiting, tables, waiting + tables)
    if settings.slice_tokens:
        return _kept_streamed(load)
    if not every:
        # Frozen embeddings need no gradient, so the first norm of all keeps nothing.
        unneeded = 0 if load.trains_all else norm_kept(load, load.shape.width, num_scales=1)
        everything = num_layers * full - unneeded + tables
        return Kept(everything, full, tables, everything)
    is_away = settings.offload == "boundaries"
    count = -(-num_layers // every)
    stay = min(count, settings.offload_keep + 1) if is_away else count
    everything = stay * boundary + count * kept_despite(load) + (num_layers - count) * full + tables
    is_last_plain = (num_layers - 1) % every != 0
    # What was held may be a tensor that the layer keeps. Where the last one left too, the one before
    # it is fetched by then.
    keeps_input = keeps_its_input(load)
    is_one_ahead = is_away and not settings.offload_keep and count > 1
    shared = boundary if keeps_input and not is_one_ahead else 0
    of_first = boundary if keeps_input and (not is_away or settings.offload_keep >= count) else 0
    return Kept(
        everything - shared, full - shared if is_last_plain else 0, boundary + tables - of_first, everything
    )


def _kept_streamed(load: Workload) -> Kept:
    """The same where every layer goes over the row in slices: its input is all that it keeps.

    What waits on the host is there while it is used.
    """
    settings, count = load.settings, load.shape.num_layers
    boundary, tables = layer_boundary(load), positions_and_mask(load)
    stay = count if settings.offload == "none" else min(count, settings.offload_keep)
    everything = max(1, stay) * boundary + tables
    return Kept(everything, 0, boundary + tables, stay * boundary + tables)
