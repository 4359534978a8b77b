"""Activations of layers under Liger's kernels, which make the gated product in one: moments of their own.

Source: liger-kernel 0.8.5, ops/swiglu.py; held against traces of its own code by
tests/trainers/tools/trace/test_trace_liger.py. Letters: as in activations.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.adapter_sums import LayerParts, last_product
from memtrain.memory.estimate.adapters import adapts, adds_in_one_kernel
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import MLP_NAMES


def liger_recomputed(load: Workload, parts: LayerParts) -> int:
    """Bytes of a layer in its MLP as it is computed again; 0 where it is not.

    At the second factor; at the product, with the tokens that entered; at the last map where PEFT's layer
    adapts it. Beside them the gradient that comes in, and where it does the same scaled: recomputation began
    in the middle of this map's backward pass.
    """
    if not load.settings.checkpoint_every or not _has_gated_product(load):
        return 0
    boundary, scales_last = load.a * load.N * load.shape.width, _is_pefts(load, LAST)
    entered = boundary * (1 - parts.keeps_input)
    product = last_product(load, parts) + entered
    last = scales_last * (boundary + entered)
    moment = max(_at_factor(load, parts), product, last)
    return parts.kept + boundary * (1 + scales_last) + moment


def liger_forward(load: Workload, parts: LayerParts) -> int:
    """Bytes in the last layer's MLP in a forward pass, beside all that layers keep: the same moments, at the
    last map with its outputs, and the embeddings, which the backbone holds to its end."""
    if not _has_gated_product(load):
        return 0
    boundary = load.a * load.N * load.shape.width
    last = last_product(load, parts) + boundary * (1 - parts.keeps_input)
    last += boundary * (3 if _is_pefts(load, LAST) else 1)
    return boundary * (not load.trains_all) + max(_at_factor(load, parts), last)


def _has_gated_product(load: Workload) -> bool:
    return load.settings.liger and load.shape.experts is None


def _at_factor(load: Workload, parts: LayerParts) -> int:
    """Bytes at a factor that PEFT's own layer adapts, beside all that its layer keeps; 0 where none is.

    The map's output and the adapter's, and the latter scaled, while there is neither a product nor what the
    last map keeps; the second factor is not there at the first.
    """
    adapter, row = load.settings.adapter, load.a * load.N
    if adapter is None or not _is_pefts(load, *(name for name in MLP_NAMES if name != LAST)):
        return 0
    made = row * load.shape.mlp_width * (1 + _is_pefts(load, "up_proj", "gate_up_proj"))
    later = row * load.shape.mlp_width * parts.keeps_product + row * adapter.r * adapts(load, LAST)
    return made - later


def _is_pefts(load: Workload, *names: str) -> bool:
    """Whether PEFT's own layers scale products for any of the maps."""
    return adapts(load, *names) and not adds_in_one_kernel(load)
