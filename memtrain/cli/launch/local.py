"""Launching on this machine: in this process when one is enough, else through accelerate."""

from __future__ import annotations

import json
import os
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import cast

import yaml
from pydantic import JsonValue

from memtrain.cli.launch.topology import (
    ACCELERATE_FILE,
    Engine,
    Topology,
    accelerate_config,
    argv,
    environment,
    started_environment,
)
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.zero_config import CONFIG_FILE, zero_config
from memtrain.recipes.reading.environment import REFERENCE, hidden
from memtrain.recipes.reading.interpolate import literal
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import OWNER, RunLock


def recipe_yaml(plan: Plan) -> str:
    """The recipe with every default written out: it can be run again by itself, where the environment
    variables that it reads are set."""
    given = literal(plan.recipe.model_dump(mode="json", exclude_none=True))
    texts = [
        one.model_copy(update={"value": literal(one.value), "reference": _reference(one.reference)})
        for one in plan.environment
    ]
    values = hidden(cast(dict[str, JsonValue], given), texts)
    return yaml.safe_dump(values, sort_keys=False, width=100)


def _reference(text: str) -> str:
    """The reference of a text of the environment, with what stands around the variables as text."""
    ends = [0, *(end for found in REFERENCE.finditer(text) for end in found.span()), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    return "".join(str(literal(one)) if number % 2 == 0 else one for number, one in enumerate(pieces))


def write_files(plan: Plan, run_dir: Path) -> Path:
    """Write `launch.sh` beside the plan, and the configurations of accelerate and DeepSpeed where used."""
    topology = Topology.of(plan.settings)
    words = [f"export {name}={shlex.quote(value)}" for name, value in started_environment(topology).items()]
    line = shlex.join(argv(topology, run_dir, sys.executable, plan.digest()))
    script = run_dir / "launch.sh"
    # Paths in the plan may be relative to where the command was given.
    words.append(f"cd {shlex.quote(str(Path.cwd()))}")
    head = ["#!/usr/bin/env bash", f"# {topology.words()}", "set -e"]
    script.write_text("\n".join([*head, *words, f"exec {line}", ""]))
    script.chmod(0o755)
    if topology.engine is not Engine.ALONE:
        config = yaml.safe_dump(accelerate_config(topology), sort_keys=False)
        (run_dir / ACCELERATE_FILE).write_text(config)
    if uses_zero(plan.settings):
        made = zero_config(plan.settings, plan.recipe.optim.max_grad_norm)
        (run_dir / CONFIG_FILE).write_text(json.dumps(made, indent=1) + "\n")
    return script


def start(plan: Plan, folder: RunFolder, lock: RunLock, *, resume: bool) -> None:
    """Run the plan to its end, in a folder that is locked. Several processes are told by whom.

    Raises: MemtrainError of every kind, from this process or from the launched ones.
    """
    topology = Topology.of(plan.settings)
    if topology.engine is not Engine.ALONE:
        from memtrain.cli.launch.elastic_agent import run_agent

        words = [*argv(topology, folder.path, sys.executable, plan.digest())]
        given = started_environment(topology) | {OWNER: lock.owner.model_dump_json()}
        grace_s = plan.recipe.cluster.stop_grace_s
        run_agent(
            [*words, *([] if resume else ["--no-resume"])], given, folder, topology.num_processes, grace_s
        )
        return
    from memtrain.cli.launch.hang import watching_itself
    from memtrain.trainers.loop.worker import work
    from memtrain.trainers.run_folder.rank_failures import clear_faults

    clear_faults(folder)
    os.environ.update(environment(topology))
    with watching_itself(folder, plan.recipe.cluster.stop_grace_s):
        work(plan, resume=resume, is_locked=True)
