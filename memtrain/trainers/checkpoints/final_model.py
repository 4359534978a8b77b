"""The contents of `final/`: listed beside it when it is written, checked before a run is called over.

Weights are known by their size. Texts may be changed by hand (a card, a template, how to sample): they must
be there, and JSON must be whole. No checksum: weights would have to be read again each time.
"""

from __future__ import annotations

import json
from pathlib import Path

from memtrain.recipes.sections.base import Section
from memtrain.trainers.checkpoints.manifest import CheckpointFacts
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole

WEIGHTS = ".safetensors"


class FinalFile(Section):
    """A file of a trained model."""

    name: str
    """Path below `final/`, with forward slashes."""
    num_bytes: int


class Final(Section):
    """The model of a run that has ended."""

    facts: CheckpointFacts
    files: tuple[FinalFile, ...]


def note_final(folder: RunFolder, facts: CheckpointFacts) -> None:
    """Write down what `final/` holds.

    Raises: LaunchError when the disk refuses.
    """
    found = sorted(path for path in folder.final.rglob("*") if path.is_file())
    files = [
        FinalFile(name=path.relative_to(folder.final).as_posix(), num_bytes=path.stat().st_size)
        for path in found
    ]
    text = Final(facts=facts, files=tuple(files)).model_dump_json(indent=1)
    try:
        write_whole(folder.final_list, text + "\n")
    except OSError as error:
        raise disk_fault(error, "the list of its files cannot be written", folder.final_list) from None


def read_final(folder: RunFolder) -> Final | None:
    """List of files that was written; None where there is none, or one by another version of memtrain."""
    try:
        return Final.model_validate_json(folder.final_list.read_text())
    except (OSError, ValueError):
        return None


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
