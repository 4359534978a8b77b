"""The real launcher: `accelerate launch` started, stopped and explained when it fails. Ten seconds each."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

TWO = ("cluster.processes=2",)
LONG = ("train.max_steps=60", "save.every_steps=20", *TWO)


def begin(runs, name: str, *overrides: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "memtrain", *runs.arguments(name, *overrides)]
    # A pipe would stay open as long as an orphan lives.
    log = runs.folder / name
    with open(f"{log}.out", "w") as out, open(f"{log}.err", "w") as err:
        return subprocess.Popen(words, stdout=out, stderr=err, text=True)


def ended(runs, name: str, process: subprocess.Popen[str]) -> str:
    """What the process said on stderr, when it has ended."""
    process.wait(120)
    return (runs.folder / f"{name}.err").read_text()


def wait_for_step(metrics, folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    while len(metrics(folder, "step")) < step:
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.01)


def test_two_launched_processes_have_the_losses_of_one(runs, curve_of):
    process = begin(runs, "two", *TWO)
    said = ended(runs, "two", process)
    assert process.returncode == 0, said
    found, expected = curve_of(runs.folder / "two"), curve_of(runs.done("one"))
    assert [(step, *rest) for step, _, _, *rest in found] == [(step, *rest) for step, _, _, *rest in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[1:3] == pytest.approx(other[1:3], rel=1e-5)


def test_what_ends_the_ranks_is_told_once_with_its_exit_code(runs):
    process = begin(runs, "run", "optim.lr=1e38", "optim.max_grad_norm=null", *TWO)
    said = ended(runs, "run", process)
    assert process.returncode == 1
    assert said.count("the loss is nan") == 1
    assert said.startswith("error: the loss is nan")
    assert "Traceback" not in said
    assert "ChildFailedError" not in said


def test_a_launcher_that_is_asked_to_stop_saves_and_the_same_command_goes_on(runs, metrics, curve_of):
    process = begin(runs, "run", *LONG)
    wait_for_step(metrics, runs.folder / "run", 2)
    process.send_signal(signal.SIGTERM)
    said = ended(runs, "run", process)
    assert process.returncode == 75, said
    assert said.startswith("error: stopped after step ")
    assert json.loads((runs.folder / "run" / "status.json").read_text())["state"] == "saved"
    again = begin(runs, "run", *LONG)
    assert again.wait(120) == 0
    ranks = runs.fork_ranks("whole", 2, *LONG)
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert curve_of(runs.folder / "run") == curve_of(runs.folder / "whole")


def test_ranks_that_lost_their_launcher_keep_the_folder(runs, metrics):
    """A second run must not write beside them."""
    process = begin(runs, "run", "train.max_steps=2000", *TWO)
    wait_for_step(metrics, runs.folder / "run", 2)
    owner = json.loads((runs.folder / "run" / ".lock").read_text())["pid"]
    family = psutil.Process(process.pid).children(recursive=True)
    assert owner in [one.pid for one in family]
    process.kill()
    process.wait()
    second = runs.run("run", "train.max_steps=2000", *TWO)
    assert second.code == 5
    assert f"kill {owner}" in second.err
    os.kill(owner, signal.SIGTERM)
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert json.loads((runs.folder / "run" / "status.json").read_text())["state"] == "saved"


def test_a_killed_rank_ends_the_run_in_words(runs, metrics):
    process = begin(runs, "run", *LONG)
    wait_for_step(metrics, runs.folder / "run", 2)
    owner = json.loads((runs.folder / "run" / ".lock").read_text())["pid"]
    ranks = [one for one in psutil.Process(owner).parent().children() if one.pid != owner]
    os.kill(ranks[0].pid, signal.SIGKILL)
    said = ended(runs, "run", process)
    assert process.returncode == 5, said
    assert said.startswith("error: rank 1 ended without a word")
    assert "Traceback" not in said


def test_the_launch_file_of_two_processes_runs_by_hand(runs, curve_of):
    folder = runs.folder / "run"
    assert runs.run("run", *TWO, "--dry-run").code == 0
    script = subprocess.run([folder / "launch.sh"], capture_output=True, text=True, cwd="/", check=False)
    assert script.returncode == 0, script.stderr
    found, expected = curve_of(folder), curve_of(runs.done("one"))
    assert [one[1] for one in found] == pytest.approx([one[1] for one in expected], rel=1e-5)
