"""The backward pass of norms on queries, which are the wider where heads are wide.

Source and letters: as in activations.py; seen in traces of Qwen3 shapes.
"""

from __future__ import annotations

from memtrain.memory.estimate.workload import Workload


def query_norm_backward(load: Workload, first_norm: int) -> int:
    """Bytes of a layer at its norm on queries in half precision, without kernels of its own; 0 where there is
    none: the float32 copy that was kept and five more, when the gradients of keys and values are through.

    `first_norm`: kept by the norm before the attention. Beside both its output, the layer's input, and the
    gradient of the residual stream.
    """
    if load.shape.family.qk_norm == "none" or not load.is_half or load.is_fused or load.settings.liger:
        return 0
    return first_norm + load.N * (24 * load.shape.query_width + 3 * load.a * load.shape.width)
