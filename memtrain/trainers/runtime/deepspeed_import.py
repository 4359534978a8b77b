"""DeepSpeed as imported here: its device known, its log short, nothing compiled."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch


def name_device(device: str | None = None) -> None:
    """Tell DeepSpeed its device before anybody imports it, so that it does not guess.

    transformers imports it where it is installed. `device`: the run's; of itself CUDA where there is one.
    """
    os.environ.setdefault("DS_ACCELERATOR", device or ("cuda" if torch.cuda.is_available() else "cpu"))


def import_deepspeed(device: str) -> Any:
    """The package, for a run on `device`."""
    name_device(device)
    import deepspeed  # pyright: ignore[reportMissingImports]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device == "cpu":
        # Its own shared-memory collectives would be compiled first; gloo is there already.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
