"""A disk that refuses at any call: one clear error, and what was written before is whole."""

import builtins
import errno
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import parts_of

from memtrain.errors import Fault, MemtrainError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import (
    Save,
    newest_complete,
    remove_checkpoints,
    save_checkpoint,
)
from memtrain.trainers.checkpoints.final_model import is_ours, note_final
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.loop.exit_status import record_exit
from memtrain.trainers.protocols.events import NoteEvent
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter, read_metrics
from memtrain.trainers.run_folder.progress import Progress
from memtrain.trainers.runtime.atomic_files import disk_faults
from memtrain.trainers.runtime.ranks import Ranks

OPERATIONS = {
    os: (
        *("open", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "utime", "ftruncate", "pwrite"),
        *("stat", "lstat", "scandir", "listdir"),
    ),
    fcntl: ("flock",),
    builtins: ("open",),
}
NEEDED = ("open", "fsync", "replace", "mkdir", "pwrite", "ftruncate", "flock", "stat")
"""Without these no run goes on."""
ERRNOS = (errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ETIMEDOUT)


class Disk:
    """Counts the calls of one operation on files of a folder, and refuses one of them."""

    def __init__(self, folder: Path, number: int, at: int | None) -> None:
        self.folder, self.number, self.at, self.count = str(folder), number, at, 0

    def refusing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, **named: Any) -> Any:
            if self._is_ours(words[0] if words else None):
                self.count += 1
                if self.count - 1 == self.at:
                    raise OSError(self.number, os.strerror(self.number), str(self._name(words[0])))
            return plain(*words, **named)

        return call

    def _name(self, word: Any) -> str:
        return os.readlink(f"/proc/self/fd/{word}") if isinstance(word, int) else os.fspath(word)

    def _is_ours(self, word: Any) -> bool:
        try:
            return str(self._name(word)).startswith(self.folder)
        except (OSError, TypeError):
            return False


def a_run(folder: RunFolder, plan: Plan) -> None:
    """Everything that a run does to its folder, without a model."""
    with folder.open_for_run():
        with disk_faults("the plan cannot be written", folder.path):
            plan.write(folder.path)
        with record_exit(folder, Ranks(), TrainState()):
            folder.read_status()
            remove_checkpoints(folder)
            with MetricsWriter(folder.metrics) as metrics, Progress(2, log=folder.log) as progress:
                for step in (1, 2):
                    metrics.write(NoteEvent(step=step, text="x"))
                    progress.print_line("x")
                    metrics.sync()
                    save_checkpoint(Save(folder, parts_of(step), facts_of(plan, step=step), keep=1))
            folder.final.mkdir()
            (folder.final / "weights").write_text("x")
            note_final(folder, facts_of(plan, step=2))
            is_ours(folder)


def calls_of(where: Any, name: str, tmp_path: Path, plan: Plan) -> int:
    """How often a run calls an operation."""
    disk = Disk(tmp_path / "counted", 0, None)
    with pytest.MonkeyPatch.context() as patch:
        patched(patch, where, name, disk)
        a_run(RunFolder(tmp_path / "counted"), plan)
    return disk.count


def patched(patch: pytest.MonkeyPatch, where: Any, name: str, disk: Disk) -> None:
    plain = getattr(where, name)
    patch.setattr(where, name, disk.refusing(plain))
    if where is builtins:
        patch.setattr(io, "open", disk.refusing(plain))


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch):
    """No report, which needs the metrics of a real run."""
    monkeypatch.setattr("memtrain.trainers.run_folder.report.final_status.write_report", lambda *words: None)


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, names in OPERATIONS.items() for name in names]
)
def test_every_call_that_a_disk_refuses_is_one_clear_error(
    tmp_path: Path, where: Any, name: str, make_plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
):
    """Some need not succeed (a lock that is given back): then the run is whole."""
    plan = make_plan()
    count = calls_of(where, name, tmp_path, plan)
    faults: list[Fault] = []
    for at in range(count):
        folder = RunFolder(tmp_path / f"run-{at}")
        disk = Disk(folder.path, ERRNOS[at % len(ERRNOS)], at)
        with pytest.MonkeyPatch.context() as patch:
            patched(patch, where, name, disk)
            try:
                a_run(folder, plan)
            except MemtrainError as error:
                faults += error.faults
        # Whatever it was, what stands can be read, and the next start goes on.
        read_metrics(folder.metrics)
        found = newest_complete(folder)
        assert not found.rejected
        with folder.open_for_run():
            pass
    assert all(fault.where and fault.fix for fault in faults)
    assert faults or name not in NEEDED
    capsys.readouterr()
