"""A changed recipe is refused by name; a changed machine is said; what moves no number passes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from memtrain.errors import ResumeError
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.checkpoints import resume
from memtrain.trainers.checkpoints.manifest import CheckpointFacts, facts_of
from memtrain.trainers.checkpoints.resume import check_resumable

MakePlan = Callable[..., Plan]


def facts(plan: Plan, step: int = 50) -> CheckpointFacts:
    return facts_of(plan, step=step)


def refused_keys(saved: Plan, asked: Plan) -> list[str]:
    with pytest.raises(ResumeError) as caught:
        check_resumable(facts(saved), asked)
    return [fault.where for fault in caught.value.faults]


def test_the_same_plan_continues_in_silence(make_plan: MakePlan):
    assert check_resumable(facts(make_plan()), make_plan()) == []


def test_every_changed_key_is_named_with_both_values(make_plan: MakePlan):
    asked = make_plan({"optim.lr": 1e-4, "train.seed": 7, "sft.z_loss": 0.1})
    with pytest.raises(ResumeError, match="train.seed was 0 up to step 50 and is now 7") as caught:
        check_resumable(facts(make_plan()), asked)
    assert [fault.where for fault in caught.value.faults] == ["optim.lr", "sft", "train.seed"]


FREE: list[dict[str, Any]] = [
    {"run_dir": "elsewhere"},
    {"log.every_steps": 1, "log.trackers": ["tensorboard"]},
    {"save.keep": 5, "save.every_steps": 3},
    {"eval.every_steps": 7},
    {"data.cache_dir": "/other", "data.processes": 4},
    {"memory.budget": "8GiB", "memory.measure_peaks": False},
    {"model.dtype": "float32"},
]


@pytest.mark.parametrize("keys", FREE)
def test_what_moves_no_number_may_change(make_plan: MakePlan, keys: dict[str, Any]):
    assert check_resumable(facts(make_plan()), make_plan(keys)) == []


@pytest.mark.parametrize(
    ("setting", "value"), [("checkpoint_every", 2), ("offload", "all"), ("expandable_segments", False)]
)
def test_exact_strategies_may_change(make_plan: MakePlan, setting: str, value: object):
    assert check_resumable(facts(make_plan()), make_plan(**{setting: value})) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("threads", 2),
        ("num_processes", 2),
        ("micro_batch_size", 4),
        ("loss", "full"),
        ("attention", "masked"),
    ],
)
def test_another_order_of_sums_is_said(make_plan: MakePlan, setting: str, value: object):
    (said,) = check_resumable(facts(make_plan()), make_plan(**{setting: value}))
    assert said.startswith("not bit-identical from here")
    assert f"{setting} " in said
    assert f"-> {value}" in said


def test_another_version_or_device_is_said(make_plan: MakePlan):
    plan = make_plan()
    older = facts(plan).model_copy(
        update={"versions": plan.versions | {"torch": "2.10.0"}, "device": "cpu AVX1"}
    )
    said = "\n".join(check_resumable(older, plan))
    assert "version of torch 2.10.0 -> 2.13.0" in said
    assert "device cpu AVX1 ->" in said


def test_a_resolved_batch_is_compared_and_not_how_it_is_written(make_plan: MakePlan):
    assert check_resumable(facts(make_plan()), make_plan({"train.batch_size": 8})) == []
    assert refused_keys(make_plan(), make_plan(batch_size=16)) == ["train.batch_size"]


def test_changed_rows_are_refused(make_plan: MakePlan):
    plan = make_plan()
    train = plan.data.train.model_copy(update={"folder": "/cache/91cc"})
    asked = plan.model_copy(update={"data": plan.data.model_copy(update={"train": train})})
    assert refused_keys(plan, asked) == ["data.train"]


CONSTANT = {"optim.schedule": "constant"}


@pytest.mark.parametrize(
    ("keys", "asked_steps", "why"),
    [
        ({}, 200, "the cosine schedule of the steps already made was computed for 100"),
        (CONSTANT, 40, "already at step 50"),
        (CONSTANT | {"optim.warmup_ratio": 0.3}, 200, "the warm-up, a fraction of all steps, is not over"),
    ],
)
def test_another_number_of_steps_is_refused_with_the_reason(
    make_plan: MakePlan, keys: dict[str, Any], asked_steps: int, why: str
):
    with pytest.raises(ResumeError, match=why):
        check_resumable(facts(make_plan(keys)), make_plan(keys, max_steps=asked_steps))


@pytest.mark.parametrize("keys", [CONSTANT, CONSTANT | {"optim.warmup_steps": 60}])
def test_a_constant_schedule_may_run_longer(make_plan: MakePlan, keys: dict[str, Any]):
    asked = make_plan(keys | {"train.max_steps": 200}, max_steps=200)
    assert check_resumable(facts(make_plan(keys)), asked) == []


@pytest.mark.parametrize("names", [["optim.lr"], ["data", "optim"]])
def test_what_is_named_may_change_and_is_said(make_plan: MakePlan, names: list[str]):
    asked = make_plan({"optim.lr": 1e-4, "save.allow_changed_keys": names})
    assert check_resumable(facts(make_plan()), asked) == ["another run from here: optim.lr 2e-05 -> 0.0001"]


def test_what_is_not_named_or_decides_shapes_stays_refused(make_plan: MakePlan):
    changed = {"optim.lr": 1e-4, "train.seed": 7, "optim.kind": "muon", "model.path": "org/other"}
    asked = make_plan(changed | {"save.allow_changed_keys": ["optim", "model"]})
    with pytest.raises(ResumeError) as caught:
        check_resumable(facts(make_plan()), asked)
    fixes = {fault.where: fault.fix for fault in caught.value.faults}
    assert list(fixes) == ["model.path", "optim.kind", "train.seed"]
    assert "save.allow_changed_keys=[train.seed]" in fixes["train.seed"]
    assert "allow_changed_keys" not in fixes["model.path"] + fixes["optim.kind"]


def test_a_checkpoint_from_before_a_key_goes_on_with_its_default(make_plan: MakePlan):
    """The key is in no recipe of that time; said otherwise today, it makes another run."""
    plan = make_plan()
    saved = facts(plan)
    recipe: dict[str, Any] = dict(saved.recipe)
    recipe["optim"] = {name: value for name, value in recipe["optim"].items() if name != "neftune_alpha"}
    older = saved.model_copy(update={"recipe": recipe})
    assert check_resumable(older, plan) == []
    with pytest.raises(ResumeError) as caught:
        check_resumable(older, make_plan({"optim.neftune_alpha": 5.0}))
    assert [fault.where for fault in caught.value.faults] == ["optim.neftune_alpha"]


def test_every_setting_has_a_rule():
    """A new setting must be put in one of the tables of resume.py."""
    tables = (
        *resume.FREE_SETTINGS,
        *resume.ROUNDING_SETTINGS,
        *resume.RECIPE_SETTINGS,
        *resume.SETTING_NAMES,
        "max_steps",
    )
    assert sorted(tables) == sorted(Settings.model_fields)


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from leaves(kind, f"{prefix}{name}.")


def test_every_key_of_the_tables_is_a_recipe_key(make_plan: MakePlan):
    known = set(leaves(type(make_plan().recipe)))
    assert known >= {*resume.FREE_KEYS, *resume.RESOLVED_KEYS, *resume.STATE_KEYS}


def test_rows_that_another_version_named_otherwise_are_the_same_rows(make_plan: MakePlan, tmp_path: Path):
    """The name of a store is made of versions and rules too; what it holds is told by its digests."""
    plans = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        plan = make_plan()
        train = plan.data.train.model_copy(update={"folder": str(tmp_path / name)})
        plans.append(plan.model_copy(update={"data": plan.data.model_copy(update={"train": train})}))
    saved, asked = plans
    for sums, is_same in ((("a", "a"), True), (("a", "b"), False)):
        for name, one in zip(("old", "new"), sums, strict=True):
            (tmp_path / name / "meta.json").write_text(json.dumps({"sums": one}))
        assert (
            (refused_keys(saved, asked) == ["data.train"])
            if not is_same
            else (check_resumable(facts(saved), asked) == [])
        )
    (tmp_path / "old" / "meta.json").unlink()
    assert refused_keys(saved, asked) == ["data.train"]
