"""File systems that answer otherwise than a disk of the machine: no locks, no sync of folders, other numbers
of files, stale handles, a mount of their own. Each answer is one that NFS, SMB or FUSE gives."""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_checkpoints import assert_usable, save, steps_of

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.data.store.cache import kept
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.model.loading.save import save_final
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import read_owner
from memtrain.trainers.runtime.atomic_files import share_one_mode, sync_folder, write_whole

MakePlan = Callable[..., Plan]
OTHER_DISK = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder of another file system."""
    if not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs /dev/shm on a file system of its own")
    with tempfile.TemporaryDirectory(dir=OTHER_DISK) as place:
        yield Path(place)


def refusing(number: int) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_run_folder_still_knows_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    folder = RunFolder(tmp_path)
    with folder.open_for_run() as lock:
        assert read_owner(folder.lock) == lock.owner
    assert not folder.lock.exists()


def test_without_locks_two_that_tokenize_the_same_keep_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second is not waited for: neither takes the other's half-made rows for left ones, or fails."""
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    folder, made = tmp_path / "rows", []

    def other(part: Path) -> None:
        made.append(part)
        (part / "meta").write_text("other")

    def mine(part: Path) -> None:
        assert kept(folder, "meta", other)
        assert part.is_dir()
        (part / "meta").write_text("mine")

    assert not kept(folder, "meta", mine)
    assert (folder / "meta").read_text() == "other"
    assert len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", "rows"]


def test_a_folder_that_cannot_be_synced_keeps_its_names_by_itself(
    tmp_path: Path, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
):
    plain = os.fsync

    def fsync(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        plain(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write_whole(tmp_path / "status.json", "{}")
    folder = RunFolder(tmp_path)
    save(folder, make_plan(), 5)
    assert_usable(folder, {5})
    assert kept(tmp_path / "rows", "meta", lambda part: (part / "meta").write_text("x") and None)
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_files_that_are_numbered_anew_at_each_look_are_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, numbers = os.fstat, iter(range(10**9, 2 * 10**9))

    def fstat(file: int) -> os.stat_result:
        found = plain(file)
        return os.stat_result((found.st_mode, next(numbers), *found[2:]))

    monkeypatch.setattr(os, "fstat", fstat)
    with RunFolder(tmp_path).open_for_run() as lock:
        assert read_owner(tmp_path / ".lock") == lock.owner


def test_a_stale_handle_of_a_lock_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another host removed the file between the opening and the look at it."""
    plain, looks = os.fstat, []

    def fstat(file: int) -> os.stat_result:
        looks.append(file)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return plain(file)

    monkeypatch.setattr(os, "fstat", fstat)
    with RunFolder(tmp_path).open_for_run() as lock:
        assert read_owner(tmp_path / ".lock") == lock.owner
    assert len(looks) > 1


def test_a_run_folder_may_lie_on_another_disk(tmp_path: Path, elsewhere: Path, make_plan: MakePlan):
    """By a link: no rename leaves the disk."""
    (tmp_path / "run").symlink_to(elsewhere)
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir()
    for step in (1, 2, 3):
        save(folder, make_plan(), step)
    assert steps_of(folder) == [2, 3]
    assert_usable(folder, {3})
    found = sorted(path.name for path in (elsewhere / "checkpoints").iterdir())
    assert found == ["step-000002", "step-000003"]


def test_a_final_model_is_not_written_through_a_link(
    tmp_path: Path, elsewhere: Path, tiny_model: Callable[..., Any]
):
    """What lies behind it stays, and the link is set aside."""
    (elsewhere / "final").mkdir()
    (elsewhere / "final" / "old").touch()
    (tmp_path / "final").symlink_to(elsewhere / "final")
    aside = save_final(tiny_model(), load_tokenizer("builtin:tiny"), tmp_path / "final")
    assert aside == tmp_path / "final-before-1"
    assert aside.is_symlink()
    assert (tmp_path / "final" / "model.safetensors").stat().st_size > 0
    assert [path.name for path in (elsewhere / "final").iterdir()] == ["old"]


def test_a_mount_that_gives_all_files_one_mode_is_not_asked_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(Path, "chmod", refusing(errno.EPERM))
    share_one_mode(tmp_path)
    (tmp_path / "model.safetensors").stat()
    monkeypatch.undo()
    (tmp_path / "model.safetensors").chmod(0o600)
    share_one_mode(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 != 0o600
