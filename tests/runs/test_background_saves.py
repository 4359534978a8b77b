"""`save.async_save`: the same losses to the last bit, whatever happens while a checkpoint is written."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from shared_out import peaks

from memtrain.errors import EXIT_SAVED, LaunchError
from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.checkpoints import snapshot

ASKED = ("save.async_save=true", "save.every_steps=2", "train.max_steps=8", "save.keep=3")
FSDP2 = ("cluster.engine=fsdp2",)
SLOW_S = 1.0
"""Seconds of a file where the test asks what waited for what, on a machine with other work too."""
LATE_S = 0.2
"""And where a save need only be under way."""


@pytest.fixture(scope="module")
def waited(shared_runs) -> Path:
    """The same run, its steps waiting for each save."""
    return shared_runs.done("waited", *ASKED, "save.async_save=false")


@pytest.fixture(params=[LATE_S])
def slow_disk(request: pytest.FixtureRequest, monkeypatch) -> None:
    """A disk that takes longer than a step, by so many seconds a file."""
    plain = snapshot.save_state

    def slow(state, path, **named):
        time.sleep(request.param if "weights" in path.name else 0)
        plain(state, path, **named)

    monkeypatch.setattr(snapshot, "save_state", slow)


def steps_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def checkpoint_bytes(folder: Path, step: int) -> dict[str, bytes]:
    files = (folder / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def ended(runs, name: str, num_ranks: int, *overrides: str) -> Path:
    ranks = runs.fork_ranks(name, num_ranks, *ASKED, *overrides)
    assert [rank.wait() for rank in ranks] == [0] * num_ranks, "\n".join(rank.said for rank in ranks)
    return runs.folder / name


@pytest.mark.parametrize("slow_disk", [SLOW_S], indirect=True)
def test_steps_go_on_while_a_slow_disk_writes_and_no_bit_moves(runs, waited, slow_disk, curve_of, metrics):
    """Steps are faster than the disk: a save waits for the one before it, and what waited is reported."""
    folder = runs.done("run", *ASKED)
    assert curve_of(folder) == curve_of(waited)
    for step in (4, 6, 8):
        assert checkpoint_bytes(folder, step) == checkpoint_bytes(waited, step)
    reported = metrics(folder, "save")
    assert [event["step"] for event in reported] == [2, 4, 6, 8]
    assert all(event["seconds"] > SLOW_S for event in reported)
    assert reported[0]["held_s"] < reported[0]["seconds"], "Steps go on while the disk writes."
    assert reported[0]["waited_s"] < max(event["waited_s"] for event in reported[1:3])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    places = [(line["kind"], line["step"]) for line in lines if line["kind"] in ("step", "save")]
    assert places.index(("save", 2)) > places.index(("step", 3))


@pytest.mark.parametrize("slow_disk", [SLOW_S], indirect=True)
def test_a_run_that_is_asked_to_stop_ends_the_save_first_and_saves_again(
    runs, waited, slow_disk, curve_of, metrics
):
    process = runs.fork("run", *ASKED)
    folder = runs.folder / "run"
    while len(metrics(folder, "step")) < 3:
        time.sleep(0.002)
    process.send(signal.SIGTERM)
    assert process.wait() == EXIT_SAVED, process.said
    assert steps_of(folder)[0] == "step-000002"
    assert len(steps_of(folder)) == 2
    runs.done("run", *ASKED)
    assert curve_of(folder) == curve_of(waited)


def test_a_disk_that_fills_ends_the_run_at_a_later_step(runs, waited, monkeypatch, curve_of, metrics):
    plain = snapshot.save_state

    def full(state, path, **named):
        if "step-000004" in str(path):
            raise OSError(28, os.strerror(28), str(path))
        plain(state, path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "save_state", full)
        failed = runs.run("run", *ASKED)
    folder = runs.folder / "run"
    assert failed.code == LaunchError.exit_code
    assert "the checkpoint of step 4 cannot be written (step-000002 stands)" in failed.err
    assert "Traceback" not in failed.err
    assert steps_of(folder) == ["step-000002"]
    assert [event["step"] for event in metrics(folder, "save")] == [2]
    runs.done("run", *ASKED)
    assert curve_of(folder) == curve_of(waited)


def test_a_read_only_folder_is_reported_as_one_error(runs, monkeypatch):
    """As root may write anywhere, the refusal is made by hand."""
    from memtrain.trainers.checkpoints import checkpoint

    def refuse(*arguments):
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(checkpoint, "_finish", refuse)
    failed = runs.run("run", *ASKED)
    assert failed.code == LaunchError.exit_code
    assert "cannot be written (there is no earlier one): Read-only file system" in failed.err
    assert "choose a writable run_dir" in failed.err


def killed_at_random(runs, name: str, num_ranks: int, moments: random.Random, longest_s: float, *asked: str):
    """Begin or go on, kill one rank after a random time, and let the others end."""
    if num_ranks == 1:
        ranks = [runs.fork(name, *ASKED, *asked)]
    else:
        ranks = runs.fork_ranks(name, num_ranks, *ASKED, *asked)
    time.sleep(moments.uniform(0.0, longest_s))
    victim = ranks[moments.randrange(num_ranks)]
    victim.send(signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def test_kills_at_random_moments_move_no_bit(runs, waited, slow_disk, curve_of):
    moments = random.Random(3)
    for _ in range(3):
        killed_at_random(runs, "run", 1, moments, 2.0)
    folder = runs.done("run", *ASKED)
    assert curve_of(folder) == curve_of(waited)
    assert all(name.startswith("step-") for name in steps_of(folder))


def test_every_rank_writes_its_part_beside_the_steps(runs, curve_of, slow_disk):
    whole = ended(runs, "whole", 2, *FSDP2, "save.async_save=false")
    folder = ended(runs, "run", 2, *FSDP2)
    assert curve_of(folder) == curve_of(whole)
    for step in (4, 6, 8):
        assert checkpoint_bytes(folder, step) == checkpoint_bytes(whole, step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [(), FSDP2, (*FSDP2, "save.layout=full"), ("cluster.context_parallel=2",)], ids=str
)
@pytest.mark.parametrize("seed", range(2))
def test_ranks_killed_at_random_moments_move_no_bit(runs, curve_of, slow_disk, asked, seed: int):
    moments = random.Random(seed)
    whole = ended(runs, "whole", 2, *asked, "save.async_save=false")
    for _ in range(2):
        killed_at_random(runs, "run", 2, moments, 4.0, *asked)
    assert curve_of(ended(runs, "run", 2, *asked)) == curve_of(whole)


def test_a_full_disk_of_one_rank_ends_both(runs, monkeypatch):
    plain = snapshot.save_state

    def full(state, path, **named):
        if os.environ["RANK"] == "1" and "step-000004" in str(path):
            raise OSError(28, os.strerror(28), str(path))
        plain(state, path, **named)

    monkeypatch.setattr(snapshot, "save_state", full)
    ranks = runs.fork_ranks("run", 2, *ASKED, *FSDP2)
    assert [rank.wait() for rank in ranks] == [LaunchError.exit_code] * 2, ranks[0].said
    assert "step-000002 stands" in ranks[0].said
    assert steps_of(runs.folder / "run") == ["step-000002"]


@pytest.mark.slow
def test_a_rollout_that_is_kept_is_copied_too(runs, curve_of, slow_disk):
    """Saved inside of a window of several steps, and killed there."""
    from shared_out import write_online

    write_online(runs, "grpo")
    asked = ("grpo.updates_per_rollout=2", "train.max_steps=8", "save.every_steps=1")
    whole = runs.done("whole", *ASKED, *asked, "save.async_save=false", verb="grpo")
    process = runs._fork(lambda: _main(runs.arguments("run", *ASKED, *asked, verb="grpo")))
    time.sleep(2.0)
    process.send(signal.SIGKILL)
    process.wait()
    assert curve_of(runs.done("run", *ASKED, *asked, verb="grpo")) == curve_of(whole)


def _main(arguments: list[str]) -> int:
    from memtrain.__main__ import main

    return main(arguments)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_copy_is_in_the_plan(runs, metrics, num_ranks: int):
    """Weights and two moments once more, exactly; shared out over the ranks."""
    asked = (*ASKED, "memory.measure_peaks=true")
    folder = runs.done("run", *asked) if num_ranks == 1 else ended(runs, "run", 2, *asked[4:], *FSDP2)
    plan = read_plan(folder / "plan.json")
    steady = next(phase for phase in plan.prediction.phases if phase.phase == "steady step")
    copied = {one.owner: one.num_bytes for one in steady.owners}["checkpoint copy"]
    assert copied == pytest.approx(sum(map(len, checkpoint_bytes(folder, 8).values())) / num_ranks, rel=0.05)
    predicted, measured = peaks(folder, metrics)
    assert measured["saving"] == pytest.approx(predicted["saving"], rel=0.02)
