"""A SLURM job as text: the batch script that starts the ranks and, when they had to stop, queues again."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memtrain.cli.launch.topology import Topology, started_environment
from memtrain.errors import LaunchError
from memtrain.memory.plan.units import MIB
from memtrain.recipes.sections.slurm import Slurm, seconds_of
from memtrain.trainers.run_folder.pulse import WATCHED
from memtrain.trainers.run_folder.rank_failures import LAUNCHED

TEMPLATE = "job.sbatch.j2"
SCRIPT_FILE = "job.sbatch"
LOGS_FOLDER = "slurm"
"""In the run folder, or in the folder above the runs of an array."""

SHORTEST_LEAD_S = 120
"""SLURM may signal up to 60 s early and looks at limits every 30 to 60 s: taste, twice that."""

SAVES, STEPS = 3, 2
"""Time that the lead must leave: a save three times as slow as the slowest so far, and the step before."""

BYTES_PER_S = 200e6
"""Speed of a shared file system, where no save was measured yet. Taste: a slow one."""


@dataclass(frozen=True, slots=True)
class Job:
    """All that a batch script says."""

    summary: str
    """Summary of the training, in one line."""
    name: str
    asked: Slurm
    topology: Topology
    folder: Path
    """Folder of the script and the logs; absolute."""
    runs: tuple[Path, ...]
    """Run folder of each job of an array, or of the only one; absolute."""
    digests: tuple[str, ...]
    """Digest of each run's plan: a waiting job must not train a plan that replaced its own."""
    here: Path
    """Working folder: paths in a plan may be relative to it."""
    python: str
    lead_s: int
    grace_s: int
    """Silence of all ranks after which they are ended, once they were asked to stop."""

    @property
    def is_array(self) -> bool:
        """Whether it is an array of several jobs, or an array of one."""
        return bool(self.asked.array)

    @property
    def script(self) -> Path:
        """Path of the script."""
        return self.folder / SCRIPT_FILE

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.folder / LOGS_FOLDER


def sbatch_text(job: Job) -> str:
    """The batch script.

    Source: rules of saving and queueing again measured against SLURM 22.05 on four virtual nodes
    (`make test-slurm`): what SLURM sends to whom at a time limit, a cancellation, a preemption and a failure.

    Raises: LaunchError for names that would be lines of their own.
    """
    _check_names(job)
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    topology = job.topology
    given = started_environment(topology) | {LAUNCHED: "1", WATCHED: "1"}
    return templates.get_template(TEMPLATE).render(
        summary=" ".join(job.summary.split()),
        script=shlex.quote(str(job.script)),
        options=_options(job),
        runs=[shlex.quote(str(run)) for run in job.runs],
        digests=job.digests,
        python=shlex.quote(job.python),
        max_restarts=job.asked.max_restarts,
        setup=job.asked.setup,
        environment=[(name, shlex.quote(value)) for name, value in given.items()],
        logs=shlex.quote(str(job.logs)),
        nodes=topology.num_nodes,
        tasks=topology.num_processes,
        tasks_per_node=topology.processes_per_node,
        cpus=_cpus(job),
        grace_s=job.grace_s,
    )


def _cpus(job: Job) -> int:
    return job.topology.threads if job.asked.cpus_per_task == "auto" else job.asked.cpus_per_task


def _options(job: Job) -> list[str]:
    """The options of sbatch, without the recipe's open choices."""
    asked, topology = job.asked, job.topology
    log = str(job.logs).replace("%", "%%") + ("/%A_%a.log" if job.is_array else "/%j.log")
    limit = f"%{asked.array_limit}" if asked.array_limit else ""
    wanted = {
        "job-name": job.name,
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time": asked.time,
        "constraint": asked.constraint,
        "nodes": topology.num_nodes,
        "ntasks": topology.num_processes,
        "ntasks-per-node": topology.processes_per_node,
        "cpus-per-task": _cpus(job),
        "gpus-per-node": topology.processes_per_node if topology.device == "cuda" else None,
        "mem": None if asked.mem is None else f"{math.ceil(asked.mem / MIB)}M",
        "array": f"0-{len(job.runs) - 1}{limit}" if job.is_array else None,
        "chdir": job.here,
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{job.lead_s}",
    }
    options = [f"--{name}={_quoted(str(value))}" for name, value in wanted.items() if value is not None]
    return [*options, "--requeue", *asked.lines]


def _quoted(value: str) -> str:
    # sbatch splits its lines at blanks and ends them at #; it knows quotes, and the backslash inside of them.
    if not re.search(r"""[\s"'\\#]""", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _check_names(job: Job) -> None:
    """Refuse names that would be lines of their own in a script.

    Raises: LaunchError.
    """
    for name in (job.name, job.folder, *job.runs, job.here, job.python):
        if any(not letter.isprintable() for letter in str(name)):
            raise LaunchError(
                f"{json.dumps(str(name))} contains a line break or another control character, which a "
                "batch script cannot hold",
                "run_dir",
                "choose a folder whose path has none",
            )


def lead_s(
    asked: Slurm,
    *,
    save_s: float | None,
    step_s: float,
    checkpoint_bytes: int,
    is_background: bool = False,
) -> tuple[int, str]:
    """Seconds before the time limit at which the run is asked to save, and why.

    `save_s`: the longest save so far, or None; `step_s`: the longest step so far, or 0. Never more than half
    of the time limit. `is_background`: one more save may be under way, and is waited for first.
    """
    if asked.signal_lead_s != "auto":
        return asked.signal_lead_s, "asked for"
    taken_s = checkpoint_bytes / BYTES_PER_S if save_s is None else save_s
    source = f"{taken_s:.0f} s, expected" if save_s is None else f"{taken_s:.1f} s, measured"
    saves, words = (2 * SAVES, "time for six saves") if is_background else (SAVES, "time for three saves")
    needed_s = math.ceil(saves * taken_s + STEPS * step_s)
    lead, reason = max(SHORTEST_LEAD_S, needed_s), f"{words} ({source}) and two steps"
    if lead == SHORTEST_LEAD_S:
        reason = f"the shortest that SLURM keeps; {reason}, {needed_s} s"
    limit_s = None if asked.time is None else seconds_of(asked.time)
    if limit_s is not None and lead > limit_s // 2:
        return max(1, limit_s // 2), f"half of the time limit; {reason}"
    return lead, reason
