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


def begin(runs, name: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "memtrain", *runs.arguments(name, *overrides)]
    # A pipe would stay open as long as an orphan lives.
    log = runs.folder / name
    with open(f"{log}.out", "w") as out, open(f"{log}.err", "w") as err:
        return subprocess.Popen(words, stdout=out, stderr=err, text=True, env=os.environ | environment)


def ended(runs, name: str, process: subprocess.Popen[str]) -> str:
    """What the process said on stderr, when it has ended."""
    process.wait(400)
    return (runs.folder / f"{name}.err").read_text()


def wait_for_step(metrics, folder: Path, step: int) -> None:
    until = time.monotonic() + 400
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


def test_what_ends_the_ranks_is_reported_once_with_its_exit_code(runs):
    process = begin(runs, "run", "optim.lr=1e38", "optim.max_grad_norm=null", *TWO)
    said = ended(runs, "run", process)
    assert process.returncode == 8
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
    assert again.wait(400) == 0
    ranks = runs.fork_ranks("whole", 2, *LONG)
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert curve_of(runs.folder / "run") == curve_of(runs.folder / "whole")


def test_ranks_that_lost_their_launcher_save_and_stop_and_say_so(runs, metrics, curve_of):
    """Until then a second run must not write beside them."""
    process = begin(runs, "run", *LONG)
    folder = runs.folder / "run"
    wait_for_step(metrics, folder, 2)
    owner = json.loads((folder / ".lock").read_text())
    assert owner["launcher"]["pid"] == process.pid
    family = psutil.Process(process.pid).children(recursive=True)
    assert owner["pid"] in [one.pid for one in family]
    process.send_signal(signal.SIGSTOP)
    second = runs.run("run", *LONG)
    assert second.code == 5
    assert f"kill {owner['pid']}" in second.err
    process.kill()
    process.wait()
    gone, alive = psutil.wait_procs(family, timeout=300)
    assert not alive
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["step"]) == ("saved", metrics(folder, "step")[-1]["step"])
    assert status["step"] < 60
    assert "the launcher of this run is gone" in (folder / "log.txt").read_text()
    assert not (folder / ".lock").exists()


def test_ranks_whose_agent_was_killed_save_and_stop(runs, metrics):
    process = begin(runs, "run", *LONG)
    folder = runs.folder / "run"
    wait_for_step(metrics, folder, 2)
    (agent,) = psutil.Process(process.pid).children()
    ranks = agent.children()
    agent.kill()
    said = ended(runs, "run", process)
    assert process.returncode == 75, said
    assert "stopped after step " in said
    assert not psutil.wait_procs(ranks, timeout=1)[1]
    assert json.loads((folder / "status.json").read_text())["state"] == "saved"
    assert not (folder / ".lock").exists()


def test_bytes_that_are_no_text_and_a_flood_hang_nobody(runs, tmp_path):
    """A rank that writes a megabyte of 0xff to stderr: more than a pipe holds."""
    loud = tmp_path / "sitecustomize.py"
    loud.write_text(
        "import os\nif 'RANK' in os.environ:\n    os.write(2, b'\\xff' * 2**20 + b'\\nthe end\\n')\n"
    )
    process = begin(runs, "run", *TWO, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    said = ended(runs, "run", process)
    assert process.returncode == 0, said[-2000:]
    assert said.count("the end") == 2


def test_a_rank_that_hangs_is_killed_when_the_grace_is_over(runs, metrics):
    """A stopped process stands for one whose disk or device answers no more: the other waits in a sum."""
    process = begin(runs, "run", *LONG, "cluster.stop_grace_s=6")
    folder = runs.folder / "run"
    wait_for_step(metrics, folder, 2)
    owner = json.loads((folder / ".lock").read_text())["pid"]
    ranks = psutil.Process(owner).parent().children()
    (other,) = [one for one in ranks if one.pid != owner]
    other.suspend()
    process.send_signal(signal.SIGTERM)
    said = ended(runs, "run", process)
    assert process.returncode == 5, said
    assert "the run was asked to stop and made no progress for 6 s: it was killed" in said
    assert "rank 0 is in " in said
    assert not psutil.wait_procs(ranks, timeout=5)[1]
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    again = begin(runs, "run", *LONG)
    assert again.wait(400) == 0


def test_a_second_interrupt_ends_even_ranks_that_hang(runs, metrics):
    process = begin(runs, "run", *LONG)
    folder = runs.folder / "run"
    wait_for_step(metrics, folder, 2)
    owner = json.loads((folder / ".lock").read_text())["pid"]
    ranks = psutil.Process(owner).parent().children()
    ranks[0].suspend()
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said = ended(runs, "run", process)
    assert process.returncode == 130, said
    assert not psutil.wait_procs(ranks, timeout=5)[1]


def test_a_killed_rank_ends_the_run_in_words(runs, metrics):
    process = begin(runs, "run", *LONG)
    wait_for_step(metrics, runs.folder / "run", 2)
    owner = json.loads((runs.folder / "run" / ".lock").read_text())["pid"]
    ranks = [one for one in psutil.Process(owner).parent().children() if one.pid != owner]
    os.kill(ranks[0].pid, signal.SIGKILL)
    said = ended(runs, "run", process)
    assert process.returncode == 5, said
    assert said.startswith("error: rank 1 ended without an error message")
    assert "Traceback" not in said


def test_the_launch_file_of_two_processes_runs_by_hand(runs, curve_of):
    folder = runs.folder / "run"
    assert runs.run("run", *TWO, "--dry-run").code == 0
    script = subprocess.run([folder / "launch.sh"], capture_output=True, text=True, cwd="/", check=False)
    assert script.returncode == 0, script.stderr
    found, expected = curve_of(folder), curve_of(runs.done("one"))
    assert [one[1] for one in found] == pytest.approx([one[1] for one in expected], rel=1e-5)
