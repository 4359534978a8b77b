"""The process that traces: a TraceJob as JSON on standard input, a Traced on the last line of output."""

from __future__ import annotations

import sys
import time

from memtrain.memory.plan.plan import Prediction
from memtrain.trainers.runtime.signals import end_with_parent
from memtrain.trainers.tools.trace.client import Traced, TraceJob
from memtrain.trainers.tools.trace.cuda_allocator import replay, smallest_capacity
from memtrain.trainers.tools.trace.extrapolate import predict_by_trace
from memtrain.trainers.tools.trace.other_kernels import hide_other_kernels
from memtrain.trainers.tools.trace.trace import Job


def answer(asked: TraceJob) -> Traced:
    """Trace `asked` in this process."""
    started = time.perf_counter()
    job = Job(
        recipe=asked.recipe,
        settings=asked.settings,
        config=asked.config,
        batch=asked.batch,
        num_micro_batches=2 if asked.accumulates else 1,
        want_stats=True,
        passes=asked.passes,
        judges=asked.judges,
        teacher=asked.teacher,
    )
    found = predict_by_trace(job, is_whole=asked.is_whole)
    reserved = least = None
    if found.recorder is not None and asked.settings.device == "cuda":
        events, expandable = found.recorder.events, asked.settings.expandable_segments
        reserved = replay(events, expandable=expandable).peak_reserved
        least = smallest_capacity(events, expandable=expandable)
    return Traced(
        prediction=Prediction(phases=found.phases, method="trace", budget_bytes=None),
        reserved_bytes=reserved,
        least_bytes=least,
        host_bytes=dict(found.host),
        seconds=time.perf_counter() - started,
    )


def main() -> None:
    """Read, trace, write; end with the process that asks, however that ends."""
    end_with_parent()
    hide_other_kernels()
    asked = TraceJob.model_validate_json(sys.stdin.read())
    print(answer(asked).model_dump_json())


if __name__ == "__main__":
    main()
