"""Checkpoints: complete and verified, or not there at all.

A checkpoint is written under a name that is never picked up, synced, and renamed when it is whole. A kill
or a full disk at any byte leaves the ones before it as they were. Names in `checkpoints/`: `step-000123` is
complete; `.tmp-` is being written; `.gone-` is being removed; `.old-` makes way for one of the same step.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from memtrain.errors import LaunchError, MemtrainError
from memtrain.trainers.run.disk import disk_fault, sync_file, sync_folder, write_whole
from memtrain.trainers.run.folder import RunFolder
from memtrain.trainers.run.manifest import (
    MANIFEST_FILE,
    CheckpointFacts,
    FileEntry,
    Manifest,
    fault_of,
    file_entry,
    read_manifest,
)
from memtrain.trainers.run.ranks import Ranks

Parts = Mapping[str, Callable[[Path], None]]
"""What is saved: each writes a file, a folder, or several files whose names begin with the given path."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    def part(self, name: str) -> Path:
        """The path that the part of this name was given."""
        return self.path / name


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """What a search for a checkpoint came to."""

    checkpoint: Checkpoint | None
    rejected: tuple[Rejected, ...]


def step_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step-{step:06d}"


def complete_steps(checkpoints: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, in order; complete by name, not verified."""
    found = {
        int(match[1]): path
        for path in checkpoints.glob("step-*")
        if (match := re.fullmatch(r"step-([0-9]+)", path.name))
    }
    return dict(sorted(found.items()))


def newest_complete(folder: RunFolder) -> Found:
    """The newest checkpoint whose every file is as it was written, and the newer ones that are not."""
    return _first_sound(reversed(list(complete_steps(folder.checkpoints).values())))


def best_complete(folder: RunFolder) -> Found:
    """The sound checkpoint with the lowest held-out loss; of two equal ones the later."""
    losses = _eval_losses(complete_steps(folder.checkpoints))
    return _first_sound(path for _, path in sorted(losses, key=lambda item: item[0]))


def mend_checkpoints(folder: RunFolder) -> None:
    """Remove what a kill left half-written or half-removed, and put back what it left aside."""
    for aside in folder.checkpoints.glob(".old-*"):
        home = folder.checkpoints / aside.name.removeprefix(".old-")
        if home.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(home)
    for kind in (".tmp-*", ".gone-*"):
        for left in folder.checkpoints.glob(kind):
            shutil.rmtree(left)


def remove_checkpoints(folder: RunFolder) -> None:
    """Remove every checkpoint: the run begins anew, and a kill must not go back to its old course."""
    for path in complete_steps(folder.checkpoints).values():
        _remove(path)


def save_checkpoint(
    folder: RunFolder,
    parts: Parts,
    facts: CheckpointFacts,
    *,
    keep: int,
    keep_best: bool = False,
    ranks: Ranks | None = None,
) -> Path:
    """Write the checkpoint of `facts.step`, then remove those no longer kept. Returns the new one's folder.

    Kept are the newest `keep`, and with `keep_best` the one with the lowest held-out loss as well.
    Checkpoints of later steps are of a course that was left (they were broken, or the run began anew) and are
    removed. All ranks call this; each writes its own parts into the one folder, so that names of parts must
    differ between ranks where more than one writes. A sound checkpoint of the same step and facts is not
    written again.

    Raises: LaunchError, on every rank, when the disk refuses; the checkpoints before are then untouched.
    """
    ranks = ranks or Ranks()
    target = folder.checkpoints / step_name(facts.step)
    unfinished = folder.checkpoints / f".tmp-{target.name}"
    entries: list[FileEntry] = []

    def prepare() -> None:
        folder.checkpoints.mkdir(parents=True, exist_ok=True)
        mend_checkpoints(folder)
        unfinished.mkdir()

    def write_parts() -> None:
        for name, write in parts.items():
            write(unfinished / name)

    def hash_share() -> None:
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        for file in files[ranks.rank :: ranks.world]:
            sync_file(file)
            entries.append(file_entry(unfinished, file))

    def finish() -> None:
        files = sorted((entry for share in shares for entry in share), key=lambda entry: entry.name)
        _finish(unfinished, target, Manifest(facts=facts, files=tuple(files)).sealed())
        _prune(folder.checkpoints, facts.step, keep, keep_best)

    if ranks.broadcast(ranks.is_main and _stands(target, facts)):
        return target
    _together(ranks, prepare if ranks.is_main else None, folder, facts.step)
    _together(ranks, write_parts, folder, facts.step)
    _together(ranks, hash_share, folder, facts.step)
    shares = ranks.gather(entries)
    _together(ranks, finish if ranks.is_main else None, folder, facts.step)
    return target


def _together(ranks: Ranks, act: Callable[[], None] | None, folder: RunFolder, step: int) -> None:
    """Do one act of a save; when it fails on one rank, it fails on all of them with the same error."""
    fault: MemtrainError | None = None
    try:
        if act is not None:
            act()
    except OSError as error:
        fault = _save_fault(error, folder, step)
    except SafetensorError as error:
        fault = _save_fault(OSError(str(error)), folder, step)
    faults = [one for one in ranks.gather(None if fault is None else fault.faults) if one is not None]
    if not faults:
        return
    if ranks.is_main:
        shutil.rmtree(folder.checkpoints / f".tmp-{step_name(step)}", ignore_errors=True)
    raise LaunchError(faults[0])


def _save_fault(error: OSError, folder: RunFolder, step: int) -> LaunchError:
    earlier = [path.name for number, path in complete_steps(folder.checkpoints).items() if number < step]
    stands = f"{earlier[-1]} stands" if earlier else "there is no earlier one"
    doing = f"the checkpoint of step {step} cannot be written ({stands})"
    return disk_fault(error, doing, folder.checkpoints)


def _stands(target: Path, facts: CheckpointFacts) -> bool:
    return target.exists() and not fault_of(target) and read_manifest(target).facts == facts


def _finish(unfinished: Path, target: Path, manifest: Manifest) -> None:
    write_whole(unfinished / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")
    for folder in (path for path in unfinished.rglob("*") if path.is_dir()):
        sync_folder(folder)
    aside = target.with_name(f".old-{target.name}")
    if target.exists():
        target.rename(aside)
    unfinished.rename(target)
    sync_folder(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(checkpoints: Path, newest: int, keep: int, keep_best: bool) -> None:
    steps = complete_steps(checkpoints)
    course = {step: path for step, path in steps.items() if step <= newest}
    kept = set(list(course.values())[-keep:])
    if keep_best and (losses := _eval_losses(course)):
        kept.add(min(losses, key=lambda item: item[0])[1])
    for path in steps.values():
        if path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    leaving = path.with_name(f".gone-{path.name}")
    path.rename(leaving)
    shutil.rmtree(leaving)


def _eval_losses(steps: Mapping[int, Path]) -> list[tuple[float, Path]]:
    """Held-out losses, newest first; checkpoints without one, or without a manifest, are left out."""
    losses: list[tuple[float, Path]] = []
    for path in reversed(list(steps.values())):
        try:
            loss = read_manifest(path).facts.eval_loss
        except ValueError:
            continue
        if loss is not None:
            losses.append((loss, path))
    return losses


def _first_sound(paths: Iterable[Path]) -> Found:
    rejected: list[Rejected] = []
    for path in paths:
        reason = fault_of(path)
        if not reason:
            return Found(Checkpoint(path, read_manifest(path)), tuple(rejected))
        rejected.append(Rejected(path, reason))
    return Found(None, tuple(rejected))
