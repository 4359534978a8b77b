"""Who holds a run folder: known by boot and ticks, handed to ranks, given back, never held by the dead."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import LaunchError
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import Owner, read_owner, this_process, ticks_of


@pytest.fixture
def other():
    """Another living process."""
    with subprocess.Popen(["sleep", "100"]) as process:
        ticks = ticks_of(process.pid)
        assert ticks is not None
        yield this_process().model_copy(update={"pid": process.pid, "ticks": ticks})
        process.kill()


@pytest.fixture
def dead() -> Owner:
    """A process that has ended."""
    code = (
        "from memtrain.trainers.run_folder.lock import this_process; print(this_process().model_dump_json())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Owner.model_validate_json(done.stdout)


def write(folder: RunFolder, owner: Owner) -> None:
    folder.path.mkdir(exist_ok=True)
    folder.lock.write_text(owner.model_dump_json())


@pytest.mark.parametrize("changed", [{"ticks": 17}, {"boot": "an earlier one"}])
def test_a_number_given_to_another_process_is_not_the_owner(tmp_path: Path, other: Owner, changed: dict):
    folder = RunFolder(tmp_path)
    write(folder, other.model_copy(update=changed))
    with folder.open_for_run() as lock:
        assert lock.owner.pid == os.getpid()
    assert not folder.lock.exists()


def test_a_step_of_the_clock_kills_nobody(tmp_path: Path, other: Owner, monkeypatch):
    """psutil counts a process's start from the clock's present idea of when the machine started."""
    import psutil
    import psutil._pslinux as linux

    folder = RunFolder(tmp_path)
    write(folder, other)
    started = psutil.Process(other.pid).create_time()
    booted = linux.boot_time()
    monkeypatch.setattr(linux, "boot_time", lambda: booted + 3600)
    assert psutil.Process(other.pid).create_time() > started + 3000
    with pytest.raises(LaunchError, match=f"process {other.pid} on"):
        folder.open_for_run()


def test_a_process_that_has_ended_and_was_not_waited_for_holds_nothing(tmp_path: Path):
    pid = os.fork()
    if not pid:
        RunFolder(tmp_path).open_for_run()
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    owner = read_owner(tmp_path / ".lock")
    assert owner is not None
    assert not owner.is_alive()
    with RunFolder(tmp_path).open_for_run():
        os.waitpid(pid, 0)


def test_a_rank_holds_the_folder_with_its_launcher_and_gives_it_back(tmp_path: Path, other: Owner):
    folder = RunFolder(tmp_path)
    write(folder, other)
    with folder.join_for_run(other) as lock:
        assert read_owner(folder.lock) == lock.owner
        assert lock.owner.launcher == other
        with pytest.raises(LaunchError, match=f"process {os.getpid()} on"):
            folder.open_for_run()
    assert read_owner(folder.lock) == other


def test_a_rank_whose_launcher_is_gone_still_holds_the_folder(tmp_path: Path, dead: Owner):
    folder = RunFolder(tmp_path)
    write(folder, dead)
    with folder.join_for_run(dead), pytest.raises(LaunchError, match=f"kill {os.getpid()}"):
        folder.open_for_run()
    assert not folder.lock.exists()


def test_a_launcher_holds_the_folder_of_a_rank_that_was_killed(tmp_path: Path, other: Owner, dead: Owner):
    folder = RunFolder(tmp_path)
    write(folder, dead.model_copy(update={"launcher": other}))
    with pytest.raises(LaunchError, match=f"kill {other.pid}"):
        folder.open_for_run()
    mine = folder.path / "mine"
    with RunFolder(mine).open_for_run() as lock:
        (mine / ".lock").write_text(dead.model_copy(update={"launcher": lock.owner}).model_dump_json())
    assert not mine.exists()


def test_a_launcher_leaves_the_lock_of_a_rank_that_lives(tmp_path: Path, other: Owner):
    folder = RunFolder(tmp_path)
    with folder.open_for_run() as lock:
        rank = other.model_copy(update={"launcher": lock.owner})
        write(folder, rank)
    assert read_owner(folder.lock) == rank


def test_a_rank_whose_launcher_lost_the_folder_is_refused(tmp_path: Path, other: Owner, dead: Owner):
    """Another start has taken it over between the launcher's death and the rank's first look."""
    folder = RunFolder(tmp_path)
    write(folder, other)
    with pytest.raises(LaunchError, match=f"process {dead.pid}, which started this one, no longer holds"):
        folder.join_for_run(dead)
    assert read_owner(folder.lock) == other
    folder.lock.unlink()
    with pytest.raises(LaunchError, match="no longer holds"):
        folder.join_for_run(dead)
    assert not folder.lock.exists()


def test_a_folder_that_stayed_empty_goes_again_and_others_stay(tmp_path: Path):
    folder = RunFolder(tmp_path / "runs" / "a")
    with folder.open_for_run():
        assert folder.checkpoints.is_dir()
    assert list(tmp_path.iterdir()) == []
    with folder.open_for_run():
        folder.plan.write_text("{}")
    assert folder.plan.exists()
    with folder.open_for_run():
        pass
    assert sorted(path.name for path in folder.path.iterdir()) == ["plan.json"]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EEXIST])
def test_a_folder_that_its_last_owner_removes_meanwhile_is_made_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, failures = Path.mkdir, [OSError(number, os.strerror(number))] * 3

    def mkdir(path: Path, *words: Any, **named: Any) -> None:
        if path.name == "checkpoints" and failures:
            raise failures.pop()
        plain(path, *words, **named)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with RunFolder(tmp_path / "run").open_for_run():
        assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not failures


def test_two_that_begin_at_once_are_one(tmp_path: Path):
    """Four processes want a new folder again and again: never two have it, and none fails."""
    code = (
        "import sys, os; from pathlib import Path; from memtrain.trainers.run_folder.folder import RunFolder;"
        "from memtrain.errors import LaunchError\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        with RunFolder(Path(sys.argv[1]) / 'run').open_for_run():\n"
        "            os.close(os.open(Path(sys.argv[1]) / 'held', os.O_CREAT | os.O_EXCL))\n"
        "            os.unlink(Path(sys.argv[1]) / 'held')\n"
        "    except LaunchError as error:\n"
        "        assert 'is running in' in str(error), error\n"
    )
    begun = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(4)]
    assert [process.wait() for process in begun] == [0] * 4
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
