"""Results of kernels that take segments of one length: each call's, beside the rows that they are laid in.

Source: trainers/model/attention/segment_loop.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.workload import Workload, once


@once
def call_results(load: Workload) -> tuple[int, int]:
    """Bytes of the largest call's results in a forward and in a backward pass.

    The output; the gradients of queries, and of keys and values for every head of queries where these share
    them in half precision. 0 where one call gives all rows: they are as long, and no keys are shared so.
    """
    shape, batch = load.shape, load.batch
    if load.settings.attention not in ("torch_cpu", "torch_efficient") or load.settings.context_parallel > 1:
        return 0, 0
    is_folded = shape.kv_width < shape.query_width and (
        load.is_half or load.settings.attention == "torch_efficient"
    )
    is_one = batch.num_segments * batch.longest <= batch.tokens and not is_folded
    if is_one:
        return 0, 0
    keys = shape.query_width if is_folded else shape.kv_width
    longest = load.a * min(batch.longest, load.N)
    return longest * shape.query_width, longest * (shape.query_width + 2 * keys)
