"""State of a run, from its folder and from SLURM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memtrain.cli.launch.slurm_queue import has_slurm, job_state, read_record
from memtrain.memory.plan.plan import PLAN_FILE, read_plan
from memtrain.trainers.protocols.events import REWARD, EvalEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.lock import LEASE_S, read_owner, silent_s
from memtrain.trainers.run_folder.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of a run, in words."""

    folder: Path
    state: str
    steps: str
    loss: str
    held_out: str
    checkpoint: str
    job: str
    log: str

    def lines(self) -> list[tuple[str, str]]:
        """Labels and values to show, one pair a line."""
        named = {
            "state": self.state,
            "step": self.steps,
            "loss": self.loss,
            "held-out": self.held_out,
            "saved": self.checkpoint,
            "job": self.job,
            "log": self.log,
        }
        return [(name, text) for name, text in named.items() if text]


def run_status(path: Path) -> RunStatus:
    """State of the run of a folder now.

    Raises: LaunchError when SLURM does not answer, or the plan is of another version.
    """
    from memtrain.trainers.checkpoints.checkpoint import complete_steps

    folder = RunFolder(path)
    plan = read_plan(path / PLAN_FILE, reveals=False)
    events = read_metrics(folder.metrics)
    steps = [event for event in events if isinstance(event, StepEvent)]
    evals = [event for event in events if isinstance(event, EvalEvent)]
    saved = list(complete_steps(folder.checkpoints).values())
    return RunStatus(
        folder=path,
        state=_state(folder),
        steps=f"{steps[-1].step if steps else 0} of {plan.settings.max_steps}",
        loss=f"{steps[-1].loss:.4f}" if steps else "",
        held_out=held_out_words(evals[-1]) if evals else "",
        checkpoint=saved[-1].name if saved else "",
        job=_job(path),
        log=str(log_of(path)) if log_of(path).is_file() else "",
    )


def held_out_words(event: EvalEvent) -> str:
    """The held-out loss, or the reward where completions were written and judged: its loss is minus that."""
    is_reward = REWARD in event.extra
    number = f"reward {event.extra[REWARD]:.4f}" if is_reward else f"{event.loss:.4f}"
    return f"{number} after step {event.step}"


def log_of(path: Path) -> Path:
    """The log of the run's job, or the run's own output without a job."""
    record = read_record(path)
    return RunFolder(path).log if record is None else record.log


def may_write(path: Path) -> bool:
    """Whether a process, or a job that waits or runs, may still write into the run folder."""
    record = read_record(path)
    if record is not None and has_slurm():
        state = job_state(record.job)
        return state is not None and state.is_living
    owner = read_owner(RunFolder(path).lock)
    if owner is None or not owner.is_alive():
        return False
    return owner.is_seen() or not owner.space or silent_s(RunFolder(path).lock) < LEASE_S


def _state(folder: RunFolder) -> str:
    status = folder.read_status()
    if status is None:
        return "not started"
    if status.state is RunState.RUNNING and not may_write(folder.path):
        return "killed: its process is gone; run it again to resume from the last checkpoint"
    return str(status.state) + (f": {status.message}" if status.message else "")


def _job(path: Path) -> str:
    record = read_record(path)
    if record is None:
        return ""
    if not has_slurm():
        return f"{record.job} (SLURM is not on this machine)"
    state = job_state(record.job)
    return (
        f"{record.job} (SLURM does not know it any more)"
        if state is None
        else f"{record.job} {state.words()}"
    )
