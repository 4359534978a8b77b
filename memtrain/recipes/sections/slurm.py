"""The `cluster.slurm:` section: what `memtrain slurm` asks SLURM for, and how the run outlives its limits."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Bytes, PositiveInt, Section, one_or_many

_TIME = re.compile(r"(?:(?P<days>[0-9]+)-)?(?P<clock>[0-9]+(?::[0-9]+){0,2})")

Words = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


class Slurm(Section):
    """Request for nodes by `memtrain slurm`. The other commands do not read it: they run where they are
    called."""

    partition: str | None = None
    """Partition (queue). If not set: the cluster's default."""

    account: str | None = None
    """Account that is charged."""

    qos: str | None = None
    """Quality of service."""

    time: str | None = None
    """Time limit, as SLURM writes it: `2:00:00`, `1-12:00:00`. The run saves before it and queues again,
    so a short limit that starts sooner costs little. If not set: the partition's."""

    nodes: PositiveInt = 1
    """Nodes of the job."""

    gpus_per_node: PositiveInt | None = None
    """GPUs, and processes, of each node. If not set: 1, or none with `cluster.device: cpu`."""

    gpu: str | None = None
    """Kind of GPU that the plan is held against (`h100`, `a100-40`, `4090`, ...). If not set: what the
    partition's nodes say they have. It requests nothing: `constraint` or `lines` do."""

    cpus_per_task: PositiveInt | Literal["auto"] = "auto"
    """Cores of one process. `auto`: as many as it has threads."""

    mem: Bytes | None = None
    """Host memory of one node. If not set: the partition's default."""

    constraint: str | None = None
    """Features that the nodes must have."""

    lines: Words = ()
    """More options for the script, a `#SBATCH` line each: `--exclusive`, `--mail-type=END`."""

    setup: Words = ()
    """Commands that run first on every start of the job: `module load cuda`, `source env/bin/activate`,
    `export NCCL_SOCKET_IFNAME=ib0`."""

    python: str | None = None
    """Python of the job, as seen from the nodes. If not set: the one that runs `memtrain slurm`."""

    signal_lead_s: PositiveInt | Literal["auto"] = "auto"
    """Seconds before the time limit at which the run is asked to save. `auto`: 120, or three saves and two
    steps where the run folder, or the plan, says that this is more."""

    max_restarts: Annotated[int, Field(ge=0)] = 20
    """Number of times that a run may put itself back into the queue after a save. 0: never."""

    array: Words = ()
    """Values to try, one job each: `train.seed=0,1,2`. Several keys: one job for each combination."""

    array_limit: PositiveInt | None = None
    """Jobs of an array that run at the same time."""

    @model_validator(mode="after")
    def _can_be_written(self) -> Slurm:
        for name in ("partition", "account", "qos", "gpu", "constraint"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"\S+", value):
                raise ValueError(
                    f"cluster.slurm.{name} '{value}' is not one word; write it as SLURM shows it"
                )
        for name in ("lines", "setup"):
            for line in getattr(self, name):
                if "\n" in line:
                    raise ValueError(
                        f"cluster.slurm.{name}: {line!r} is several lines; write each as an item"
                    )
        for line in self.lines:
            if not line.startswith("-"):
                raise ValueError(
                    f"cluster.slurm.lines: '{line}' is not an option of sbatch; write it with its dashes"
                )
        self._check_time()
        return self

    def _check_time(self) -> None:
        if self.time is None:
            return
        limit_s = seconds_of(self.time)
        if self.signal_lead_s != "auto" and limit_s is not None and self.signal_lead_s >= limit_s:
            raise ValueError(
                f"cluster.slurm.signal_lead_s {self.signal_lead_s} leaves nothing of the time limit "
                f"{self.time}; raise time, or lower signal_lead_s"
            )


def seconds_of(time: str) -> int | None:
    """Seconds of a time limit in SLURM's forms: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; None for one
    without an end (`UNLIMITED`).

    Raises: ValueError for anything else.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError(
            f"'{time}' is not a time limit; write H:M:S or D-H:M:S, such as 2:00:00 or 1-12:00:00"
        )
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:
        units = (3600, 60, 1)
        return int(match["days"]) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
    return sum(part * unit for part, unit in zip(parts, units, strict=True))
