"""Traces of the plans that were measured, made beside the ladder by processes that see no GPU."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError, wait
from pathlib import Path
from threading import Lock

from first_light import results

LIMIT_S = 240.0
CORES_A_TRACE = 4


class Tracers:
    """A few traces at a time; each adds its line to the results when it is there."""

    def __init__(self, out: Path, work: Path) -> None:
        self.out, self.cache = out, work / "traces"
        self.pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_A_TRACE))
        self.under_way: list[Future[None]] = []
        self.lock = Lock()

    def begin(self, stage: str, job: str) -> None:
        """Trace a job; its prediction is written under the name of its stage."""
        self.under_way.append(self.pool.submit(self._trace, stage, Path(job)))

    def finish(self, limit_s: float) -> int:
        """Wait so long; the number of traces that are then not done, and are given up."""
        for one in self.under_way:
            if limit_s <= 0:
                one.cancel()
        try:
            left = wait(self.under_way, timeout=max(0.0, limit_s)).not_done
        except TimeoutError:
            left = set(self.under_way)
        self.pool.shutdown(wait=False, cancel_futures=True)
        return len(left)

    def _trace(self, stage: str, path: Path) -> None:
        from memtrain.cli.measure.variants import peak_of_steps
        from memtrain.errors import LaunchError
        from memtrain.trainers.tools.trace.client import TraceJob, traced

        try:
            made = traced(TraceJob.model_validate_json(path.read_text()), timeout_s=LIMIT_S, cache=self.cache)
            reported = {"traced_bytes": peak_of_steps(made.prediction), "seconds": made.seconds}
        except LaunchError as error:
            reported = {"fault": error.faults[0].what}
        except Exception as error:  # A trace that hangs is given up; the ladder goes on.
            reported = {"fault": f"{type(error).__name__}: {error}"}
        with self.lock:
            results.append(self.out, {"trace_of": stage, **reported})
