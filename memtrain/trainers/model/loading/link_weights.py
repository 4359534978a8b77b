"""Weights of a finished model as a second name of the checkpoint's file, where that holds the same tensors.

Nothing is written twice then: a hard link takes no time and no space. Where names, types or shapes differ (an
adapter, experts in other pieces, a value head), or the file system links nothing (another disk, FAT, some
mounts), the weights are written as transformers does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import modeling_utils

from memtrain.trainers.runtime.safetensors_header import DTYPES, shapes_in


@contextmanager
def linking(saved: Path | None) -> Iterator[None]:
    """Inside, `save_pretrained` links a file of weights to `saved` where that has the tensors it would write.

    `saved`: a file of a checkpoint whose values are those of the model now; None links nothing. The model is
    no wrapper of another: transformers looks for DeepSpeed's, whose import takes half a second.
    """
    library: Any = modeling_utils
    write, unwrap = library.safe_save_file, library.unwrap_model

    def linked(tensors: Mapping[str, Tensor], filename: str, **given: Any) -> None:
        if saved is None or not _is_linked(saved, Path(filename), tensors):
            write(tensors, filename, **given)

    library.safe_save_file = linked
    library.unwrap_model = lambda model, **_: model
    try:
        yield
    finally:
        library.safe_save_file, library.unwrap_model = write, unwrap


def _is_linked(saved: Path, place: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Give `saved` the name `place` too; False where it holds other tensors, or cannot have two names."""
    wanted = {name: (DTYPES.get(one.dtype, ""), tuple(one.shape)) for name, one in tensors.items()}
    try:
        if shapes_in(saved) != wanted:
            return False
        os.link(saved, place)
    except OSError:
        # What else a disk refuses, it refuses again when the weights are written.
        return False
    return True
