"""Memory of adapters beside their weights: tensors kept by a layer, and copies in half precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.shape import Linear
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.recipes.sections.model import Adapter


@once
def adapter_kept(load: Workload) -> int:
    """Kept by the adapters of one layer: a*N*r each for x @ A, and a copy of x where there is dropout.

    The mask of what was dropped is a byte a number on CUDA, and a number on a CPU. In half precision also
    the float32 adapter weights as they are multiplied, where each map rounds its own.
    """
    adapter = load.settings.adapter
    if adapter is None:
        return 0
    parts = load.shape.adapted(adapter)
    kept = kept_by(load, parts)
    if load.is_half and not rounded_adapters(load):
        kept += load.a * load.shape.num_adapter_per_layer(adapter)
    return kept


def kept_by(load: Workload, parts: Sequence[Linear]) -> int:
    """Kept by the adapters of some maps: a*N*r each, and what dropout leaves of x with its mask."""
    adapter = load.settings.adapter
    assert adapter is not None, "Maps are adapted."
    kept = load.a * load.N * adapter.r * len(parts)
    if adapter.dropout:
        kept += load.a * load.N * sum(part.num_inputs for part in parts) + _masks(load, parts)
    return kept


def masks_kept(load: Workload, *names: str) -> int:
    """Kept by the adapters of these maps as masks of what was dropped."""
    adapter = load.settings.adapter
    if adapter is None or not adapter.dropout:
        return 0
    return _masks(load, [part for part in load.shape.adapted(adapter) if part.name in names])


def _masks(load: Workload, parts: Sequence[Linear]) -> int:
    mask = 1 if load.settings.device == "cuda" else load.a
    return mask * load.N * sum(part.num_inputs for part in parts)


def head_adapter(load: Workload) -> tuple[int, int]:
    """Numbers of an adapter's A and B on the language model's head; 0 without."""
    adapter = load.settings.adapter
    if adapter is None or "lm_head" not in adapter.target_modules:
        return 0, 0
    return adapter.r * load.shape.width, adapter.r * load.shape.vocab_size


@once
def adapter_traffic(load: Workload, num_forward: float) -> float:
    """Bytes that the adapters of one layer read and write, in so many forward passes and a backward one.

    Forward x is read for x @ A, and the frozen output is read and written for the sum; where layers are
    PEFT's and not compiled the product is written, scaled (read and written) and read for the sum besides.
    Backward the output's gradient is read twice, x once, and x's gradient is read and written; where its two
    parts are tensors, one of them is written and read for the sum besides.
    """
    adapter = load.settings.adapter
    if adapter is None:
        return 0.0
    parts = load.shape.adapted(adapter)
    inputs, outputs = sum(part.num_inputs for part in parts), sum(part.num_outputs for part in parts)
    of_sum = 2 if adds_in_one_kernel(load) or load.settings.compiled else 6
    of_inputs = 3 if sums_in_place(load) else 5
    return load.a * load.N * (num_forward * (inputs + of_sum * outputs) + 2 * outputs + of_inputs * inputs)


@once
def rounded_adapters(load: Workload) -> int:
    """Bytes of the layers' adapters in half precision, where they are rounded together and kept from pass to
    pass.

    Beside packed weights each map rounds its own: who packs them is short of memory. So in layers that are
    streamed or compiled (trainers/model/offload/activations.py).
    """
    settings, adapter = load.settings, load.settings.adapter
    is_passed = settings.slice_tokens or settings.weights_offload or settings.compiled
    if adapter is None or not adds_in_one_kernel(load) or is_passed or settings.quantize != "none":
        return 0
    beside = load.shape.num_stack_adapter(adapter) + load.shape.num_outer_adapter(adapter)
    return load.a * (load.shape.num_adapter(adapter) - beside)


@once
def adds_in_one_kernel(load: Workload) -> bool:
    """Whether products of adapters are added to those of their maps, packed or not, as they are made; else
    PEFT's own layers scale them and add them (trainers/model/loading/lora_layers.py)."""
    adapter = load.settings.adapter
    if adapter is None or not load.is_half or not is_plain(adapter):
        return False
    # Other tools' adapters are PEFT's.
    return load.batch.foreign is None and not shards_weights(load.settings)


@once
def sums_in_place(load: Workload) -> bool:
    """Whether the two parts of an input's gradient, of map and adapter, are summed as they are made
    (trainers/model/loading/lora_product.py): of plain maps, whose calls nothing else sees."""
    settings = load.settings
    is_seen = settings.compiled or settings.weights_offload or settings.slice_tokens
    return adds_in_one_kernel(load) and settings.quantize == "none" and not is_seen


@once
def without_adapters(load: Workload) -> Workload:
    """The load of a pass with the adapters off: weights stay packed, and nothing is trained in whole."""
    adapter = load.settings.adapter
    if adapter is None:
        return load
    none: dict[str, object] = {"target_modules": (), "target_parameters": ()}
    bare = load.settings.model_copy(update={"adapter": adapter.model_copy(update=none)})
    return replace(load, settings=bare)


@once
def adapts(load: Workload, *names: str) -> bool:
    """Whether any of the maps is adapted; any map at all where a family's names are its own."""
    adapter, is_counted = load.settings.adapter, load.shape.counts is not None
    return adapter is not None and any(is_counted or p.name in names for p in load.shape.adapted(adapter))


def is_plain(adapter: Adapter) -> bool:
    """Whether an adapter's product may be added to its map's output in one kernel (`adds_in_one_kernel`)."""
    scale = adapter.alpha / (math.sqrt(adapter.r) if adapter.rslora else adapter.r)
    return adapter.kind != "dora" and not adapter.dropout and math.frexp(scale)[0] == 0.5
