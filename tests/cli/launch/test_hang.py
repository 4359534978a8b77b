"""Ranks without a sign of life: reported, ended once they were asked to stop, with or without a launcher."""

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from memtrain.cli.launch import hang, slurm_watch
from memtrain.cli.launch.hang import HangWatch, watching_itself
from memtrain.cli.launch.slurm_exit import verdict
from memtrain.errors import LaunchError
from memtrain.trainers.loop.slurm_entry import ASKED_FILE, STEP_FILE
from memtrain.trainers.run_folder import pulse
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.pulse import pulse_file


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.faults.mkdir(parents=True)
    (made.path / "slurm").mkdir()
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(folder: RunFolder, clock: Clock) -> HangWatch:
    return HangWatch(folder, 2, 60.0, clock=clock)


def beat(folder: RunFolder, rank: int, count: int, place: str = "loop.py:7 (train)") -> None:
    pulse_file(folder, rank).write_text(f"{count} {place}\n")


def test_silence_is_reported_once_with_the_line_of_every_rank(
    folder: RunFolder, watch: HangWatch, clock: Clock, capsys: pytest.CaptureFixture[str]
):
    beat(folder, 0, 1)
    for passed_s in (0, 599, 2, 100):
        clock.now += passed_s
        assert not watch.is_hung(is_asked=False)
    assert capsys.readouterr().err == (
        "no rank has made progress for 601 s: rank 0 is in loop.py:7 (train); rank 1 is in its imports\n"
    )
    beat(folder, 1, 1)
    assert not watch.is_hung(is_asked=False)
    clock.now += 601
    assert not watch.is_hung(is_asked=False)
    assert "rank 1 is in loop.py:7" in capsys.readouterr().err


def test_ranks_that_were_asked_hang_when_none_moves_for_the_grace(
    folder: RunFolder, watch: HangWatch, clock: Clock
):
    """One that moves, be it the only one, is waited for: it saves."""
    assert not watch.is_hung(is_asked=True)
    for count in range(1, 4):
        clock.now += 59
        beat(folder, 0, count, "checkpoint.py:120 (finish)")
        assert not watch.is_hung(is_asked=True)
    clock.now += 61
    assert watch.is_hung(is_asked=True)
    assert watch.hung is not None
    assert "made no progress for 60 s: it was killed. rank 0 is in checkpoint.py:120 (finish)" in str(
        watch.hung.faults[0].what
    )


def test_ranks_of_a_slurm_job_are_ended_and_the_verdict_says_where_they_hung(
    folder: RunFolder, watch: HangWatch, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """They are asked by the batch script, which says so by a file; after the kill srun's code is 137."""
    folder.write_status(RunState.RUNNING, 3)
    beat(folder, 0, 1)
    looks: list[float] = []

    def pass_time(seconds: float) -> None:
        looks.append(clock.now)
        clock.now += 30
        if len(looks) == 4:
            (folder.path / ASKED_FILE).touch()

    monkeypatch.setattr(slurm_watch.time, "sleep", pass_time)
    killed: list[float] = []
    slurm_watch.watch_ranks(watch, folder, lambda: len(looks) < 50, lambda: killed.append(clock.now))
    assert killed == [looks[3] + 30 + 90]
    text, code = verdict(folder, 2, 137)
    assert code == LaunchError.exit_code
    assert text.startswith("error: the run was asked to stop and made no progress for 60 s: it was killed.")
    assert "rank 0 is in loop.py:7 (train); rank 1 is in its imports" in text
    assert json.loads(folder.status.read_text())["state"] == "failed"


def test_the_watch_of_a_job_ends_with_srun(folder: RunFolder, watch: HangWatch):
    slurm_watch.watch_ranks(watch, folder, lambda: False, pytest.fail)


@pytest.mark.parametrize(("code", "ends_srun"), [(0, False), (1, True)])
def test_a_step_is_killed_by_slurm_and_srun_where_slurm_refuses(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ends_srun: bool
):
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\nexit {code}\n')
    scancel.chmod(scancel.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(slurm_watch.os, "kill", lambda pid, number: killed.append((pid, number)))
    (folder.path / STEP_FILE).write_text("77.0\n")
    slurm_watch.kill_step(folder, 4321)
    assert (tmp_path / "said").read_text() == "--signal=KILL 77.0\n"
    assert killed == ([(4321, signal.SIGKILL)] if ends_srun else [])


def forked(act: Callable[[], None]) -> int:
    """A fork that does something."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(99)
    return child


def test_a_run_of_one_process_ends_within_the_grace_though_its_main_thread_hangs(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """A read that never ends, begun again after each signal: no handler of Python's ever gets to stop it."""
    monkeypatch.setattr(hang, "LOOK_S", 0.05)
    monkeypatch.setattr(pulse, "EVERY_S", 0.05)
    folder.write_status(RunState.RUNNING, 3)
    waits, _never = os.pipe()
    says, tells = os.pipe()

    def run() -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        with watching_itself(folder, 0.3):
            os.write(tells, b"x")
            os.read(waits, 1)

    child = forked(run)
    os.read(says, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == LaunchError.exit_code
    assert "asked to stop and made no progress for 0 s" in capfd.readouterr().err
    assert json.loads(folder.status.read_text())["state"] == "failed"


def test_a_run_of_one_process_that_ends_leaves_no_sign_and_no_thread(folder: RunFolder):
    before = signal.set_wakeup_fd(-1)
    with watching_itself(folder, 60.0):
        pass
    assert not folder.faults.exists()
    assert signal.set_wakeup_fd(before) == before
