"""The last word of a run: `status.json` and the report, which say the same; no torch."""

from __future__ import annotations

import sys
import time

from memtrain.errors import sayable, words_of
from memtrain.trainers.run_folder.folder import RunFolder, RunState, Status
from memtrain.trainers.run_folder.lock import is_lost
from memtrain.trainers.run_folder.report.report_html import write_report


def record_end(folder: RunFolder, state: RunState, step: int, message: str = "") -> None:
    """Write the status of a run that has ended, and its report.

    Raises: LaunchError when the disk refuses those of a run that is done. What ended any other run is about
    to be reported: a disk or a page that refuses must not stand in its place, and is reported beside it.
    """
    if is_lost(folder.path):
        # Another process writes its own.
        return
    ended = Status(state=state, step=step, time=time.time(), message=sayable(message))
    if state is RunState.DONE:
        # The report first: a run that is killed here is not over yet, and writes both when it goes on.
        write_report(folder, ended)
        folder.write_status(state, step, message)
        return
    for write in (lambda: folder.write_status(state, step, message), lambda: write_report(folder, ended)):
        try:
            write()
        except Exception as error:
            print(f"note: the end of the run could not be recorded: {words_of(error)}", file=sys.stderr)
