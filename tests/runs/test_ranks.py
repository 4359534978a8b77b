"""Two processes on gloo: the losses of one, and one message when one of them fails."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from memtrain.errors import DataError, LaunchError
from memtrain.trainers.loop import worker
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.rank_failures import root_fault

LONG = ("train.max_steps=40", "save.every_steps=5", "eval.every_steps=10", "train.micro_batch_size=2")


def assert_same_curve(found: list[tuple], expected: list[tuple]) -> None:
    assert len(found) == len(expected)
    for (step, loss, norm, *rest), wanted in zip(found, expected, strict=True):
        assert (step, *rest) == (wanted[0], *wanted[3:])
        # Sums are taken in another order; forty steps of AdamW make more of it.
        assert (loss, norm) == pytest.approx(wanted[1:3], rel=2e-4)


def wait_for_step(metrics, folder: Path, step: int) -> None:
    until = time.monotonic() + 60
    while len(metrics(folder, "step")) < step:
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def two(shared_runs) -> Path:
    """A run of two ranks that nobody interrupted."""
    ranks = shared_runs.fork_ranks("two", 2, *LONG, "memory.measure_peaks=true")
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    return shared_runs.folder / "two"


def test_two_ranks_have_the_losses_of_one(runs, two: Path, metrics, curve_of):
    one = runs.done("one", *LONG)
    assert_same_curve(curve_of(two), curve_of(one))
    assert [event["step"] for event in metrics(two, "eval")] == [10, 20, 30, 40]
    for found, wanted in zip(metrics(two, "eval"), metrics(one, "eval"), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-4)
        assert found["tokens"] == wanted["tokens"]


def test_only_the_main_rank_writes(two: Path, metrics):
    assert len(metrics(two, "final")) == 1
    assert len(metrics(two, "data")) == 2
    assert {path.name for path in (two / "checkpoints").iterdir()} == {"step-000035", "step-000040"}
    assert json.loads((two / "status.json").read_text())["state"] == "done"


def test_the_peak_is_that_of_the_rank_that_needed_most(runs, metrics, monkeypatch):
    """Rank 1 is made to need a GiB more in every phase."""
    plain = worker.MemoryWatch

    def greedy(device, resident_bytes, *rest, **named):
        extra = 2**30 if os.environ.get("RANK") == "1" else 0
        return plain(device, resident_bytes + extra, *rest, **named)

    monkeypatch.setattr(worker, "MemoryWatch", greedy)
    ranks = runs.fork_ranks("run", 2, "memory.measure_peaks=true", "train.max_steps=2")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert all(step["peak_bytes"] > 2**30 for step in metrics(runs.folder / "run", "step"))
    highest = {event["phase"]: event["allocated"] for event in metrics(runs.folder / "run", "memory")}
    assert highest["steady step"] > 2**30


def test_more_ranks_than_rows_do_not_hang(runs, metrics):
    """Three rows on two ranks, one at a time, then a last step of one row."""
    ranks = runs.fork_ranks(
        "run",
        2,
        "data.train.limit=4",
        "data.eval_fraction=0",
        "train.batch_size=3",
        "train.micro_batch_size=1",
    )
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert [step["sequences"] for step in metrics(runs.folder / "run", "step")] == [3, 1] * 3


def test_ranks_stop_together_when_one_is_asked_and_go_on(runs, two: Path, metrics, curve_of):
    ranks = runs.fork_ranks("run", 2, *LONG)
    wait_for_step(metrics, runs.folder / "run", 3)
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [75, 75], ranks[0].said
    assert json.loads((runs.folder / "run" / "status.json").read_text())["state"] == "saved"
    ranks = runs.fork_ranks("run", 2, *LONG)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(two)


def test_a_killed_rank_is_named_and_the_run_goes_on_bit_for_bit(runs, two: Path, metrics, curve_of):
    ranks = runs.fork_ranks("run", 2, *LONG)
    wait_for_step(metrics, runs.folder / "run", 7)
    ranks[1].send(signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait() == 70
    error = root_fault(RunFolder(runs.folder / "run"), 2)
    assert isinstance(error, LaunchError)
    assert "rank 1 ended without an error message" in str(error)
    ranks = runs.fork_ranks("run", 2, *LONG)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(two)


def test_the_rank_that_failed_first_is_named_with_its_own_kind(runs, monkeypatch):
    plain = worker.build

    def build(plan, spread):
        if os.environ.get("RANK") == "1":
            raise DataError("row 7 is gone", where="rows.jsonl:7", fix="bring it back")
        return plain(plan, spread)

    monkeypatch.setattr(worker, "build", build)
    ranks = runs.fork_ranks("run", 2)
    assert ranks[1].wait() == DataError.exit_code
    assert ranks[0].wait() != 0
    error = root_fault(RunFolder(runs.folder / "run"), 2)
    assert isinstance(error, DataError)
    assert error.text() == "error: rank 1: row 7 is gone\n   at: rows.jsonl:7\n  try: bring it back"


def test_what_all_ranks_meet_is_reported_without_a_rank(runs):
    ranks = runs.fork_ranks("run", 2, "optim.lr=1e38", "optim.max_grad_norm=null")
    assert [rank.wait() for rank in ranks] == [8, 8]
    error = root_fault(RunFolder(runs.folder / "run"), 2)
    assert str(error).startswith("error: the loss is nan")


def test_one_process_refuses_a_plan_for_two(runs):
    process = runs.fork_ranks("run", 2, num_started=1)[0]
    assert process.wait() == LaunchError.exit_code
    assert "the plan needs 2 processes, and 1 are running" in process.said


def test_ranks_with_another_plan_are_named(runs, monkeypatch):
    plain = worker.read_plan

    def read(*given, **named):
        plan = plain(*given, **named)
        return plan.model_copy(update={"recipe_path": "other"}) if os.environ.get("RANK") == "1" else plan

    monkeypatch.setattr(worker, "read_plan", read)
    ranks = runs.fork_ranks("run", 2)
    assert [rank.wait() for rank in ranks] == [LaunchError.exit_code] * 2
    assert "rank 1 does not have the same plan as rank 0" in ranks[0].said
