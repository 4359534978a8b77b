"""Record of a run's end: status and report, and out of memory in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memtrain.errors import Interrupted, LaunchError, MemtrainError, OutOfMemory
from memtrain.memory.plan.units import gib
from memtrain.trainers.online.rewards.calls import line_of
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.report.final_status import record_end
from memtrain.trainers.runtime.atomic_files import disk_faults
from memtrain.trainers.runtime.exits import words_of_exit
from memtrain.trainers.runtime.one_order import refusal_of, unordered_operator
from memtrain.trainers.runtime.oom_errors import is_out_of_memory
from memtrain.trainers.runtime.ranks import Ranks


@contextmanager
def record_exit(folder: RunFolder, ranks: Ranks, position: TrainState) -> Iterator[None]:
    """Keep the run's status, and write its report at the end; torch's own errors of memory, and of sums
    without an order, become ours.

    Raises: whatever is raised inside.
    """

    def end(state: RunState, message: str) -> None:
        if ranks.is_main:
            record_end(folder, state, position.step, message)

    if ranks.is_main:
        folder.write_status(RunState.RUNNING, position.step)
    try:
        doing = f"the run stopped after step {position.step}: its folder cannot be used"
        with _in_words(folder, position), disk_faults(doing, folder.path):
            yield
    except SystemExit as leaving:
        error = LaunchError(
            f"the run was ended after step {position.step} by {words_of_exit(leaving)} in code that it calls",
            line_of(leaving) or str(folder.path),
            "raise an error there instead; the same command resumes from the last checkpoint",
        )
        end(*_state_of(error))
        raise error from leaving
    except Exception as error:
        end(*_state_of(error))
        raise
    end(RunState.DONE, recovered_words(position))


def recovered_words(position: TrainState) -> str:
    """Number of times that memory ran out in a run that went on, in words; empty where it never did."""
    count = position.num_recoveries
    return f"ran out of memory {count} time{'s' if count > 1 else ''}, and continued" if count else ""


def _state_of(error: Exception) -> tuple[RunState, str]:
    if not isinstance(error, MemtrainError):
        return RunState.FAILED, f"{type(error).__name__}: {error}"
    states = {Interrupted: RunState.SAVED, OutOfMemory: RunState.OUT_OF_MEMORY}
    return states.get(type(error), RunState.FAILED), error.faults[0].what


@contextmanager
def _in_words(folder: RunFolder, position: TrainState) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if operator := unordered_operator(error):
            raise refusal_of(operator) from error
        if not is_out_of_memory(error):
            raise
        held = f", with {gib(torch.cuda.memory_allocated())} held" if torch.cuda.is_available() else ""
        raise OutOfMemory(
            f"ran out of memory in step {position.step + 1}{held}",
            where=str(folder.path),
            fix="lower memory.budget or train.micro_batch_size, and run the same command again: it "
            "resumes from the last checkpoint",
        ) from error
