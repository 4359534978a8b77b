"""A rehearsed run is the unrehearsed one, bit for bit; one that cannot survive ends before step 1."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sampled import sampled

from memtrain.trainers.build import step
from memtrain.trainers.checkpoints.state_io import load_state
from memtrain.trainers.runtime import oom_errors as memory_errors

MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 42 bytes. Error code 12"
SMALL = ("train.max_steps=3", "train.micro_batch_size=4", "train.batch_size=8", "memory.measure_peaks=true")
KINDS = {
    "adamw": ("optim.weight_decay=0.1",),
    "adafactor": ("optim.kind=adafactor", "optim.weight_decay=0.1"),
    "muon": ("optim.kind=muon", "optim.weight_decay=0.1"),
    "sgd": ("optim.kind=sgd",),
    "float32 copies": ("model.dtype=bfloat16", "optim.master_weights=true", "optim.weight_decay=0.1"),
    "adapter with dropout": ("model.adapter={kind: lora, r: 4, dropout: 0.2}",),
    "step in the backward pass": (
        "optim.in_backward=on",
        "optim.max_grad_norm=null",
        "train.micro_batch_size=8",
    ),
    "offloaded states": ("memory.optimizer_offload=on",),
}


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """All that a step or an evaluation says but for its times."""
    return [
        {key: value for key, value in line.items() if key not in ("time", "seconds")}
        for kind in ("step", "eval")
        for line in lines(folder, kind)
    ]


@pytest.mark.parametrize("kind", sampled(KINDS))
def test_a_rehearsal_leaves_no_trace_in_the_numbers(runs, kind: str):
    options = (*SMALL, *KINDS[kind])
    plain = runs.done("plain", *options, "memory.preflight=off")
    rehearsed = runs.done("rehearsed", *options, "memory.preflight=on")
    assert numbers(rehearsed) == numbers(plain)
    weights = [next((run / "final").glob("*.safetensors")).read_bytes() for run in (plain, rehearsed)]
    assert weights[0] == weights[1]


def test_measured_peaks_of_every_phase_stand_beside_the_predicted_ones(runs):
    folder = runs.done("run", *SMALL, "memory.preflight=on")
    measured = {line["phase"]: line["allocated"] for line in lines(folder, "memory")}
    for phase in ("first step", "steady step", "evaluation", "saving"):
        assert measured[f"dry run: {phase}"] > 0
    heaviest = max(line["allocated"] for line in lines(folder, "memory") if line["phase"] == "steady step")
    assert measured["dry run: steady step"] >= heaviest
    (note,) = [line["text"] for line in lines(folder, "note")]
    assert note.startswith("dry run of the heaviest micro-batch of the run, ")
    assert not list(folder.glob(".rehearsal-*"))


def test_the_report_holds_a_rehearsed_phase_against_its_prediction(runs):
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.report.report import load_report, phases_of

    folder = runs.done("run", *SMALL, "memory.preflight=on")
    phases = {one.phase: one for one in phases_of(load_report(RunFolder(folder)))}
    one = phases["dry run: evaluation"]
    assert one.predicted == phases["evaluation"].predicted
    assert one.difference is not None


def test_a_run_that_goes_on_is_rehearsed_without_moving_its_states(runs):
    options = (*SMALL, "memory.preflight=on", "save.every_steps=2")
    whole = runs.done("whole", *options)
    cut = runs.done("cut", *options)
    shutil.rmtree(sorted((cut / "checkpoints").glob("step-*"))[-1])
    runs.done("cut", *options)
    assert numbers(cut)[-1] == numbers(whole)[-1]
    assert lines(cut, "step")[-1]["loss"] == lines(whole, "step")[-1]["loss"]


def test_a_run_that_cannot_survive_ends_before_its_first_step(runs, monkeypatch):
    def attempt(act: object, *, is_on: bool = True) -> tuple[None, bool]:
        return None, False

    monkeypatch.setattr(step, "attempt", attempt)
    ended = runs.run("run", *SMALL, "memory.preflight=on")
    assert ended.code == 7
    assert "in step 1" in ended.err
    assert "(peak " in ended.err
    assert not lines(runs.folder / "run", "step")


def test_what_the_rehearsal_learns_is_kept(runs, monkeypatch):
    """The heaviest micro-batch runs out once, is split, and no step of the run tries it whole."""
    real, broken = memory_errors.attempt, []

    def attempt(act: Any, *, is_on: bool = True) -> tuple[Any, bool]:
        if not broken:
            broken.append(1)
            return None, False
        return real(act, is_on=is_on)

    monkeypatch.setattr(step, "attempt", attempt)
    folder = runs.done("run", *SMALL, "memory.preflight=on", "save.every_steps=3")
    state = load_state(next(folder.glob("checkpoints/step-*")) / "loop")
    assert state["micro_batch_limit"] > 0
    assert state["num_recoveries"] == 1


def test_a_peak_above_the_budget_of_the_recipe_is_refused(runs, monkeypatch):
    from memtrain.trainers.loop.oom import post_mortem

    monkeypatch.setattr(post_mortem, "needed", lambda peak, settings: 64 * 2**30)
    ended = runs.run("run", *SMALL, "memory.preflight=on", "memory.budget=8GiB")
    assert ended.code == 3
    assert "needs 64.00 GiB, and memory.budget is 8.00 GiB" in ended.err


def test_a_disk_without_room_for_the_checkpoints_is_reported_before_the_first_step(runs, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    ended = runs.run("run", *SMALL, "memory.preflight=on")
    assert ended.code == 5
    assert "and 1000 B are free" in ended.err
