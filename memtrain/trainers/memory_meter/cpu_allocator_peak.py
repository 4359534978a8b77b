"""The truth on a CPU: peak of torch's own CPU allocator around a real step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def allocator_peak(models: Sequence[nn.Module], work: Callable[[], Any]) -> int:
    """Highest bytes of the c10 CPU allocator during `work()`, with the tensors of `models` that exist before.

    Every allocation is seen, those inside kernels too. What `work` returns is kept until the end.
    """
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for model in models
        for t in (*model.parameters(), *model.buffers())
    }
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        kept = work()
    del kept
    results: Any = profiled.profiler
    pending = list(results.kineto_results.experimental_event_tree())
    changes: list[tuple[int, int]] = []
    while pending:
        event = pending.pop()
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
        pending.extend(event.children)
    live = peak = sum(storages.values())
    for _, size in sorted(changes, key=lambda change: change[0]):
        live += size
        peak = max(peak, live)
    return peak
