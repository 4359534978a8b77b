"""Measurements of this machine, kept in a store: rates of a device, and peaks of ended runs.

Nothing needs it: without it a plan takes typical values, and says so. `MEMTRAIN_CALIBRATION` names another
folder, or `off`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from memtrain.recipes.sections.base import Section

OFF = "off"
VARIABLE = "MEMTRAIN_CALIBRATION"
version = functools.cache(importlib.metadata.version)
"""Version of an installed package, read once a process: a plan asks a dozen times, 5 ms each."""
PACKAGES = ("torch", "transformers")
"""Packages on which the figures depend: another version of these is another key."""


class Measured(Section):
    """A device as `memtrain calibrate` measured it."""

    device: str
    """Name of the device, as the driver gives it; CPU."""
    made: str
    """Day, as 2026-11-21."""
    versions: dict[str, str]
    beside_bytes: int
    """Memory of a process beside tensors: context, kernels and workspaces, or interpreter and libraries."""
    others_bytes: int = 0
    """Memory of the card that other processes held meanwhile: rates are what they left."""
    communication_bytes: int | None = None
    """Memory of a communicator of several processes; None where there was one device."""
    half_matmul_per_s: float
    single_matmul_per_s: float
    bytes_per_s: float
    """Device memory, read and written."""
    host_bytes_per_s: float
    """The slower direction between pinned host memory and the device; on a CPU that of its memory."""
    launch_s: float
    granularity_bytes: int
    """The allocator's: sizes are rounded up to multiples of it."""
    scratch: dict[str, int] = {}
    """Memory of single kernels inside themselves, by kernel."""


class Launches(Section):
    """Host time of a launch, as runs on a device measure it at their start."""

    device: str
    made: str
    """Day, as 2026-11-28."""
    launch_s: float
    """The least of a hundred launches' mean in a run: of the newest one."""


Kept = TypeVar("Kept", Measured, Launches)


def folder() -> Path | None:
    """Folder of the store, or None where the store of measurements is switched off."""
    written = os.environ.get(VARIABLE)
    if written == OFF:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(written) if written else cache / "memtrain" / "calibration"


def versions() -> dict[str, str]:
    """Versions of the packages that the figures depend on, without importing them."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def device_file(device: str) -> Path | None:
    """The file of a device under today's versions."""
    return _file("device", device)


def remember(measured: Measured) -> Path | None:
    """Write it, whole or not at all; where it is written, or None where the store is off."""
    return _write(device_file(measured.device), measured)


def measured_of(device: str) -> Measured | None:
    """Measurements of a device under today's versions; None where there are none, or the file cannot be
    read."""
    return _read(device_file(device), Measured)


def launches_file(device: str) -> Path | None:
    """The file of a device's launches under today's versions."""
    return _file("launches", device)


def remember_launches(found: Launches) -> None:
    """Write them, in the place of those of an earlier run."""
    _write(launches_file(found.device), found)


def launches_of(device: str) -> Launches | None:
    """What the last run on a device has measured; None where none has, or the file cannot be read."""
    return _read(launches_file(device), Launches)


def _file(kind: str, device: str) -> Path | None:
    base = folder()
    return None if base is None else base / f"{kind}-{_slug(device)}-{_digest(versions())}.json"


def _write(file: Path | None, found: Section) -> Path | None:
    if file is not None:
        write_whole(file, found.model_dump_json(indent=1))
    return file


def _read(file: Path | None, kind: type[Kept]) -> Kept | None:
    if file is None or not file.is_file():
        return None
    try:
        return kind.model_validate_json(file.read_text())
    except (ValidationError, OSError):
        return None


def write_whole(file: Path, text: str) -> None:
    """Write a file so that readers find the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    with os.fdopen(handle, "w") as out:
        out.write(text)
    Path(name).replace(file)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _digest(words: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(words.items())).encode()).hexdigest()[:12]
