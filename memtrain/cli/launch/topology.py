"""Processes and their places, and what follows for accelerate's configuration, the environment and argv."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from memtrain.memory.plan.plan import PLAN_FILE
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.runtime.safe_path import safe_path

ACCELERATE_FILE = "accelerate.yaml"

KEPT_PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that say how many matrix products oneDNN, and torch's own code around it, keep compiled: in half
precision on a CPU one for each size, of 0.9 MiB together, and 1,024 of them. Source: measured, torch 2.13: 80
numbers of rows through four maps grew a process by 861 MiB, with 64 of each by 152, as fast."""

NUM_KEPT = 64
"""Products that stay compiled: more than the forms of one layer and the head, forward and backward. Taste."""


class Engine(StrEnum):
    """Engines that keep the processes of a run together."""

    ALONE = "alone"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


@dataclass(frozen=True, slots=True)
class Topology:
    """The processes of a run."""

    num_nodes: int
    processes_per_node: int
    device: Literal["cpu", "cuda"]
    threads: int
    """CPU threads of one process."""
    expandable_segments: bool = True
    shares: Engine = Engine.DDP
    """The engine of several processes."""
    context_parallel: int = 1
    """Processes that hold each row together."""
    context_by: Literal["all_gather", "ulysses"] = "all_gather"
    """Exchange in attention between processes that hold a row together."""

    @staticmethod
    def of(settings: Settings, num_nodes: int = 1) -> Topology:
        """The topology that a plan's settings describe, on so many nodes."""
        per_node, rest = divmod(settings.num_processes, num_nodes)
        assert rest == 0, f"{settings.num_processes} processes do not fill {num_nodes} nodes evenly."
        return Topology(
            num_nodes,
            per_node,
            settings.device,
            settings.threads,
            settings.expandable_segments,
            Engine(settings.engine),
            settings.context_parallel,
            settings.context_by,
        )

    @property
    def num_processes(self) -> int:
        """Processes over all nodes (the world size)."""
        return self.num_nodes * self.processes_per_node

    @property
    def engine(self) -> Engine:
        """The engine that keeps the processes together."""
        return self.shares if self.num_processes > 1 else Engine.ALONE

    @property
    def stage(self) -> int:
        """Of DeepSpeed's ZeRO; 0 under other engines."""
        return int(self.engine.removeprefix("zero")) if self.engine.startswith("zero") else 0

    def words(self) -> str:
        """The topology in a line for people: `2 nodes with 8 processes on cuda: fsdp2, rows held by 2
        (heads)`."""
        count = f"{self.processes_per_node} process{'es' if self.processes_per_node > 1 else ''}"
        nodes = f"{self.num_nodes} nodes with " if self.num_nodes > 1 else ""
        rows = f", rows held by {self.context_parallel} ({self.context_by})"
        return f"{nodes}{count} on {self.device}: {self.engine}{rows if self.context_parallel > 1 else ''}"


def accelerate_config(topology: Topology) -> dict[str, object]:
    """The configuration for `accelerate launch` on one node.

    Also for CPU processes: `MULTI_CPU` would quietly start a single one; the worker asks for the CPU itself.
    The same for every engine: accelerate starts the processes, and the worker shards (accelerate's FSDP would
    quietly be plain data parallel on a CPU).
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if topology.engine is Engine.ALONE else "MULTI_GPU",
        "num_processes": topology.num_processes,
        "num_machines": topology.num_nodes,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "dynamo_backend": "NO",
        "use_cpu": False,
        "rdzv_backend": "static",
        "same_network": True,
    }


def environment(topology: Topology) -> dict[str, str]:
    """Environment variables that the processes need."""
    given = {"OMP_NUM_THREADS": str(topology.threads), "TOKENIZERS_PARALLELISM": "false"}
    if topology.device == "cpu":
        given |= {name: os.environ.get(name, str(NUM_KEPT)) for name in KEPT_PRODUCTS}
    if topology.device == "cuda" and topology.expandable_segments:
        given["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if topology.device == "cpu" and topology.engine is not Engine.ALONE:
        given["ACCELERATE_USE_CPU"] = "true"
    if topology.device == "cuda" and topology.num_nodes > 1:
        given |= {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return given


def started_environment(topology: Topology) -> dict[str, str]:
    """The same of processes that are started for a run, and how they find modules."""
    return environment(topology) | safe_path()


def argv(topology: Topology, run_dir: Path, python: str, digest: str) -> Sequence[str]:
    """The command that runs the plan of a run folder on one node; it can be run by hand.

    `digest`: of the plan, without which the processes do nothing.
    """
    worker = ["-m", "memtrain.trainers.loop.worker", str(run_dir / PLAN_FILE), "--plan-digest", digest]
    if topology.engine is Engine.ALONE:
        return [python, *worker]
    launch = ["-m", "memtrain.trainers.runtime.loopback", "--config_file", str(run_dir / ACCELERATE_FILE)]
    return [python, *launch, *worker]
