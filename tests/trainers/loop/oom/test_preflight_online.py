"""The made-up rollout of the preflight: as many completions as a rollout has, and no more."""

from pathlib import Path

import pytest

from memtrain.cli.plan.make_plan import make_plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.loop.oom.preflight_online import made_up_rollout, weighed
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source


@pytest.mark.parametrize(
    ("steps_per_rollout", "pass_factor", "expected"), [(1, 4, 8), (2, 4, 16), (8, 4, 32), (8, 1, 8)]
)
def test_passes_are_tried_on_no_more_completions_than_a_rollout_has(
    steps_per_rollout: int, pass_factor: int, expected: int, tmp_path: Path
):
    """Eight a step. Passes may take four micro-batches at once: over 32 they measured a third too much."""
    words = [
        f"data.cache_dir={tmp_path}",
        "train.batch_size=8",
        "train.micro_batch_size=8",
        f"rloo.steps_per_rollout={steps_per_rollout}",
    ]
    plan = make_plan(load_recipe("smoke/rloo", words), run_dir=str(tmp_path / "run")).plan
    settings = plan.settings.model_copy(update={"pass_factor": pass_factor})
    plan = plan.model_copy(update={"settings": settings})
    make_accelerator(plan.settings)
    built = build(plan)
    steps = online_source(plan, built, Rollouts())
    assert isinstance(steps, OnlineSteps)
    assert weighed(steps).num_answers == expected
    with made_up_rollout(steps) as sequences:
        assert len(sequences) == 8, "A whole micro-batch of the update."
