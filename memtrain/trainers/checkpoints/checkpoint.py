"""Checkpoints: complete and verified, or not there at all.

A checkpoint is written under a name that is never picked up, synced, and renamed when it is whole. A kill
or a full disk at any byte leaves the ones before it as they were. Names in `checkpoints/`: `step-000123` is
complete; `.tmp-` is being written; `.gone-` is being removed; `.old-` makes way for one of the same step.
What memtrain did not write there (`written_in`) stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from memtrain.errors import Fault, LaunchError
from memtrain.trainers.checkpoints.manifest import (
    MANIFEST_FILE,
    CheckpointFacts,
    FileEntry,
    Manifest,
    fault_of,
    file_entry,
    is_of_another_version,
    read_manifest,
)
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import check_held
from memtrain.trainers.runtime.atomic_files import disk_fault, sync_file, sync_folder, write_whole
from memtrain.trainers.runtime.own_trees import (
    NotOurs,
    foreign_in,
    named,
    put_in_place,
    remove_half_written,
    remove_tree,
)
from memtrain.trainers.runtime.parallel_write import NUM_THREADS
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.threads import do_all

Parts = Mapping[str, Callable[[Path], None]]
"""Parts of a save: each writes a file, a folder, or files that have the given path's name before a dot."""


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
    """Result of a search for a checkpoint."""

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
    """The newest intact checkpoint, and newer damaged checkpoints."""
    return _first_sound(reversed(list(complete_steps(folder.checkpoints).values())))


def best_complete(folder: RunFolder, metric: str = "") -> Found:
    """The sound checkpoint with the best held-out loss, or `metric`; of two equal ones the later."""
    losses = _eval_losses(complete_steps(folder.checkpoints), metric)
    return _first_sound(path for _, path in sorted(losses, key=lambda item: item[0]))


def left_checkpoints(folder: RunFolder) -> list[Path]:
    """Checkpoints that a kill left half-written, half-removed, or beside a checkpoint in their place."""
    asides = [path for path in folder.checkpoints.glob(".old-step-*") if _home_of(path).exists()]
    half = [*folder.checkpoints.glob(".tmp-step-*"), *folder.checkpoints.glob(".gone-step-*")]
    return sorted([*asides, *half])


def _home_of(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".old-"))


def mend_checkpoints(folder: RunFolder) -> None:
    """Remove half-written or half-removed folders of a kill, and put back folders left aside.

    Raises: LaunchError when the disk refuses, or memtrain did not write them.
    """
    with _refused(folder, "leftovers of killed processes among the checkpoints cannot be removed"):
        for left in left_checkpoints(folder):
            remove_tree(left)
        for aside in folder.checkpoints.glob(".old-step-*"):
            aside.rename(_home_of(aside))


def remove_checkpoints(folder: RunFolder) -> None:
    """Remove every checkpoint: the run begins anew, and a kill must not go back to its old course.

    Raises: LaunchError when the disk refuses, or one holds what memtrain did not write.
    """
    with _refused(folder, "the checkpoints of the earlier run cannot be removed"):
        for path in complete_steps(folder.checkpoints).values():
            _remove(path)


@contextmanager
def _refused(folder: RunFolder, doing: str) -> Iterator[None]:
    """A disk that refuses becomes a LaunchError."""
    try:
        yield
    except OSError as error:
        raise disk_fault(error, doing, Path(error.filename or folder.checkpoints)) from None


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint that is to be written, by all ranks together: each writes its own parts into one folder.

    Names of parts differ between ranks where more than one writes. Kept beside it are the newest `keep`, and
    with `keep_best` the one with the lowest held-out loss. Checkpoints of later steps are of a course that
    was left (they were broken, or the run began anew) and are removed.
    """

    folder: RunFolder
    parts: Parts
    facts: CheckpointFacts
    keep: int
    keep_best: bool = False
    left: list[str] = field(default_factory=list)
    """Words about files that could not be removed when the save was finished: the run goes on beside them."""

    @property
    def target(self) -> Path:
        """Place of the checkpoint when it is whole."""
        return self.folder.checkpoints / step_name(self.facts.step)

    @property
    def unfinished(self) -> Path:
        """Place of the checkpoint while it is written."""
        return self.folder.checkpoints / f".tmp-{self.target.name}"

    def stands(self) -> bool:
        """Whether a sound checkpoint of the same step and facts is there already."""
        same = self.target.exists() and not fault_of(self.target)
        return same and read_manifest(self.target).facts == self.facts

    def prepare(self) -> None:
        """Make its folder; the main rank does this. Raises: LaunchError where another run has the folder."""
        check_held(self.folder.path)
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        mend_checkpoints(self.folder)
        self.unfinished.mkdir()

    def write(self) -> None:
        """Write this rank's parts."""
        for name, write in self.parts.items():
            write(self.unfinished / name)

    def own_files(self) -> list[Path]:
        """Files that this rank's parts have written."""
        return [file for name in self.parts for file in _files_of(self.unfinished / name)]

    def all_files(self) -> list[Path]:
        """Files that are there, of all ranks."""
        return sorted(path for path in self.unfinished.rglob("*") if path.is_file())

    def entries(self, files: Iterable[Path]) -> list[FileEntry]:
        """Checksums of some files, which are then on the disk itself."""
        made: dict[Path, FileEntry] = {}

        def take(file: Path) -> None:
            sync_file(file)
            made[file] = file_entry(self.unfinished, file)

        held = list(files)
        do_all([partial(take, file) for file in held], min(NUM_THREADS, len(held)))
        return [made[file] for file in held]

    def finish(self, entries: Iterable[FileEntry]) -> None:
        """Name the new checkpoint, and remove the ones no longer kept; main rank only."""
        check_held(self.folder.path)
        files = tuple(sorted(entries, key=lambda entry: entry.name))
        kept = _finish(self.unfinished, self.target, Manifest(facts=self.facts, files=files).sealed())
        if kept is not None:
            self.left.append(f"{self.target.name} held what memtrain did not write: that is {kept.name} now")
        self.left.extend(_prune(self.folder.checkpoints, self.facts, self.keep, self.keep_best))

    def fault(self, error: OSError) -> LaunchError:
        """Error that a user reads when the disk refuses."""
        steps = complete_steps(self.folder.checkpoints).items()
        earlier = [path.name for number, path in steps if number < self.facts.step]
        stands = f"{earlier[-1]} stands" if earlier else "there is no earlier one"
        doing = f"the checkpoint of step {self.facts.step} cannot be written ({stands})"
        return disk_fault(error, doing, self.folder.checkpoints)


def save_checkpoint(save: Save, ranks: Ranks | None = None) -> Path:
    """Write a checkpoint, then remove those no longer kept. Returns the new one's folder.

    All ranks call this. A sound checkpoint of the same step and facts is not written again.

    Raises: LaunchError, on every rank, when the disk refuses; the checkpoints before are then untouched.
    """
    ranks = ranks or Ranks()
    entries: list[FileEntry] = []

    def hash_share() -> None:
        entries.extend(save.entries(save.all_files()[ranks.rank :: ranks.world]))

    def finish() -> None:
        save.finish(entry for share in shares for entry in share)

    if ranks.broadcast(ranks.is_main and save.stands()):
        return save.target
    together(ranks, save, save.prepare if ranks.is_main else None)
    together(ranks, save, save.write)
    together(ranks, save, hash_share)
    shares = ranks.gather(entries)
    together(ranks, save, finish if ranks.is_main else None)
    return save.target


def together(ranks: Ranks, save: Save, act: Callable[[], None] | None) -> None:
    """Do one act of a save; when it fails on one rank, it fails on all of them with the same error."""
    fault = None if act is None else attempted(save, act)
    agree(save, ranks.gather(fault), ranks)


def attempted(save: Save, act: Callable[[], None]) -> tuple[Fault, ...] | None:
    """Do an act of a save; the fault where the disk refuses."""
    try:
        act()
    except OSError as error:
        return save.fault(error).faults
    except SafetensorError as error:
        return save.fault(OSError(str(error))).faults
    except LaunchError as error:
        return error.faults
    return None


def agree(save: Save, faults: Iterable[tuple[Fault, ...] | None], ranks: Ranks) -> None:
    """Give a save up where it failed on any rank. Raises: LaunchError, the same on every rank."""
    known = [one for one in faults if one is not None]
    if not known:
        return
    if ranks.is_main:
        remove_half_written(save.unfinished)
    raise LaunchError(list(known[0]))


def _files_of(part: Path) -> Iterator[Path]:
    """The files of a part that was given this path."""
    if part.is_dir():
        yield from (path for path in part.rglob("*") if path.is_file())
    elif part.is_file():
        yield part
    yield from part.parent.glob(f"{part.name}.*")


def _finish(unfinished: Path, target: Path, manifest: Manifest) -> Path | None:
    """Name a checkpoint; what stood in its place and is not ours is set aside, under the name returned."""
    write_whole(unfinished / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")
    for folder in (path for path in unfinished.rglob("*") if path.is_dir()):
        sync_folder(folder)
    if foreign_in(target, written_in(target)):
        kept = put_in_place(unfinished, target, is_ours=False)
        sync_folder(target.parent)
        return kept
    aside = target.with_name(f".old-{target.name}")
    if target.exists():
        target.rename(aside)
    unfinished.rename(target)
    sync_folder(target.parent)
    if aside.exists():
        # A file of it that somebody reads over NFS stays until it is closed: the next save removes it.
        with suppress(OSError):
            remove_tree(aside)
    return None


def written_in(path: Path) -> set[str]:
    """Files of a checkpoint that memtrain wrote, as paths below it: those of its manifest, with this.

    A manifest that cannot be read, but is there, does not tell them: all files are taken as written.
    """
    if path.is_symlink() or not (path / MANIFEST_FILE).is_file():
        return set()
    try:
        return {MANIFEST_FILE, *(entry.name for entry in read_manifest(path).files)}
    except ValueError:
        return {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_symlink()}


def _prune(checkpoints: Path, newest: CheckpointFacts, keep: int, keep_best: bool) -> list[str]:
    """Remove checkpoints that are no longer kept; failures and their reasons, in words."""
    steps = complete_steps(checkpoints)
    course = {step: path for step, path in steps.items() if step <= newest.step}
    kept = set(list(course.values())[-keep:])
    if keep_best and (losses := _eval_losses(course, newest.eval_metric)):
        kept.add(min(losses, key=lambda item: item[0])[1])
    left: list[str] = []
    for path in steps.values():
        if path in kept or is_of_another_version(path):
            continue
        try:
            _remove(path)
        except OSError as error:
            left.append(f"{path.name} is no longer kept and cannot be removed: {error.strerror or error}")
    return left


def _remove(path: Path) -> None:
    """Raises: OSError when it may not be removed: the rest of it keeps its name; NotOurs."""
    if foreign := foreign_in(path, written_in(path)):
        raise NotOurs(f"it holds what memtrain did not write ({named(foreign)})", path)
    leaving = path.with_name(f".gone-{path.name}")
    path.rename(leaving)
    try:
        remove_tree(leaving)
    except OSError:
        leaving.rename(path)
        raise


def _eval_losses(steps: Mapping[int, Path], metric: str) -> list[tuple[float, Path]]:
    """Held-out losses, newest first; checkpoints without one, of another metric, or without a manifest, are
    left out."""
    losses: list[tuple[float, Path]] = []
    for path in reversed(list(steps.values())):
        try:
            facts = read_manifest(path).facts
        except ValueError:
            continue
        if facts.eval_loss is not None and facts.eval_metric == metric:
            losses.append((facts.eval_loss, path))
    return losses


def _first_sound(paths: Iterable[Path]) -> Found:
    rejected: list[Rejected] = []
    for path in paths:
        reason = fault_of(path)
        if not reason:
            return Found(Checkpoint(path, read_manifest(path)), tuple(rejected))
        rejected.append(Rejected(path, reason))
    return Found(None, tuple(rejected))
