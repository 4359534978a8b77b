"""The run folder belongs to one process at a time, and says how the run stands."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.errors import LaunchError
from memtrain.trainers.run_folder import folder as folder_module
from memtrain.trainers.run_folder import lock
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.lock import read_owner


def test_a_new_folder_is_made_with_all_above_it(tmp_path: Path):
    folder = RunFolder(tmp_path / "a" / "b")
    with folder.open_for_run():
        assert folder.checkpoints.is_dir()
        owner = read_owner(folder.lock)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert not folder.lock.exists()


def test_a_living_owner_is_named(tmp_path: Path):
    folder = RunFolder(tmp_path)
    with folder.open_for_run(), pytest.raises(LaunchError, match=f"process {os.getpid()} on"):
        folder.open_for_run()


def test_a_killed_owner_is_taken_over(tmp_path: Path):
    code = (
        "import sys, os; from pathlib import Path; from memtrain.trainers.run_folder.folder import RunFolder;"
        "RunFolder(Path(sys.argv[1])).open_for_run(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    folder = RunFolder(tmp_path)
    left = read_owner(folder.lock)
    assert left is not None
    with folder.open_for_run() as lock:
        assert lock.owner.pid == os.getpid() != left.pid


def test_a_lock_of_another_host_is_free_at_once_where_its_job_was_queued_again(
    tmp_path: Path, monkeypatch, capsys
):
    folder = RunFolder(tmp_path)
    away = folder.open_for_run().owner.model_copy(update={"host": "elsewhere", "job": "17"})
    folder.lock.write_text(away.model_dump_json())
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    folder.open_for_run().close()
    assert "waiting" not in capsys.readouterr().err


def test_an_unfinished_lock_file_is_taken_over(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.lock.write_text('{"pid": 1')
    folder.open_for_run()


def test_a_lock_that_was_taken_over_is_not_removed_by_its_old_owner(tmp_path: Path):
    folder = RunFolder(tmp_path)
    lock = folder.open_for_run()
    other = lock.owner.model_copy(update={"pid": lock.owner.pid + 1})
    folder.lock.write_text(other.model_dump_json())
    lock.close()
    assert read_owner(folder.lock) == other


@pytest.mark.parametrize("name", ["taken", "taken/run"])
def test_a_file_in_the_way_is_said(tmp_path: Path, name: str):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(LaunchError, match="is a file|Not a directory"):
        RunFolder(tmp_path / name).open_for_run()
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EROFS, "read-only"), (errno.EACCES, "permissions"), (errno.ENOSPC, "free some")],
)
def test_a_disk_that_refuses_is_explained(tmp_path: Path, monkeypatch, number: int, said: str):
    def refuse(file: int) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(lock.os, "fsync", refuse)
    with pytest.raises(LaunchError, match=said) as caught:
        RunFolder(tmp_path).open_for_run()
    assert os.strerror(number) in caught.value.text()


@pytest.mark.parametrize(
    "name", ["status.json", "metrics.jsonl", "plan.json", "log.txt", "report.html", ".lock"]
)
def test_a_folder_in_the_place_of_a_file_is_said(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    with pytest.raises(LaunchError, match=f"{name} is a folder"):
        RunFolder(tmp_path).open_for_run()


@pytest.mark.parametrize("name", ["checkpoints", "final"])
def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path, name: str):
    (tmp_path / name).write_text("")
    with pytest.raises(LaunchError, match=f"{name} is a file"):
        RunFolder(tmp_path).open_for_run()


@pytest.mark.parametrize("text", ["", "\udce9 not even text", '{"state": "on holiday"}', "[1, 2"])
def test_a_status_in_no_words_of_ours_is_none(tmp_path: Path, text: str):
    folder = RunFolder(tmp_path)
    folder.status.write_text(text, errors="surrogateescape")
    assert folder.read_status() is None


def test_status_is_replaced_whole(tmp_path: Path):
    folder = RunFolder(tmp_path)
    assert folder.read_status() is None
    folder.write_status(RunState.RUNNING, 3)
    folder.write_status(RunState.OUT_OF_MEMORY, 4, "3.1 GiB asked, 2.0 GiB free")
    status = folder.read_status()
    assert status is not None
    assert (status.state, status.step) == (RunState.OUT_OF_MEMORY, 4)
    assert json.loads(folder.status.read_text())["state"] == "out of memory"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_what_the_command_line_shows_loads_no_torch():
    """All of this room but what training tells its events by; and what signals do."""
    room = Path(folder_module.__file__).parent
    names = [str(path.relative_to(room).with_suffix("")).replace("/", ".") for path in room.rglob("*.py")]
    modules = [name for name in names if name.split(".")[-1] not in ("__init__", "event_sinks", "trackers")]
    assert {"folder", "lock", "pulse", "metrics", "report.model_card"} <= set(modules)
    code = f"import sys; {'; '.join(f'import memtrain.trainers.run_folder.{name}' for name in modules)}; "
    code += "import memtrain.trainers.runtime.signals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
