"""Activations on the device where all that layers keep travels to the host."""

from __future__ import annotations

from itertools import cycle, islice

from memtrain.memory.estimate.activations import (
    keeps_attention_input,
    keeps_mlp_input,
    layer_backward,
    layer_kept,
    needs_product,
)
from memtrain.memory.estimate.adapters import adapts, adds_in_one_kernel
from memtrain.memory.estimate.experts import widest_mlp
from memtrain.memory.estimate.flash_scratch import flash_scratch
from memtrain.memory.estimate.layer_record import (
    travelling_backward,
    travelling_forward,
    travelling_waiting,
    travels,
)
from memtrain.memory.estimate.own_attention import (
    drops_in_steps,
    hides_by_mask,
    makes_own_scores,
    whole_scores,
)
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import ENTERING, MLP_NAMES
from memtrain.memory.plan.sizes import KEEP_LAST, MIN_BYTES


def waiting_storages(load: Workload) -> int:
    """Bytes on the device when all layers are through: the newest storages of the last layer, and the small
    ones of every layer; at most all that one keeps. Of layers that no formula knows, all of it."""
    shape, full = load.shape, layer_kept(load)
    if travels(load):
        return travelling_waiting(load)
    if load.record is not None:
        return full
    if not _is_plain(load):
        return min(full, load.a * load.N * (5 * widest_mlp(load) + 2 * shape.width))
    large, stays = _by_size(load)
    return sum(islice(cycle(reversed(large)), min(KEEP_LAST["all"], shape.num_layers * len(large)))) + stays


def storages_amid(load: Workload) -> int:
    """Bytes in a layer's MLP as its product is made: two factors, it, the residual stream, and the newest
    storages before them, with those of the layer before; 0 where they are not counted one by one."""
    shape = load.shape
    if travels(load):
        return travelling_forward(load)
    if shape.num_layers < 2 or load.record is not None or not _is_plain(load):
        return 0
    large, stays = _by_size(load)
    of_mlp = [size for size in _saved_in_mlp(load) if size >= MIN_BYTES]
    before = [*large, *large[: len(large) - len(of_mlp)]]
    made = load.a * load.N * (3 * shape.mlp_width + shape.width)
    return stays + sum(before[-KEEP_LAST["all"] :]) + made + _beside_by_liger(load, len(large) - len(of_mlp))


def _beside_by_liger(load: Workload, num_before_mlp: int) -> int:
    """Bytes there besides under Liger's kernels: the adapter's product where PEFT's layer scales it, and the
    layer's input where storages after it are as many as stay."""
    if not load.settings.liger:
        return 0
    scaled = not load.trains_all and not adds_in_one_kernel(load)
    entered = num_before_mlp > KEEP_LAST["all"]
    return load.a * load.N * (scaled * load.shape.mlp_width + entered * load.shape.width)


def _is_plain(load: Workload) -> bool:
    family = load.shape.family
    is_plain = family.num_wide_norms == 2 and not family.norms_after and not family.fused
    has_scores = whole_scores(load)[0] > 0 or makes_own_scores(load) or drops_in_steps(load)
    return is_plain and not (has_scores or hides_by_mask(load) or load.shape.num_expert_layers)


def _by_size(load: Workload) -> tuple[list[int], int]:
    """(storages of a layer that travel, in their order; bytes of all others, of all layers)."""
    saved = _saved_in_order(load)
    small = sum(size for size in saved if size < MIN_BYTES)
    return [size for size in saved if size >= MIN_BYTES], load.shape.num_layers * small


def _saved_in_order(load: Workload) -> list[int]:
    """Bytes of the storages that a layer saves, in the order of its forward pass."""
    shape, adapter, row = load.shape, load.settings.adapter, load.a * load.N
    Q, K = shape.query_width, shape.kv_width  # noqa: N806
    low = row * adapter.r if adapter is not None else 0
    lows = {part.name: low for part in shape.adapted(adapter)} if adapter is not None else {}
    of_heads = []
    if shape.family.qk_norm != "none":
        heads = (shape.num_heads, shape.num_kv_heads) if shape.family.qk_norm == "head" else (1, 1)
        of_heads = [size for pair in zip((Q, K), heads, strict=True) for size in _of_norm(load, *pair)]
    attention = [row * keeps_attention_input(load) * shape.width, *of_heads, row * Q, row * K, row * K]
    return [
        *_of_norm(load, shape.width, 1),
        *attention,
        row * Q,
        4 * load.N * shape.num_heads,
        *(lows.get(name, 0) for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *_of_norm(load, shape.width, 1),
        row * keeps_mlp_input(load) * shape.width,
        *_saved_in_mlp(load),
    ]


def _saved_in_mlp(load: Workload) -> list[int]:
    """Bytes of the storages that the maps of the MLP and their products save: the first adapters' come with
    them."""
    adapter, row = load.settings.adapter, load.a * load.N
    wide = row * load.shape.mlp_width
    factors = [wide] * (2 if load.is_fused or load.settings.liger else 3)
    adapted = 0 if adapter is None else sum(part.name in MLP_NAMES for part in load.shape.adapted(adapter))
    lows = [row * adapter.r] * adapted if adapter is not None else []
    return [*factors, wide * needs_product(load), *lows]


def _of_norm(load: Workload, width: int, num_scales: int) -> tuple[int, ...]:
    """Bytes of the storages that a norm saves."""
    scales = 4 * load.N * num_scales
    if load.is_fused or load.settings.liger:
        return load.a * load.N * width, scales
    normalized = (4 if load.shape.family.norms_in_float else load.a) * load.trains_all
    return 4 * load.N * width, normalized * load.N * width, scales


def offloaded_backward(load: Workload, *, is_first: bool = False) -> int:
    """Most that a layer holds in its backward pass when all it kept is fetched back, one storage ahead.

    A fit, not a count of tensors: traces of llama at two precisions, torch 2.13, come to a*N*(6*M + 2.5*W),
    those of fused kernels, which activate the gate again, to 5*M + 3.5*W, and with an adapter to 2*W more;
    those of Liger's, which write over the factors, to 4*M + 5*W in the last layer, whose newest storages are
    there (where PEFT's layer adapts the last map, 5*M + 6.25*W, with the sum of the product's gradients), and
    to 3*M + 3*W in the first. docs/memory.md has its error (`offloading all`). At the attention, which is the
    most beside a narrow MLP, its inputs and output are back and their gradients there. Of layers that no
    formula knows all that one kept is taken to be back at once.
    """
    if travels(load):
        return travelling_backward(load, is_first=is_first).num_bytes
    if load.record is not None:
        return layer_backward(load)
    beside = 3 + (load.is_fused if load.trains_all else 2)
    shape, row = load.shape, load.a * load.N
    in_mlp = row * ((6 - load.is_fused) * widest_mlp(load) + beside * shape.width)
    if load.settings.liger:
        in_mlp = row * (4 * widest_mlp(load) + (5 if load.trains_all else 7) * shape.width)
        if adapts(load, LAST) and not adds_in_one_kernel(load):
            in_mlp = max(in_mlp, round(row * (5 * widest_mlp(load) + 6.25 * shape.width)))
        in_mlp -= is_first * row * (widest_mlp(load) + 2 * shape.width)
    in_attention = row * (2 * shape.width + 4 * shape.query_width + 4 * shape.kv_width) + flash_scratch(load)
    if is_first and load.trains_all:
        # Gradients of the maps after it are there, of which its last alone is counted with the MLP's turn.
        later = sum(one.num_inputs * one.num_outputs for one in shape.linears if one.name not in ENTERING)
        in_attention += load.a * (later - shape.largest_linear)
    return max(in_mlp, in_attention)
