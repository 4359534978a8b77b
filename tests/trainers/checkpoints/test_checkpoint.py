"""A checkpoint is complete or not there; whatever goes wrong, the last good one can be used."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from made_checkpoints import assert_usable, kill_at_every_moment, parts_of, save, shorten, steps_of
from sampled import sampled

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints import checkpoint
from memtrain.trainers.checkpoints.checkpoint import Save, best_complete, newest_complete, save_checkpoint
from memtrain.trainers.checkpoints.manifest import facts_of, fault_of
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime import own_trees

MakePlan = Callable[..., Plan]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    return folder


def test_the_newest_is_found_with_its_place_in_the_run(folder: RunFolder, make_plan: MakePlan):
    assert newest_complete(folder).checkpoint is None
    save(folder, make_plan(), 5)
    path = save(folder, make_plan(), 10, loss=1.5)
    assert path.name == "step-000010"
    found = newest_complete(folder)
    assert found.rejected == ()
    assert found.checkpoint is not None
    facts = found.checkpoint.manifest.facts
    assert (facts.step, facts.eval_loss) == (10, 1.5)
    assert facts.recipe["method"] == "sft"
    assert_usable(folder, {10})


def test_only_the_kept_number_stays(folder: RunFolder, make_plan: MakePlan):
    for step in (1, 2, 3, 1_000_000):
        save(folder, make_plan(), step)
    assert steps_of(folder) == [3, 1_000_000]


def test_the_best_one_stays_however_old_it_is(folder: RunFolder, make_plan: MakePlan):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        save(folder, make_plan(), step, keep=1, loss=loss, best=True)
    assert steps_of(folder) == [2, 5]
    best = best_complete(folder).checkpoint
    assert best is not None
    assert best.manifest.facts.step == 2


def test_a_broken_best_one_gives_way_to_the_next(folder: RunFolder, make_plan: MakePlan):
    for step, loss in ((1, 3.0), (2, 1.0)):
        save(folder, make_plan(), step, loss=loss, best=True)
    (folder.checkpoints / "step-000002" / "note.txt").unlink()
    found = best_complete(folder)
    assert found.checkpoint is not None
    assert found.checkpoint.manifest.facts.step == 1
    assert len(found.rejected) == 1


def flip(path: Path) -> None:
    raw = bytearray((path / "optimizer.safetensors").read_bytes())
    raw[-1] ^= 1
    (path / "optimizer.safetensors").write_bytes(raw)


def change_step(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    assert '"step": 10' in text
    (path / "manifest.json").write_text(text.replace('"step": 10', '"step": 11', 1))


BREAKS = {
    "never finished": lambda path: (path / "manifest.json").unlink(),
    "damaged": lambda path: (path / "manifest.json").write_text('{"format": 1'),
    "manifest.json is damaged": change_step,
    "note.txt is missing": lambda path: (path / "note.txt").unlink(),
    "optimizer.safetensors has": shorten,
    "the checksum differs": flip,
}


@pytest.mark.parametrize("said", BREAKS)
def test_a_broken_one_is_passed_over_with_the_reason(folder: RunFolder, make_plan: MakePlan, said: str):
    for step in (5, 10):
        save(folder, make_plan(), step)
    BREAKS[said](folder.checkpoints / "step-000010")
    found = newest_complete(folder)
    assert [one.path.name for one in found.rejected] == ["step-000010"]
    assert said in found.rejected[0].reason
    assert_usable(folder, {5})


def test_a_broken_later_one_never_displaces_the_one_just_saved(folder: RunFolder, make_plan: MakePlan):
    save(folder, make_plan(), 10)
    shorten(folder.checkpoints / "step-000010")
    save(folder, make_plan(), 7, keep=1)
    assert steps_of(folder) == [7]


def test_a_sound_one_of_the_same_step_is_not_written_again(folder: RunFolder, make_plan: MakePlan):
    path = save(folder, make_plan(), 5)
    before = (path / "note.txt").stat().st_ino
    save(folder, make_plan(), 5)
    assert (path / "note.txt").stat().st_ino == before
    shorten(path)
    save(folder, make_plan(), 5)
    assert (path / "note.txt").stat().st_ino != before
    assert fault_of(path) == ""


@pytest.mark.parametrize("already_there", sampled([True, False]))
def test_a_kill_at_any_moment_leaves_a_usable_one(tmp_path: Path, make_plan: MakePlan, already_there: bool):
    plan = make_plan()
    kill_at_every_moment(
        tmp_path, plan, lambda folder: save(folder, plan, 10, keep=1), already_there=already_there
    )


@pytest.mark.parametrize("limit_bytes", [0, 1, 100, 300, 600, 1000, 3000])
def test_a_full_disk_leaves_the_last_one_and_says_so(
    folder: RunFolder, make_plan: MakePlan, limit_bytes: int
):
    save(folder, make_plan(), 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(LaunchError, match="checkpoint of step 10 cannot be written") as caught:
            save(folder, make_plan(), 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-000005 stands" in caught.value.text()
    assert steps_of(folder) == [5]
    assert not list(folder.checkpoints.glob(".*"))
    save(folder, make_plan(), 10)
    assert_usable(folder, {10})


def test_no_space_left_tells_how_much_is_free(folder: RunFolder, make_plan: MakePlan):
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    facts = facts_of(make_plan(), step=1)
    with pytest.raises(LaunchError, match=r"No space left on device \([0-9.]+ GiB free\)"):
        save_checkpoint(Save(folder, {"model": full}, facts, keep=1))


def test_nothing_in_a_checkpoint_is_a_pickle(folder: RunFolder, make_plan: MakePlan):
    path = save(folder, make_plan(), 5)
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert names == {
        "manifest.json",
        "model/config.json",
        "note.txt",
        "optimizer.json",
        "optimizer.safetensors",
    }


def test_a_checkpoint_that_may_not_be_removed_stays_whole_and_the_run_goes_on(
    folder: RunFolder, make_plan: MakePlan, monkeypatch
):
    """Somebody has made it immutable, to keep it."""
    save(folder, make_plan(), 1)
    plain = own_trees.shutil.rmtree

    def rmtree(path: Path, **named: object) -> None:
        if "step-000001" in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        plain(path, **named)

    monkeypatch.setattr(own_trees.shutil, "rmtree", rmtree)
    made = Save(folder, parts_of(2), facts_of(make_plan(), step=2), keep=1)
    save_checkpoint(made)
    assert made.left == ["step-000001 is no longer kept and cannot be removed: Operation not permitted"]
    assert steps_of(folder) == [1, 2]
    assert fault_of(folder.checkpoints / "step-000001") == ""
    with pytest.raises(LaunchError, match="the checkpoints of the earlier run cannot be removed"):
        checkpoint.remove_checkpoints(folder)
    assert 1 in steps_of(folder)


def test_what_a_kill_left_and_may_not_be_removed_is_reported(folder: RunFolder, monkeypatch):
    (folder.checkpoints / ".gone-step-000001").mkdir()

    def rmtree(path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(own_trees.shutil, "rmtree", rmtree)
    with pytest.raises(
        LaunchError, match="leftovers of killed processes among the checkpoints cannot be removed"
    ):
        checkpoint.mend_checkpoints(folder)


def test_a_folder_of_somebody_in_the_place_of_a_checkpoint_is_set_aside(
    folder: RunFolder, make_plan: MakePlan, tmp_path: Path
):
    """Without a manifest, and a link: neither is emptied, by a save of the same step or by pruning."""
    for number, name in ((2, "step-000002"), (9, "step-000009"), (3, "elsewhere")):
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "x").write_text(str(number))
    (folder.checkpoints / "step-000004").symlink_to(folder.checkpoints / "elsewhere")
    left: list[str] = []
    for step in (2, 4):
        made = Save(folder, parts_of(step), facts_of(make_plan(), step=step), keep=1, left=left)
        save_checkpoint(made)
    kept = folder.checkpoints / "step-000002-before-1"
    assert (kept / "x").read_text() == "2"
    assert (folder.checkpoints / "step-000004-before-1").is_symlink()
    assert (folder.checkpoints / "elsewhere" / "x").read_text() == "3"
    assert (folder.checkpoints / "step-000009" / "x").read_text() == "9"
    assert steps_of(folder) == [4, 9]
    assert any("step-000009 is no longer kept and cannot be removed: it holds what" in text for text in left)
    with pytest.raises(LaunchError, match="it holds what memtrain did not write"):
        checkpoint.remove_checkpoints(folder)
    assert (folder.checkpoints / "step-000009" / "x").read_text() == "9"
