"""Memory of adapters beside their weights: what a layer keeps for them."""

from __future__ import annotations

from memtrain.memory.estimate.workload import Workload


def adapter_kept(load: Workload) -> int:
    """Kept by the adapters of one layer: a*N*r each for x @ A, and a copy of x where there is dropout.

    The mask of what was dropped is a byte a number on CUDA, and a number on a CPU. In half precision also
    the float32 adapter weights as they are multiplied: rounded.
    """
    adapter = load.settings.adapter
    if adapter is None:
        return 0
    parts = load.shape.adapted(adapter)
    kept = load.a * load.N * adapter.r * len(parts)
    if load.is_half:
        kept += load.a * load.shape.num_adapter_per_layer(adapter)
    if adapter.dropout:
        mask = 1 if load.settings.device == "cuda" else load.a
        kept += (load.a + mask) * load.N * sum(part.num_inputs for part in parts)
    if adapter.kind == "dora":
        # The outputs of the frozen map and of the adapter, for the gradient of the magnitudes.
        outputs = sum(part.num_outputs for part in parts)
        kept += load.a * load.N * max(0, 2 * outputs - load.shape.mlp_width)
    return kept
