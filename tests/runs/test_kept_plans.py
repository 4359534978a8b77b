"""A run that goes on keeps its own plan, whatever is free or known on this machine by now."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sampled import sampled

from memtrain.cli.plan import make_plan as planning
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.hardware.peak_history import History
from memtrain.memory.plan.plan import read_plan
from memtrain.memory.plan.units import GIB, MIB

OPEN = ("train.batch_size=16", "optim.schedule=constant", "optim.warmup_steps=0", "data.eval_fraction=0")
TIGHT, ROOMY = 720 * MIB, 64 * GIB
"""Budgets of a small and of the usual micro-batch; a CPU run takes 0.8 of what is free."""


@pytest.fixture
def here(monkeypatch):
    """Makes this machine one with so much free memory, and so many cores."""

    def set_to(free: int, cores: int = 2, ratios: dict[str, tuple[float, ...]] | None = None) -> None:
        found: Hardware = replace(cpu(ROOMY, cores), free_bytes=free)
        monkeypatch.setattr(planning, "detect", lambda device="auto": found)
        monkeypatch.setattr(planning, "read_history", lambda: History(ratios or {}))

    return set_to


def reported(folder: Path) -> tuple[str, str]:
    """(value, reason) of what became of the run's plan."""
    found = next(one for one in read_plan(folder / "plan.json").decisions if one.setting == "plan")
    return found.value, found.reason


def notes(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "note"]


def micro_tokens(folder: Path) -> int | None:
    return read_plan(folder / "plan.json").settings.micro_tokens


def test_free_memory_and_history_that_moved_leave_the_plan_and_every_bit(runs, curve_of, here):
    here(int(TIGHT / 0.8))
    whole = runs.done("whole", *OPEN)
    runs.done("run", *OPEN, "train.max_steps=3")
    small = micro_tokens(whole)
    kind = read_plan(whole / "plan.json").prediction.kind
    here(ROOMY)
    assert micro_tokens(runs.done("roomy", *OPEN, "--dry-run")) > small
    # A machine with more memory, that remembers runs of this kind which needed a little less.
    here(ROOMY, ratios={kind: (0.95,)})
    folder = runs.done("run", *OPEN)
    assert micro_tokens(folder) == small
    assert reported(folder)[0] == "kept"
    assert not [one for one in notes(folder) if "not bit-identical" in one]
    assert curve_of(folder) == curve_of(whole)
    # A budget is none of what a plan rests on, while it fits.
    assert runs.run("run", *OPEN, "memory.budget=2GiB").out.startswith("The run in")


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        pytest.param(1, 2, "", id="more"),
        pytest.param(2, 1, "2 threads on 1 core: slower", id="fewer", marks=pytest.mark.slow),
    ],
)
def test_a_place_with_other_cores_goes_on_with_the_same_threads_and_bits(
    runs, curve_of, here, before: int, now: int, words: str
):
    said = (*OPEN, "cluster.threads=auto", "train.batch_size=2", "train.max_steps=3")
    here(ROOMY, cores=before)
    whole = runs.done("whole", *said)
    runs.done("run", *said, "train.max_steps=2")
    here(ROOMY, cores=now)
    folder = runs.done("run", *said)
    value, reason = reported(folder)
    assert (value, words in reason) == ("kept", True)
    assert read_plan(folder / "plan.json").settings.threads == before
    assert not [one for one in notes(folder) if "not bit-identical" in one]
    assert curve_of(folder) == curve_of(whole)


def test_a_plan_that_no_longer_fits_is_replaced_and_both_numbers_are_reported(runs, here):
    here(ROOMY)
    runs.done("run", *OPEN, "train.max_steps=3")
    large = micro_tokens(runs.folder / "run")
    here(int(TIGHT / 0.8))
    ended = runs.run("run", *OPEN)
    assert ended.code == 0, ended.err
    folder = runs.folder / "run"
    value, reason = reported(folder)
    assert (value, micro_tokens(folder) < large) == ("new", True)
    assert reason == (
        "the earlier plan needs 726 MiB (margin included), and the budget is 720 MiB; the new plan needs "
        "718 MiB "
        "(margin included)"
    )
    assert "the earlier plan needs 726 MiB" in " ".join(ended.out.split())
    assert [
        one
        for one in notes(folder)
        if one.startswith("not bit-identical from here") and "micro_tokens" in one
    ]


def test_what_the_recipe_says_otherwise_now_is_planned_for(runs, here):
    here(ROOMY)
    runs.done("run", *OPEN, "train.max_steps=3")
    folder = runs.done("run", *OPEN, "memory.activation_checkpointing=on")
    value, reason = reported(folder)
    assert (value, reason) == ("new", "changed in the recipe: memory.activation_checkpointing auto -> on")
    assert read_plan(folder / "plan.json").settings.checkpoint_every


@pytest.mark.parametrize("broken", sampled([None, "{", '{"version": 0}'], 3))
def test_a_broken_plan_file_moves_nothing_and_is_written_anew(runs, curve_of, here, broken: str | None):
    """The checkpoint knows the plan that made it."""
    here(int(TIGHT / 0.8))
    whole = runs.done("whole", *OPEN)
    folder = runs.done("run", *OPEN, "train.max_steps=3")
    (folder / "plan.json").write_text(broken) if broken is not None else (folder / "plan.json").unlink()
    here(ROOMY)
    runs.done("run", *OPEN)
    assert reported(folder)[0] == "kept"
    assert curve_of(folder) == curve_of(whole)


def test_settings_of_another_version_are_planned_anew_and_it_is_said(runs, here, monkeypatch):
    from memtrain.cli.plan import keep_plan as keeping

    here(ROOMY)
    runs.done("run", *OPEN, "train.max_steps=3")
    begun = keeping.begun_in(runs.folder / "run")
    other = replace(begun, settings={**begun.settings, "loss": "a loss of old"})
    monkeypatch.setattr(planning, "begun_in", lambda folder, *given: other)
    value, reason = reported(runs.done("run", *OPEN))
    assert (value, "settings are of another version of memtrain" in reason) == ("new", True)


def test_begun_anew_a_run_is_planned_anew(runs, here):
    here(int(TIGHT / 0.8))
    runs.done("run", *OPEN, "train.max_steps=3")
    small = micro_tokens(runs.folder / "run")
    here(ROOMY)
    folder = runs.done("run", *OPEN, "train.max_steps=3", "--no-resume")
    assert micro_tokens(folder) > small
    assert "plan" not in [one.setting for one in read_plan(folder / "plan.json").decisions]


def test_a_job_that_is_submitted_for_a_run_keeps_its_plan(runs, here):
    here(int(TIGHT / 0.8))
    folder = runs.done("run", *OPEN, "train.max_steps=3")
    small = micro_tokens(folder)
    written = runs.run("run", *OPEN, verb="slurm")
    assert written.code == 0, written.err
    assert (reported(folder)[0], micro_tokens(folder)) == ("kept", small)
    other = runs.run("other", *OPEN, verb="slurm")
    assert other.code == 0, other.err
    assert micro_tokens(runs.folder / "other") > small
