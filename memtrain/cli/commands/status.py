"""`memtrain status` and `memtrain logs`: state and output of a run, here or as a SLURM job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table
from memtrain.errors import LaunchError, printable

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run, or of the runs of an array.")
]
POLL_S = 2.0
"""Between two looks at a log, and two questions to SLURM, whose controller serves a whole cluster."""
LINES = 40


def status(run: RunArgument) -> None:
    """State of a run: its step, its loss, its job. Of an array, a line for each run."""
    from memtrain.cli.launch.status import run_status

    folders = runs_below(run)
    if len(folders) > 1:
        stands = [run_status(folder) for folder in folders]
        print_table(
            ("run", "state", "step", "loss", "job"),
            [(one.folder.name, one.state, one.steps, one.loss, one.job) for one in stands],
        )
        return
    one = run_status(folders[0])
    print_table(("run", str(one.folder)), one.lines())


def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of last lines to show first.")] = LINES,
) -> None:
    """The end of a run's log: the job's, or the run's own output."""
    from memtrain.cli.launch.status import log_of, may_write

    folders = runs_below(run)
    if len(folders) > 1:
        what = f"{run} holds {len(folders)} runs"
        raise LaunchError(what, str(run), f"give one of them, such as {folders[0]}")
    folder = folders[0]
    path = log_of(folder)
    if not follow and not path.is_file():
        raise LaunchError(
            "the run has written no log yet", str(path), f"`memtrain status {run}` shows the state of the run"
        )
    for text in grown(path, lines, lambda: follow and may_write(folder)):
        typer.echo(printable(text), nl=False)


def grown(path: Path, lines: int, goes_on: Callable[[], bool], poll_s: float = POLL_S) -> Iterator[str]:
    """The last lines of a file, then each added line while `goes_on()` holds; the file need not exist yet."""
    at = 0
    while True:
        is_last = not goes_on()
        if path.is_file():
            with path.open(errors="replace") as file:
                if at == 0:
                    text = "".join(file.readlines()[-lines:])
                else:
                    file.seek(at)
                    text = file.read()
                at = file.tell()
            if text:
                yield text
        if is_last:
            return
        time.sleep(poll_s)


def runs_below(run: str) -> list[Path]:
    """The run folder itself, or the run folders inside it.

    Raises: LaunchError when there is none.
    """
    from memtrain.memory.plan.plan import PLAN_FILE

    above = Path(run)
    if (above / PLAN_FILE).is_file():
        return [above]
    found = sorted(plan.parent for plan in above.glob(f"*/{PLAN_FILE}"))
    if not found:
        raise LaunchError(
            f"there is no run in {above}",
            str(above),
            f"give a run folder, which holds {PLAN_FILE} (`ls runs`)",
        )
    return found
