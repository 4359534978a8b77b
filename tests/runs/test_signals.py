"""A run that is asked to stop, a folder that two runs want, a run that goes on with other keys."""

import json
import signal
import time
from pathlib import Path

from memtrain.errors import ResumeError

SLOW = ("train.max_steps=60", "save.every_steps=7", "memory.measure_peaks=true")


def wait_for_step(metrics, folder: Path, step: int) -> None:
    until = time.monotonic() + 60
    while len(metrics(folder, "step")) < step:
        assert time.monotonic() < until, "no step was made"
        time.sleep(0.005)


def test_a_run_that_is_asked_to_stop_saves_and_the_same_command_goes_on(runs, metrics, curve_of):
    whole = runs.done("whole", *SLOW)
    for asked in (signal.SIGTERM, signal.SIGINT):
        folder = runs.folder / asked.name
        process = runs.fork(asked.name, *SLOW)
        wait_for_step(metrics, folder, 3)
        process.send(asked)
        assert process.wait() == 75, process.said
        step = metrics(folder, "step")[-1]["step"]
        assert 3 <= step < 60
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["step"]) == ("saved", step)
        words = f"stopped after step {step} of 60, and saved"
        assert words in process.said
        assert f"saved: {words}" in (folder / "report.html").read_text()
        assert "run the same command again" in process.said
        assert (folder / "checkpoints" / f"step-{step:06d}").is_dir()
        runs.done(asked.name, *SLOW)
        assert curve_of(folder) == curve_of(whole)
        assert [note["text"] for note in metrics(folder, "note")] == [f"resumed at step {step}"]


def test_a_folder_in_use_is_refused_with_the_process_that_has_it(runs, metrics):
    process = runs.fork("run", *SLOW)
    wait_for_step(metrics, runs.folder / "run", 1)
    second = runs.run("run", *SLOW)
    process.send(signal.SIGTERM)
    assert process.wait() == 75
    assert second.code == 5
    assert f"process {process.pid} on " in second.err
    assert f"kill {process.pid}" in second.err


def test_a_changed_key_is_refused_and_goes_on_where_it_is_named(runs, metrics):
    begun = ("train.max_steps=4", "optim.schedule=constant", "optim.warmup_steps=0", "save.every_steps=2")
    folder = runs.done("run", *begun)
    longer = (*begun, "train.max_steps=6", "optim.lr=1e-3", "train.shuffle=false")
    refused = runs.run("run", *longer)
    assert refused.code == ResumeError.exit_code
    assert "optim.lr was 0.003 up to step 4 and is now 0.001" in refused.err
    assert "save.allow_changed_keys=[optim.lr]" in refused.err
    runs.done("run", *longer, "save.allow_changed_keys=[optim.lr, train.shuffle]")
    notes = [note["text"] for note in metrics(folder, "note")]
    assert "another run from here: optim.lr 0.003 -> 0.001" in notes
    assert "another run from here: train.shuffle True -> False" in notes
    assert [step["lr"] for step in metrics(folder, "step")] == [0.003] * 4 + [0.001] * 2
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
