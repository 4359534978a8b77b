"""The end of a job's tasks, in words and as an exit code: the last line of a batch script."""

from __future__ import annotations

import sys
from pathlib import Path

from memtrain.errors import EXIT_OUR_FAULT, LaunchError, MemtrainError, printable
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.rank_failures import correct_status, root_fault

KILLED = 128
"""Above this an exit code is that of a process that a signal ended."""


def verdict(folder: RunFolder, num_ranks: int, code: int) -> tuple[str, int]:
    """The message for a job whose srun ended with `code`, and the exit code to pass on.

    That of the rank that failed first; the code as it is where no rank left word.
    """
    error = root_fault(folder, num_ranks)
    if error is None:
        error = LaunchError(_no_word(code), str(folder.path), "look for the cause above, then submit again")
        correct_status(folder, error)
        return error.text(), code
    correct_status(folder, error)
    if isinstance(error, MemtrainError):
        return error.text(), error.exit_code
    return printable(str(error)), EXIT_OUR_FAULT


def _no_word(code: int) -> str:
    if code > KILLED:
        return (
            f"a rank was killed by signal {code - KILLED} without an error message (9: often too little "
            "host memory)"
        )
    return f"the ranks ended with exit code {code} and no error message"


def main() -> int:
    """Entry point: the run folder, the number of ranks, srun's exit code. The exit code to end with."""
    text, code = verdict(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
    print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
