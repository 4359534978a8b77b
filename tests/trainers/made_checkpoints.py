"""Small checkpoints for tests: made, looked at, broken, and killed while they are made."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import (
    Parts,
    Save,
    complete_steps,
    mend_checkpoints,
    newest_complete,
    save_checkpoint,
)
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.checkpoints.state_io import load_state, save_state
from memtrain.trainers.run_folder.folder import RunFolder


def parts_of(step: int) -> Parts:
    """A state, a folder and a plain file, all of which say the step."""

    def model(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"step": step}))

    return {
        "optimizer": lambda path: save_state({"step": torch.full((50,), step)}, path),
        "model": model,
        "note.txt": lambda path: path.write_text(f"step {step}") and None,
    }


def save(
    folder: RunFolder, plan: Plan, step: int, *, keep: int = 2, loss: float | None = None, best: bool = False
) -> Path:
    facts = facts_of(plan, step=step, eval_loss=loss)
    return save_checkpoint(Save(folder, parts_of(step), facts, keep=keep, keep_best=best))


def steps_of(folder: RunFolder) -> list[int]:
    return list(complete_steps(folder.checkpoints))


def assert_usable(folder: RunFolder, steps: set[int]) -> None:
    """The newest complete one is of one of these steps, and every part of it says so."""
    found = newest_complete(folder)
    assert found.checkpoint is not None
    step = found.checkpoint.manifest.facts.step
    assert step in steps
    assert load_state(found.checkpoint.part("optimizer"))["step"].eq(step).all()
    assert json.loads((found.checkpoint.part("model") / "config.json").read_text()) == {"step": step}


def shorten(path: Path) -> None:
    (path / "optimizer.safetensors").write_bytes((path / "optimizer.safetensors").read_bytes()[:-1])


def die_at(event: int) -> None:
    """From now on, this process dies like a killed one at the n-th change of the file system."""
    seen = 0
    changes = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")

    def hook(name: str, arguments: tuple) -> None:
        nonlocal seen
        if name in changes:
            seen += 1
            if seen == event:
                os._exit(9)

    sys.addaudithook(hook)


def in_child(act: Callable[[], object]) -> int:
    """The exit code of a forked process that does it."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_every_moment(
    place: Path, plan: Plan, act: Callable[[RunFolder], object], *, already_there: bool
) -> None:
    """Do `act`, which saves step 10 beside step 5, and die at every point between two changes of the file
    system, until it comes through: what is left can be used.

    With `keep=1`, so that the only good one is removed by the very save that is killed; `already_there` has
    the new one replace a broken one of the same step.
    """
    before = RunFolder(place / "before")
    save(before, plan, 5, keep=1)
    if already_there:
        save(before, plan, 10, keep=2)
        shorten(before.checkpoints / "step-000010")
    event, code = 0, 9
    while code == 9:
        event += 1
        folder = RunFolder(place / str(event))
        shutil.copytree(before.path, folder.path)

        def killed(folder: RunFolder = folder, event: int = event) -> None:
            die_at(event)
            act(folder)

        code = in_child(killed)
        mend_checkpoints(folder)
        assert_usable(folder, {5, 10})
        assert not list(folder.checkpoints.glob(".*"))
        save(folder, plan, 15, keep=1)
        assert steps_of(folder) == [15]
    assert event > 20
