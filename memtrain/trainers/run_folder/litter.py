"""Half-written files that killed processes left in a run folder, and their removal; no torch.

Files are written beside their place under a name that says who writes, `.NAME.PID.tmp`, and renamed; folders
in which something is only tried are named below. Checkpoints mend themselves (checkpoints/checkpoint.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memtrain.trainers.run_folder.lock import ticks_of
from memtrain.trainers.runtime.own_trees import remove_tree

UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<pid>[0-9]+)\.tmp")
TRIED = re.compile(r"\.(final-tried|rehearsal)-.+")
"""Folders in which a save or a step is tried."""

WRITTEN = (
    *("plan.json", "status.json", "metrics.jsonl", "report.html", "final.json", "lock-now", "lm_eval.json"),
    *("final", "final-before", "README.md"),
)
"""Names that a run writes whole or not at all: half-written ones of other programs are left alone."""

OTHERS = ("export", "merged")
"""Names that other commands write into a run folder, beside a run: theirs while they live."""


@dataclass(frozen=True, slots=True)
class Litter:
    """A file or a folder that nobody will finish."""

    path: Path
    num_bytes: int


def litter_in(folder: Path) -> list[Litter]:
    """Files left in a run folder by processes that are gone. The folder must be the caller's to write."""
    found = sorted(path for path in folder.iterdir() if _is_left(path)) if folder.is_dir() else []
    return [weighed(path) for path in found]


def weighed(path: Path) -> Litter:
    """A file or a folder with its bytes."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return Litter(path, sum(one.stat().st_size for one in files))


def remove_litter(folder: Path) -> list[Litter]:
    """Remove a leftover, and return its description.

    Raises: OSError when the disk refuses.
    """
    found = litter_in(folder)
    for one in found:
        if one.path.is_dir():
            remove_tree(one.path)
        else:
            one.path.unlink()
    return found


def _is_left(path: Path) -> bool:
    if path.is_symlink():
        return False
    unfinished = UNFINISHED.fullmatch(path.name)
    if unfinished is None:
        return TRIED.fullmatch(path.name) is not None
    if unfinished["name"] in OTHERS:
        return ticks_of(int(unfinished["pid"])) is None
    return unfinished["name"] in WRITTEN
