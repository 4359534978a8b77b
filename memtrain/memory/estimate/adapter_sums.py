"""Moments of a layer's passes at its MLP's maps: PEFT's own sums, and the end with weights from the host.

Source: PEFT 0.21, tuners/lora/layer.py, `Linear.forward`; seen in traces. Letters: as in activations.py.
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.adapters import adapts, adds_in_one_kernel, kept_by
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import MLP_NAMES


class LayerParts(NamedTuple):
    """Bytes that a layer keeps, and what is among them."""

    kept: int
    by_mlp: int
    keeps_product: bool
    """The input of the MLP's last map."""
    keeps_input: bool
    """The input of its first maps."""


def sums_recomputed(load: Workload, parts: LayerParts) -> int:
    """Bytes where a layer's recomputation adds products in its MLP; 0 where none is added so.

    It begins at the last map, in whose backward pass the gradient that comes in is scaled where it is
    adapted (and before where the layer scales its outputs), and ends before that map's product with B.
    """
    if not load.settings.checkpoint_every or not _adds_its_own_way(load):
        return 0
    boundary, is_last = load.a * load.N * load.shape.width, adapts(load, LAST)
    at_last = last_product(load, parts) + boundary if is_last else 0
    num_gradients = 1 + is_last + load.shape.family.scales_outputs
    held = parts.kept + boundary * num_gradients + _beside(load, parts)
    return held + max(at_last, _at_factor(load, parts))


def sums_forward(load: Workload, parts: LayerParts) -> int:
    """Bytes besides all that a layer will have kept where a forward pass adds products in its MLP: at the
    last map its own product, the adapter's and that scaled. The model holds what comes out of its embeddings
    until its layers are through."""
    if not _adds_its_own_way(load):
        return 0
    boundary = load.a * load.N * load.shape.width
    at_last = last_product(load, parts) + 3 * boundary if adapts(load, LAST) else 0
    return boundary + _beside(load, parts) + max(at_last, _at_factor(load, parts))


def adapted_forward(load: Workload) -> int:
    """Bytes of the adapter of the MLP's second factor in a pass without gradients: low product and rounded B,
    or, by PEFT's own way, its scaled product beside the map's, and three outputs where one map makes both."""
    adapter, mlp_width = load.settings.adapter, load.shape.mlp_width
    if adapter is None or not adapts(load, "up_proj", "gate_up_proj"):
        return 0
    if adds_in_one_kernel(load):
        return load.a * adapter.r * (load.N + mlp_width)
    return load.a * load.N * mlp_width * (3 if load.shape.family.fused else 1)


def product_from_host(load: Workload, parts: LayerParts) -> int:
    """Bytes at the end of a layer's recomputation where its weights come from the host: what it keeps, the
    product that enters its last map, that map's output, and the gradient that comes in.

    torch's own checkpointing stops at the last tensor that is kept.
    """
    if not load.settings.weights_offload or load.shape.experts is not None:
        return 0
    return parts.kept + last_product(load, parts) + 2 * load.a * load.N * load.shape.width


def _adds_its_own_way(load: Workload) -> bool:
    """Whether PEFT's layers add products in the MLP; those under Liger are counted in liger_layers.py."""
    adapter, liger = load.settings.adapter, load.settings.liger
    is_plain = adapter is not None and load.record is None and not liger
    return is_plain and adapts(load, *MLP_NAMES) and not adds_in_one_kernel(load) and not load.shape.experts


def last_product(load: Workload, parts: LayerParts) -> int:
    """Bytes of the product that enters the last map, where it is not kept."""
    return (not parts.keeps_product) * load.a * load.N * load.shape.mlp_width


def _beside(load: Workload, parts: LayerParts) -> int:
    """The input of the MLP where it is not kept, and the residual stream, which a norm in float32 and a fused
    one keep themselves."""
    is_apart = load.is_half and not load.is_fused
    return load.a * load.N * load.shape.width * (is_apart + 1 - parts.keeps_input)


def _at_factor(load: Workload, parts: LayerParts) -> int:
    """Bytes at the second factor, or at both where one map makes them, less all that the MLP will have kept:
    its product, the adapter's and that scaled, and the first factor as it comes and activated."""
    shape, adapter = load.shape, load.settings.adapter
    assert adapter is not None, "Products are an adapter's."
    adapted = shape.adapted(adapter)
    width = max((part.num_outputs for part in adapted if part.name in MLP_NAMES - {LAST}), default=0)
    if not width:
        return -parts.kept
    first = 0 if width > shape.mlp_width else 2 * shape.mlp_width
    of_last = kept_by(load, [part for part in adapted if part.name == LAST])
    return load.a * load.N * (first + 3 * width) - parts.by_mlp - of_last
