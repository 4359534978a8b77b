"""`metrics.jsonl`: written line by line, cut on resume to hold every step once, read back; no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from memtrain.errors import DataError
from memtrain.trainers.protocols.events import Event, FinalEvent, from_line, from_values, to_line
from memtrain.trainers.run_folder.lock import clock_s, lock_of
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole


class MetricsWriter:
    """Appends events; each is with the operating system when `write` returns, so that a kill loses none."""

    def __init__(self, path: Path, resumed_at: int | None = None) -> None:
        """Begin the file anew, or with `resumed_at` go on behind the last line of that step.

        Raises: LaunchError when the disk refuses; DataError as `read_metrics`.
        """
        self.path = path
        self._lock = lock_of(path.parent)
        self.step = resumed_at or 0
        """Step of the last event."""
        try:
            write_whole(path, "".join(_lines_up_to(path, resumed_at)))
            self._file = open(path, "a")  # noqa: SIM115 (stays open until `close`)
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", path) from None

    def write(self, event: Event | Mapping[str, Any]) -> None:
        """Append an event, or its fields; a missing step is the last written.

        Raises: LaunchError when the disk refuses, or another process has taken the folder over.
        """
        if self._lock is not None and clock_s() > self._lock.sure_until_s:
            self._lock.check()
        if isinstance(event, Mapping):
            event = from_values({"step": self.step} | dict(event))
        # A save that was written beside the steps is reported after them.
        self.step = max(self.step, event.step)
        try:
            self._file.write(to_line(event, time.time()) + "\n")
            self._file.flush()
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", self.path) from None

    def sync(self) -> None:
        """Hold until every line is on the disk: before a checkpoint, which must not outlive its metrics.

        Raises: LaunchError when the disk refuses.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", self.path) from None

    def close(self) -> None:
        """Write nothing more. Raises: LaunchError when the disk refuses what is left."""
        try:
            self._file.close()
        except OSError as error:
            raise disk_fault(error, "the metrics cannot be written", self.path) from None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Event]:
    """The events of a file, in order; none where there is no file. A last line without an end is left out.

    Raises: DataError naming the line that is no event.
    """
    return [event for _, event in _read(path)]


def _lines_up_to(path: Path, step: int | None) -> list[str]:
    """Lines that a run which goes on after `step` keeps: without the end of a run that was cut off."""
    if step is None:
        return []
    return [line for line, event in _read(path) if event.step <= step and not isinstance(event, FinalEvent)]


def _read(path: Path) -> Iterator[tuple[str, Event]]:
    """Each whole line, with its end, and its event."""
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            return
        try:
            yield line, from_line(line)
        except ValueError as error:
            what = f"this line of the metrics is not an event: {error}"
            raise DataError(what, where=f"{path}:{number}", fix="remove the line") from None
