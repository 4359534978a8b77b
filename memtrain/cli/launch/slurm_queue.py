"""Talking to SLURM: submitting a script, and how a job stands."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from memtrain.errors import LaunchError
from memtrain.trainers.runtime.atomic_files import write_whole

JOB_FILE = "slurm/job"
"""In a run folder: the job that runs it, and the job's log, a line each."""

LIVING = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "STOPPED",
)
"""States of a job that may still write."""

TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The job that was last submitted for a run."""

    job: str
    """Number; of an array `number_task`."""
    log: Path

    def write(self, run: Path) -> None:
        """Leave it in the run folder."""
        (run / JOB_FILE).parent.mkdir(parents=True, exist_ok=True)
        write_whole(run / JOB_FILE, f"{self.job}\n{self.log}\n")


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job, as SLURM describes it."""

    state: str
    """RUNNING, PENDING, COMPLETED, CANCELLED, TIMEOUT, ..."""
    reason: str
    """Reason of waiting or of ending; empty where SLURM says None."""
    nodes: str
    restarts: int
    run_time: str
    time_limit: str
    exit_code: str

    @property
    def is_living(self) -> bool:
        """Whether it may still write into its run folder."""
        return self.state in LIVING

    def words(self) -> str:
        """The state in a line for people."""
        parts = [self.state + (f" ({self.reason})" if self.reason else "")]
        if self.nodes:
            parts.append(f"on {self.nodes}")
        parts.append(f"{self.run_time} of {self.time_limit}")
        parts.append(f"restart {self.restarts}" if self.restarts else "first start")
        if not self.is_living:
            parts.append(f"exit code {self.exit_code}")
        return ", ".join(parts)


def read_record(run: Path) -> JobRecord | None:
    """The job of a run folder; None where it was not submitted to SLURM."""
    try:
        job, log, *_ = (run / JOB_FILE).read_text().splitlines()
    except (FileNotFoundError, ValueError):
        return None
    return JobRecord(job, Path(log))


def has_slurm() -> bool:
    """Whether SLURM's commands are on this machine."""
    return shutil.which("sbatch") is not None


def submit_script(script: Path) -> str:
    """Submit a script; the number of its job.

    Raises: LaunchError with SLURM's own words when it refuses.
    """
    return _sbatch("--parsable", str(script)).stdout.strip().partition(";")[0]


def try_submission(script: Path) -> str:
    """SLURM's answer to a submission of the script now, in its own words.

    Raises: LaunchError with SLURM's own words when it would refuse.
    """
    return _sbatch("--test-only", str(script)).stderr.strip().removeprefix("sbatch: ")


def _sbatch(*words: str) -> subprocess.CompletedProcess[str]:
    if not has_slurm():
        raise LaunchError(
            "sbatch is not on this machine",
            where="PATH of this machine",
            fix="run this on a login node, or copy the script to one",
        )
    done = ask("sbatch", *words)
    if done.returncode:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines()]
        raise LaunchError(
            f"SLURM refuses the job: {' '.join(line for line in lines if line)}",
            where=words[-1],
            fix="correct cluster.slurm, or the options of this command (`sinfo` shows the partitions)",
        )
    return done


def job_state(job: str) -> JobState | None:
    """State of a job; None when SLURM does not know it any more (some minutes after its end).

    Raises: LaunchError when SLURM does not answer.
    """
    done = ask("scontrol", "show", "job", job, "--oneliner")
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise LaunchError(
            f"SLURM does not answer: {done.stderr.strip()}",
            f"scontrol show job {job}",
            "check with `sinfo` that the controller runs, then repeat the command",
        )
    return parse_job(done.stdout)


def parse_job(line: str) -> JobState:
    """The state in a line of `scontrol show job --oneliner`."""
    words = dict(re.findall(r"(\w+)=(\S*)", line))
    return JobState(
        state=words["JobState"],
        reason="" if words["Reason"] == "None" else words["Reason"],
        nodes="" if words.get("NodeList", "(null)") == "(null)" else words["NodeList"],
        restarts=int(words["Restarts"]),
        run_time=words["RunTime"],
        time_limit=words["TimeLimit"],
        exit_code=words["ExitCode"].partition(":")[0],
    )


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands."""
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
