"""Traces of the plans that were measured, made beside the ladder by processes that see no GPU."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError, wait
from pathlib import Path
from threading import Lock

from first_light import results

LIMIT_S = 240.0
CORES_A_TRACE = 4


class Tracers:
    """A few traces at a time; each adds its line to the results when it is there.

    `waits`: jobs are only written among the results, for a later call.
    """

    def __init__(self, out: Path, work: Path, *, waits: bool = False) -> None:
        self.out, self.cache, self.waits = out, work / "traces", waits
        self.pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_A_TRACE))
        self.under_way: list[Future[None]] = []
        self.lock = Lock()

    def begin(self, stage: str, job: str) -> None:
        """Trace the job in a file; its prediction is written under the name of its stage.

        The job is among the results first: where it is given up, a later call still knows it.
        """
        text = Path(job).read_text(encoding="utf-8")
        with self.lock:
            results.append(self.out, {"job_of": stage, "job": json.loads(text)})
        self._submit(stage, text)

    def go_on(self, records: list[results.Record]) -> None:
        """Begin what an earlier call gave up, and what had a fault there: a package may have been missing."""
        done = {one["trace_of"] for one in records if "trace_of" in one and "fault" not in one}
        jobs = {one["job_of"]: json.dumps(one["job"]) for one in records if "job_of" in one}
        for stage, text in jobs.items():
            if stage not in done:
                self._submit(stage, text)

    def _submit(self, stage: str, job: str) -> None:
        if self.waits:
            return
        self.under_way.append(self.pool.submit(self._trace, stage, job))

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

    def _trace(self, stage: str, job: str) -> None:
        from memtrain.cli.measure.variants import peak_of_steps
        from memtrain.errors import LaunchError
        from memtrain.trainers.tools.trace.client import TraceJob, traced

        try:
            made = traced(TraceJob.model_validate_json(job), timeout_s=LIMIT_S, cache=self.cache)
            reported = {"traced_bytes": peak_of_steps(made.prediction), "seconds": made.seconds}
        except LaunchError as error:
            reported = {"fault": error.faults[0].what}
        except Exception as error:  # A trace that hangs is given up; the ladder goes on.
            reported = {"fault": f"{type(error).__name__}: {error}"}
        with self.lock:
            results.append(self.out, {"trace_of": stage, **reported})
