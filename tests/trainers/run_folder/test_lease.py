"""The lease of a run folder: between containers and hosts, with clocks that differ, and never two writers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import LaunchError
from memtrain.trainers.protocols.events import NoteEvent
from memtrain.trainers.run_folder import lock
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.lock import Owner, check_held, is_lost, read_owner, this_process
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.report.final_status import record_end

FAST = "lock.RENEW_S, lock.LEASE_S, lock.WATCH_S, lock.POLL_S = 0.1, 2.0, 0.6, 0.05"
HOLD = f"""
import sys, time; from pathlib import Path
from memtrain.errors import LaunchError
from memtrain.trainers.run_folder import lock
from memtrain.trainers.run_folder.folder import RunFolder
{FAST}
try:
    with RunFolder(Path(sys.argv[1])).open_for_run():
        print("has it", flush=True)
        time.sleep(float(sys.argv[2]))
except LaunchError as error:
    print(error.text(), flush=True)
"""
CONTAINER = ("unshare", "-r", "-p", "-f", "--kill-child")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RENEW_S": 0.1, "LEASE_S": 2.0, "WATCH_S": 0.6, "POLL_S": 0.05}.items():
        monkeypatch.setattr(lock, name, value)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def may_unshare(*words: str) -> bool:
    try:
        done = subprocess.run([*CONTAINER, *words, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def away(folder: RunFolder, **changed: Any) -> Owner:
    """A lock of a process that is not seen from here, silent from now on."""
    owner = this_process().model_copy(update={"pid": 1, "space": "1"} | changed)
    folder.path.mkdir(exist_ok=True)
    folder.lock.write_text(owner.model_dump_json())
    return owner


@pytest.mark.parametrize("words", [("--mount-proc",), ()])
def test_two_containers_of_one_host_share_a_folder_in_turn(folder: RunFolder, words: tuple[str, ...]):
    """Without --mount-proc the second sees numbers in /proc that are not its own."""
    if not may_unshare(*words):
        pytest.skip("unshare may not make a namespace of processes here")
    command = [*CONTAINER, *words, sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen([*command, "60"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "has it\n"
        second = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
        assert "is running in" in second.stdout
        assert "in another container" in second.stdout
        with pytest.raises(LaunchError, match="in another container"):
            folder.open_for_run()
        first.kill()
    third = subprocess.run([*command, "0"], capture_output=True, text=True, check=True)
    assert third.stdout == "has it\n"
    assert "waiting" in third.stderr
    assert not folder.lock.exists()


@pytest.mark.parametrize("changed", [{"host": "elsewhere"}, {"boot": "another machine of this name"}, {}])
def test_a_silent_holder_that_is_not_seen_is_waited_for_and_taken_over(
    folder: RunFolder, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    owner = away(folder, **changed)
    began = time.monotonic()
    with folder.open_for_run() as held:
        assert read_owner(folder.lock) == held.owner != owner
    assert time.monotonic() - began > 1.0
    assert f"process 1 on {owner.host}, which is not seen from here" in capsys.readouterr().err


@pytest.mark.parametrize("offset_s", [-7200, 7200])
def test_clocks_that_differ_do_not_matter(folder: RunFolder, offset_s: int, monkeypatch: pytest.MonkeyPatch):
    """This host's clock is two hours off: a holder that lives is not taken over, and one that is gone is."""
    plain, plain_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: plain() + offset_s)
    monkeypatch.setattr(time, "time_ns", lambda: plain_ns() + offset_s * 10**9)
    away(folder, host="elsewhere")
    assert 0 <= lock.silent_s(folder.lock) < 60
    with folder.open_for_run():
        pass


def test_a_step_of_the_servers_clock_does_not_end_a_lease(folder: RunFolder):
    """The lock looks hours old, and its holder is seen to live while it is watched."""
    away(folder, host="elsewhere")
    os.utime(folder.lock, (1, 1))
    toucher = subprocess.Popen(["bash", "-c", f"sleep 0.3; touch {folder.lock}"])
    with pytest.raises(LaunchError, match="process 1 on elsewhere is running"):
        folder.open_for_run()
    toucher.wait()
    os.utime(folder.lock, (2**33, 2**33))
    with folder.open_for_run():
        """A time to come, of a clock that was set back: watched for no longer than the lease."""


def test_a_lock_of_an_earlier_version_holds_until_a_person_removes_it(folder: RunFolder):
    away(folder, host="elsewhere", space="", token="")
    with pytest.raises(LaunchError, match="remove .*lock"):
        folder.open_for_run()


def test_a_holder_gives_signs_of_life(folder: RunFolder):
    with folder.open_for_run():
        os.utime(folder.lock, (1, 1))
        until = time.monotonic() + 20
        while folder.lock.stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert folder.lock.stat().st_mtime > 1


def test_a_lock_that_was_removed_by_hand_comes_back(folder: RunFolder):
    with folder.open_for_run() as held:
        folder.lock.unlink()
        held.renew()
        assert read_owner(folder.lock) == held.owner
    assert not folder.lock.exists()


def test_who_lost_the_folder_writes_nothing_more(folder: RunFolder):
    """A process that slept for longer than its lease wakes up beside the next one."""
    held = folder.open_for_run()
    metrics = MetricsWriter(folder.metrics)
    metrics.write(NoteEvent(step=1, text="mine"))
    folder.write_status(RunState.RUNNING, 1)
    theirs = this_process().model_copy(update={"host": "elsewhere", "pid": 7})
    before = folder.metrics.read_text()
    folder.lock.write_text(theirs.model_dump_json())
    held.sure_until_s -= 100
    writes = (
        lambda: metrics.write(NoteEvent(step=2, text="late")),
        lambda: folder.write_status(RunState.DONE, 9),
        lambda: check_held(folder.path),
    )
    for write in writes:
        with pytest.raises(LaunchError, match="process 7 on elsewhere has taken"):
            write()
    record_end(folder, RunState.FAILED, 9, "late")
    assert is_lost(folder.path)
    assert folder.metrics.read_text() == before
    assert json.loads(folder.status.read_text())["step"] == 1
    held.close()
    assert read_owner(folder.lock) == theirs
    assert not is_lost(folder.path)


def test_the_thread_that_renews_notices_too(folder: RunFolder):
    with folder.open_for_run() as held:
        theirs = this_process().model_copy(update={"host": "elsewhere", "pid": 7})
        folder.lock.write_text(theirs.model_dump_json())
        until = time.monotonic() + 20
        while not held.is_taken and time.monotonic() < until:
            time.sleep(0.05)
        with pytest.raises(LaunchError, match="has taken"):
            check_held(folder.path)


def test_a_rank_that_joined_is_no_thief(folder: RunFolder):
    """The launcher and its first rank hold the folder together, and both give signs of life."""
    with folder.open_for_run() as held:
        rank = this_process(held.owner)
        folder.lock.write_text(rank.model_dump_json())
        held.renew()
        held.check()
        assert not held.is_taken
        folder.lock.write_text(held.owner.model_dump_json())
