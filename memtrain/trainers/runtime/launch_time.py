"""Host time of a launch, measured where a run starts on a GPU: eager steps are priced by it."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime

import torch

from memtrain.memory.hardware.calibration import Launches, remember_launches

LAUNCHES = 100
ROUNDS = 3
"""The least of these counts: another process on a core makes a round longer, and none shorter. Taste."""


def measure_launches(device: torch.device) -> float | None:
    """Seconds of one launch of a small kernel, which are kept with the machine's calibration.

    None, and nothing is kept, on a CPU: its operators run as they are launched.
    """
    if device.type != "cuda":
        return None
    small = torch.zeros(16, device=device)
    found = min(_round(small) for _ in range(ROUNDS + 1))
    name = torch.cuda.get_device_name(device)
    day = datetime.now(UTC).date().isoformat()
    with suppress(OSError):  # A folder that cannot be written costs a later plan its figure, and no run.
        remember_launches(Launches(device=name, made=day, launch_s=found))
    return found


def _round(small: torch.Tensor) -> float:
    torch.cuda.synchronize(small.device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        small.add_(1.0)
    taken = time.perf_counter() - began
    torch.cuda.synchronize(small.device)
    return taken / LAUNCHES
