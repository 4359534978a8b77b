"""Names of the files of a checkpoint whose parts were written by several ranks, and the content of each."""

from __future__ import annotations

import re

from memtrain.errors import ResumeError
from memtrain.trainers.checkpoints.checkpoint import Checkpoint

PIECES = "_pieces"
"""Ends the name of a part that holds stretches of flattened weights, and not rows (pieces.py)."""


def name_of(part: str, rank: int, world: int) -> str:
    """Name of the shard that `rank` writes of a part."""
    return f"{part}-{rank:05d}-of-{world:05d}"


def files_of(checkpoint: Checkpoint, part: str) -> list[str]:
    """Names of the files of a part, in the order of the ranks that wrote them; empty without such files.

    Raises: ResumeError when it is in shards and some are missing.
    """
    listed = (entry.name for entry in checkpoint.manifest.files)
    names = [name.removesuffix(".json") for name in listed if name.endswith(".json")]
    if part in names:
        return [part]
    found = sorted(name for name in names if re.fullmatch(rf"{part}-\d+-of-\d+", name))
    if found and len(found) != int(found[0].rsplit("-", 1)[-1]):
        raise ResumeError(
            f"{checkpoint.path.name} has {len(found)} of {int(found[0].rsplit('-', 1)[-1])} shards of {part}",
            str(checkpoint.path),
            "every node must write into the same run folder; resume from an earlier checkpoint",
        )
    return found
