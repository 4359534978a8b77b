"""The contents of `final/`: listed beside it when it is written, checked before a run is called over.

Weights are known by their size. Texts may be changed by hand (a card, a template, how to sample): they must
be there, and JSON must be whole. No checksum: weights would have to be read again each time.
"""

from __future__ import annotations

import json
from pathlib import Path

from memtrain.errors import OR, LaunchError
from memtrain.recipes.sections.base import Section
from memtrain.trainers.checkpoints.manifest import CheckpointFacts
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import check_held
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole
from memtrain.trainers.runtime.own_trees import foreign_in, named

WEIGHTS = ".safetensors"
CARD = "README.md"


class FinalFile(Section):
    """A file of a trained model."""

    name: str
    """Path below `final/`, with forward slashes."""
    num_bytes: int
    written_ns: int = 0
    """Of its last change, in nanoseconds since 1970; 0 where it was not kept."""


class Final(Section):
    """The model of a run that has ended."""

    facts: CheckpointFacts
    files: tuple[FinalFile, ...]


def note_final(folder: RunFolder, facts: CheckpointFacts, made: Path | None = None) -> None:
    """Write down what `final/` holds; `made`: the folder that will be.

    Raises: LaunchError when the disk refuses.
    """
    made = made or folder.final
    found = sorted(path for path in made.rglob("*") if path.is_file())
    files = [_entry(path, path.relative_to(made).as_posix()) for path in found]
    _write(folder, Final(facts=facts, files=tuple(files)))


def _write(folder: RunFolder, final: Final) -> None:
    check_held(folder.path)
    try:
        write_whole(folder.final_list, final.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise disk_fault(error, "the list of its files cannot be written", folder.final_list) from None


def read_final(folder: RunFolder) -> Final | None:
    """List of files that was written; None where there is none, or one by another version of memtrain."""
    try:
        return Final.model_validate_json(folder.final_list.read_text())
    except (OSError, ValueError):
        return None


def _entry(path: Path, name: str) -> FinalFile:
    found = path.stat()
    return FinalFile(name=name, num_bytes=found.st_size, written_ns=found.st_mtime_ns)


def note_card(folder: RunFolder) -> None:
    """Write down that the card in `final/` was written again. Raises: LaunchError when the disk refuses."""
    known = read_final(folder)
    if known is not None and (folder.final / CARD).is_file():
        files = [one for one in known.files if one.name != CARD]
        whole = Final(facts=known.facts, files=(*files, _entry(folder.final / CARD, CARD)))
        _write(folder, whole)


def is_ours(folder: RunFolder) -> bool:
    """Whether all of `final/` is as memtrain wrote it: nothing is there besides, and nothing was changed."""
    known = read_final(folder)
    if known is None or folder.final.is_symlink():
        return False
    # A kill may have come between the model and its card.
    names = {CARD, *(one.name for one in known.files)}
    if foreign_in(folder.final, names):
        return False
    there = [
        (one, _entry(folder.final / one.name, one.name))
        for one in known.files
        if (folder.final / one.name).is_file()
    ]
    return all(one.num_bytes == now.num_bytes and one.written_ns in (0, now.written_ns) for one, now in there)


def refuse_foreign_final(folder: RunFolder) -> None:
    """Raise LaunchError where `final/` is a model that this run folder knows nothing of."""
    if folder.final.is_dir() and any(folder.final.iterdir()) and not folder.final_list.is_file():
        held = [path.name for path in folder.final.iterdir()]
        raise LaunchError(
            f"{folder.final} holds what memtrain did not write ({named(held)}), and the model of this run "
            "would take its place",
            str(folder.final),
            f"move it away{OR}choose another --run-dir",
        )


def final_fault(folder: RunFolder) -> str:
    """Reason that `final/` is not the model that was written, in a few words; empty where it is."""
    if not folder.final.is_dir():
        return "the folder is missing"
    known = read_final(folder)
    if known is None:
        # Of a version that wrote no list.
        return "" if any(folder.final.glob(f"*{WEIGHTS}")) else "there are no weights"
    for entry in known.files:
        fault = _fault_of(folder.final / entry.name, entry)
        if fault:
            return fault
    return ""


def _fault_of(path: Path, entry: FinalFile) -> str:
    if not path.is_file():
        return f"{entry.name} is missing"
    num_bytes = path.stat().st_size
    if entry.name.endswith(WEIGHTS):
        is_same = num_bytes == entry.num_bytes
        return "" if is_same else f"{entry.name} has {num_bytes} bytes, not {entry.num_bytes}"
    if entry.num_bytes and not num_bytes:
        return f"{entry.name} is empty"
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return f"{entry.name} is not complete JSON"
    return ""
