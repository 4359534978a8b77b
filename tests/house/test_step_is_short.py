"""A step is read on few pages: the files that one optimizer step enters, with its work and its report."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import memtrain
from memtrain.cli.plan.make_plan import make_plan
from memtrain.recipes.reading.load import load_recipe

PACKAGE = f"{Path(memtrain.__file__).parent}/"
ROOT = Path(__file__).parents[2]


def files_of_a_step(recipe: str, folder: Path, step: int = 2) -> set[str]:
    """Files of the package in which something is called while a settled step is made, rollout included."""
    from memtrain.trainers.build.engine import make_accelerator, ranks_of
    from memtrain.trainers.loop.loop import next_step
    from memtrain.trainers.loop.worker import assemble

    given = ["train.max_steps=8", "cluster.device=cpu", "cluster.threads=1", f"data.cache_dir={folder}/cache"]
    path = str(ROOT / "configs/smoke" / recipe)
    plan = make_plan(load_recipe(path, given), run_dir=str(folder / "run")).plan
    (folder / "run").mkdir(exist_ok=True)
    plan.write(folder / "run")
    entered: set[str] = set()

    def enters(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.add(frame.f_code.co_filename.removeprefix(PACKAGE))

    with ExitStack() as stack:
        ranks = ranks_of(make_accelerator(plan.settings), plan.settings)
        run, _ = assemble(plan, ranks, stack)
        for _ in range(step):
            next_step(run)
        sys.setprofile(enters)
        try:
            next_step(run)
        finally:
            sys.setprofile(None)
    return entered


@pytest.mark.parametrize(("recipe", "most"), [("sft.yaml", 30), ("grpo.yaml", 67)])
def test_a_step_enters_few_files(recipe: str, most: int, tmp_path: Path):
    entered = files_of_a_step(recipe, tmp_path)
    assert len(entered) <= most, "\n".join(sorted(entered))
    assert "trainers/build/step.py" in entered
