"""Memory of what a pass makes once for all layers: rotary positions, and the masks of some back ends."""

# N tokens of a micro-batch, a bytes of an activation.

from __future__ import annotations

from memtrain.memory.estimate.context_parallel import score_pairs
from memtrain.memory.estimate.flash_scratch import FLEX, MASKED
from memtrain.memory.estimate.layer_record import recorded_tables
from memtrain.memory.estimate.own_attention import own_masks
from memtrain.memory.estimate.workload import Workload, once

MASK_BLOCK = 128
"""Tokens of a block of flex attention's mask."""


@once
def positions_and_mask(load: Workload) -> int:
    """Cosines and sines, and masks, which are let go with a forward pass unless layers are computed again."""
    return positions(load) + own_masks(load)


@once
def positions(load: Workload) -> int:
    """Cosines and sines, and the block mask of flex attention.

    Layers in slices have a slice's cosines and sines (trainers/model/streamed/row_angles.py), but where these
    follow the length of the row. A block mask is four tables of int32 [N / 128, N / 128], two by queries and
    two by keys, and the number of each token's segment and prompt (trainers/model/attention/flex.py).
    """
    if load.record is not None:
        return recorded_tables(load)
    family = load.shape.family
    each = 4 if family.rotary_in_float else load.a
    is_cut = load.settings.slice_tokens and not load.shape.angles_follow_rows
    tokens = min(load.settings.slice_tokens, load.N) if is_cut else load.N
    cosines = 2 * each * tokens * load.shape.head_dim * family.num_rotary
    is_whole = load.batch.foreign is None and not load.settings.slice_tokens
    if load.settings.attention == MASKED and is_whole and load.settings.context_parallel == 1:
        # A byte for each pair of tokens lives as long as the layout of the row.
        return cosines + score_pairs(load)[0]
    if load.settings.attention != FLEX:
        return cosines
    blocks = -(-load.N // MASK_BLOCK)
    return cosines + 16 * blocks**2 + 20 * load.N
