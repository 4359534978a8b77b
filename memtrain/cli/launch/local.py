"""Launching on this machine: in this process when one is enough, else through accelerate."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import yaml

from memtrain.memory.plan import PLAN_FILE, Plan
from memtrain.memory.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.run.folder import RunFolder, RunLock

ACCELERATE_FILE = "accelerate.yaml"


def accelerate_config(settings: Settings) -> dict[str, object]:
    """The configuration for `accelerate launch`.

    Also for CPU processes: `MULTI_CPU` would quietly start a single one; the worker asks for the CPU itself.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if settings.num_processes > 1 else "NO",
        "num_processes": settings.num_processes,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "dynamo_backend": "NO",
        "use_cpu": False,
        "rdzv_backend": "static",
        "same_network": True,
    }


def command_line(plan: Plan, run_dir: Path) -> list[str]:
    """The command that runs the plan; it can be run by hand."""
    worker = ["-m", "memtrain.trainers.worker", str(run_dir / PLAN_FILE)]
    if plan.settings.num_processes == 1:
        return [sys.executable, *worker]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(run_dir / ACCELERATE_FILE)]
    return [sys.executable, *launch, *worker]


def environment(settings: Settings) -> dict[str, str]:
    """What the processes need in their environment."""
    given = {"OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"}
    if settings.device == "cuda" and settings.expandable_segments:
        given["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if settings.device == "cpu" and settings.num_processes > 1:
        given["ACCELERATE_USE_CPU"] = "true"
    return given


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out: it can be run again by itself."""
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True), sort_keys=False, width=100)


def write_files(plan: Plan, run_dir: Path) -> Path:
    """Write `launch.sh` beside the plan, and accelerate's configuration where it is used."""
    words = [f"export {name}={shlex.quote(value)}" for name, value in environment(plan.settings).items()]
    line = shlex.join(command_line(plan, run_dir))
    script = run_dir / "launch.sh"
    # Paths in the plan may be relative to where the command was given.
    words.append(f"cd {shlex.quote(str(Path.cwd()))}")
    script.write_text("\n".join(["#!/usr/bin/env bash", "set -e", *words, f"exec {line}", ""]))
    script.chmod(0o755)
    if plan.settings.num_processes > 1:
        config = yaml.safe_dump(accelerate_config(plan.settings), sort_keys=False)
        (run_dir / ACCELERATE_FILE).write_text(config)
    return script


def start(plan: Plan, folder: RunFolder, lock: RunLock, *, resume: bool) -> None:
    """Run the plan to its end. Several processes take the lock over from this one: they are what writes.

    Raises: MemtrainError of every kind, from this process or from the launched ones.
    """
    if plan.settings.num_processes > 1:
        from memtrain.cli.launch.agent import run_agent

        lock.close()
        words = command_line(plan, folder.path) + ([] if resume else ["--no-resume"])
        run_agent(words, environment(plan.settings), folder, plan.settings.num_processes)
        return
    from memtrain.trainers.worker import LOCKED, work

    os.environ.update(environment(plan.settings) | {LOCKED: "1"})
    try:
        work(plan, resume=resume)
    finally:
        del os.environ[LOCKED]
