"""Errors of exhausted memory, and the release of a broken pass's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Made = TypeVar("Made")

WORDS = ("out of memory", "can't allocate memory", "not enough memory")
"""Words of torch's errors where no class names them: the CPU allocator, cuBLAS, cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the device or the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


def attempt(act: Callable[[], Made], *, is_on: bool = True) -> tuple[Made | None, bool]:
    """(result of `act`, True), or (None, False) when memory ran out.

    The error is let go here: its traceback holds every tensor of the broken pass. With `is_on` false it is
    raised on.
    """
    try:
        return act(), True
    except (RuntimeError, MemoryError) as error:
        if not is_on or not is_out_of_memory(error):
            raise
    return None, False


def free() -> None:
    """Free the memory of a broken pass: graphs in cycles, and blocks that the allocator kept."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
