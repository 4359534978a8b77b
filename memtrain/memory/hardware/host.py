"""Host memory that the processes of this machine can have: not only the part that is there already."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil

from memtrain.errors import RecipeError
from memtrain.recipes.sections.base import parse_bytes

VARIABLE = "MEMTRAIN_HOST_MEMORY"
"""Environment variable with a size such as 128GiB, for machines whose memory cannot be seen from inside."""

ZONES = Path("/proc/zoneinfo")
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
GROWN = 1.1
"""Present over usable memory from which the rest is taken to be lent elsewhere for now, not the kernel's own:
a kernel keeps 2 to 4 % for itself."""


def host_memory() -> tuple[int, int]:
    """(limit, available) bytes of this process's container, or of the machine.

    A virtual machine whose memory grows as it is used (a balloon) tells a MemTotal far below what it can
    have; the pages that are present are not. Its available memory counts what may still come.

    Raises: RecipeError when MEMTRAIN_HOST_MEMORY is no size.
    """
    memory = psutil.virtual_memory()
    limit, available = memory.total, memory.available
    most = given() or present_bytes()
    if most > GROWN * limit or given():
        limit, available = most, max(0, most - (limit - available))
    for folder, name, used in CGROUPS:
        files = folder / name, folder / used
        if all(file.is_file() for file in files):
            words = [file.read_text().strip() for file in files]
            if words[0].isdigit() and int(words[0]) < limit:
                limit = int(words[0])
                available = min(available, limit - int(words[1]))
    return limit, available


def present_bytes() -> int:
    """Bytes of all pages of this machine, with a balloon's; 0 where the kernel does not say."""
    if not ZONES.is_file():
        return 0
    pages = re.findall(r"^\s+present\s+(\d+)$", ZONES.read_text(), re.MULTILINE)
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def given() -> int:
    """Bytes that the environment names; 0 where it names none."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return 0
    try:
        found = parse_bytes(text)
    except ValueError:
        found = None
    if not isinstance(found, int) or found <= 0:
        raise RecipeError(
            f"{VARIABLE} is {text}, which is not a size", f"${VARIABLE}", "write it as 128GiB, or unset it"
        )
    return found
