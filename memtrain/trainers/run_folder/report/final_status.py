"""The last word of a run: `status.json` and the report, which say the same; no torch."""

from __future__ import annotations

import time
from contextlib import suppress

from memtrain.errors import MemtrainError, sayable
from memtrain.trainers.run_folder.folder import RunFolder, RunState, Status
from memtrain.trainers.run_folder.report.report_html import write_report


def tell_end(folder: RunFolder, state: RunState, step: int, message: str = "") -> None:
    """Write the status of a run that has ended, and its report.

    Raises: LaunchError when the disk refuses.
    """
    ended = Status(state=state, step=step, time=time.time(), message=sayable(message))
    if state is RunState.DONE:
        # The report first: a run that is killed here is not over yet, and writes both when it goes on.
        write_report(folder, ended)
        folder.write_status(state, step, message)
        return
    folder.write_status(state, step, message)
    # What ended the run is about to be told: a report that cannot be written must not stand in its place.
    with suppress(MemtrainError):
        write_report(folder, ended)
