"""The made-up rollout of the preflight: as many completions as a rollout has, and no more."""

import json
from pathlib import Path

import pytest

from memtrain.cli.plan.make_plan import make_plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.loop.oom.preflight_online import fullest_rows, made_up_rollout, weighed
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source


def test_the_update_is_tried_with_the_longest_prompt_and_those_that_fit_beside_it(tmp_path: Path):
    """Two long prompts do not fit together: the longest was tried alone, and a real step was heavier."""
    rows = [{"prompt": "a " * words, "answer": "1"} for words in (3, 20, 20, 4)]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    words = [
        f"data.cache_dir={tmp_path}",
        f"data.train={source}",
        "data.eval_fraction=0",
        "train.batch_size=8",
        "train.micro_batch_size=4",
        "generate.num_generations=2",
        "generate.max_tokens=8",
    ]
    plan = make_plan(load_recipe("smoke/rloo", words), run_dir=str(tmp_path / "run")).plan
    make_accelerator(plan.settings)
    built = build(plan)
    steps = online_source(plan, built, Rollouts())
    assert isinstance(steps, OnlineSteps)
    groups = steps.prompts.tokens + 16
    short, long = sorted(set(groups.tolist()))[0], groups.max()
    tight = plan.settings.model_copy(update={"micro_tokens": int(long + short)})
    steps.plan = plan.model_copy(update={"settings": tight})
    assert groups[fullest_rows(steps)].tolist() == [long, short]
    with made_up_rollout(steps) as sequences:
        assert steps.feed.tokens[sequences].sum() == long + short


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
