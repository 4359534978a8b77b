"""Activations of DoRA: outputs scaled by magnitudes, and norms of rows of the adapted weights.

Source: PEFT 0.21, `DoraLinearLayer`, with the product of trainers/model/loading/dora_product.py; held against
traces by tests/trainers/tools/trace/test_dora_moments.py. Letters: as in activations.py; I inputs and O
outputs of a map.
"""

from __future__ import annotations

from memtrain.memory.estimate.adapters import adapts
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import MLP_NAMES

FACTORS = tuple(name for name in MLP_NAMES if name != LAST)
"""Maps to the factors of the MLP's product."""
SECOND = tuple(name for name in FACTORS if name != "gate_proj")
"""Maps of these whose gradients come first."""


def scales_in_float(load: Workload, *names: str) -> bool:
    """Whether DoRA scales half-precision outputs of any of the maps by float32 magnitudes: its products are
    float32 for a moment."""
    return load.is_half and scales(load, *names)


def scales(load: Workload, *names: str) -> bool:
    """Whether DoRA scales outputs of any of the maps."""
    adapter = load.settings.adapter
    return adapter is not None and adapter.kind == "dora" and adapts(load, *names)


def magnitudes_backward(load: Workload, kept: int, by_mlp: int) -> int:
    """Bytes at the first of the MLP's two adapted factors: what the last map kept is gone, and so are the
    factors but for the gate that another map makes; gradients of both factors and of the residual stream are
    there, and three products, or in half precision the output, its gradient and two products in float32.

    At the gate, where it alone is adapted, the other factor's gradient is that of the tokens by then, and the
    gate is gone.
    """
    shape, N, a = load.shape, load.N, load.a  # noqa: N806
    of_last = 2 * shape.width * adapts(load, LAST)
    gate = 0 if shape.family.fused else shape.mlp_width
    left = kept - by_mlp + a * N * (gate + shape.width - of_last)
    if not scales(load, *SECOND):
        left += a * N * (shape.width - 2 * shape.mlp_width)
    return left + N * (2 * a * shape.mlp_width + (16 if load.is_half else 12) * _scaled_width(load))


def last_magnitudes_backward(load: Workload, kept: int) -> int:
    """Bytes at the MLP's last map: everything kept, the gradient that comes in (rounded and as it came in
    half precision), and the output, its gradient and products in float32; 0 where it is not scaled."""
    if not scales(load, LAST):
        return 0
    return kept + load.N * load.shape.width * (2 * load.a + 16 if load.is_half else 16)


@once
def norms_recomputed(load: Workload, kept: int, keeps_product: bool) -> int:
    """Bytes where a layer's recomputation takes the norms of rows in its MLP; 0 where none is scaled.

    At the last map it began in the middle of this map's backward pass: the gradient that comes in, the same
    scaled, and in half precision both in float32. Beside them what the layer keeps but the map's adapter
    output, the residual stream, and `norms_forward`. At the factors the gradient alone, and neither the
    second factor nor the product.
    """
    if not load.settings.checkpoint_every or not scales(load, LAST, *FACTORS):
        return 0
    N, width, a = load.N, load.shape.width, load.a  # noqa: N806
    if scales(load, LAST):
        begun = 2 * a + 8 if load.is_half else a
        return kept + N * width * begun + norms_forward(load, LAST)
    later = a * N * load.shape.mlp_width * (2 + keeps_product)
    norms = norms_forward(load, *FACTORS) - later
    return kept + 2 * a * N * width + max(norms, factor_scaled(load, keeps_product))


@once
def factor_scaled(load: Workload, keeps_product: bool) -> int:
    """Bytes where the second factor is scaled, beside all that its layer will have kept: the product is not
    there (nor, where one map makes both, the activated gate), and of a packed map the output once more."""
    if not scales(load, *FACTORS):
        return 0
    product = load.a * load.N * load.shape.mlp_width
    later = keeps_product + load.shape.family.fused
    return scaled_forward(load, *FACTORS) + ((load.settings.quantize != "none") - later) * product


def scaled_forward(load: Workload, *names: str) -> int:
    """Held besides where an output of the MLP's width is scaled in a pass without gradients: three products
    in float32, one of them in the place of the adapter's, the rounded B A, and the weight if it is packed."""
    if not scales(load, *names):
        return 0
    weights = 1 + (load.settings.quantize != "none")
    return _scaled_width(load) * (load.N * (12 - load.a) + weights * load.a * load.shape.width)


@once
def _scaled_width(load: Workload) -> int:
    """Outputs of the widest adapted factor: twice the MLP's where one map makes both."""
    adapter = load.settings.adapter
    assert adapter is not None, "A map is scaled."
    widths = (part.num_outputs for part in load.shape.adapted(adapter) if part.name in FACTORS)
    return max(widths, default=load.shape.mlp_width)


@once
def norms_forward(load: Workload, *names: str) -> int:
    """Bytes of the norms of rows of the largest of these maps, which each pass takes anew.

    The product B A in float32 with its rounded form; then that, the same scaled, and the sum with the weight.
    Packed weights are unpacked besides. Under ZeRO-3 PEFT makes B A of an identity of I x I numbers.
    """
    adapter = load.settings.adapter
    if adapter is None or adapter.kind != "dora":
        return 0
    each = 6 if load.is_half else 12
    each += load.a * (load.settings.quantize != "none")
    identity = 4 * (load.settings.engine == "zero3")
    return max(
        (
            part.num_inputs * (each * part.num_outputs + 4 * adapter.r + identity * part.num_inputs)
            for part in load.shape.adapted(adapter)
            if part.name in names
        ),
        default=0,
    )
