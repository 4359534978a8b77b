"""Optional packages that are installed, in a version that works."""

from __future__ import annotations

import importlib.metadata
import importlib.util

FLOORS = {"liger_kernel": ("liger-kernel", (0, 8, 5))}
"""(distribution, first version that works) of a package. Liger before it lacks `accum_dtype`, or makes
gradients of `reduction="none"` in the forward pass."""


def installed(*packages: str) -> frozenset[str]:
    """The given packages that can be imported here, in a version that works."""
    return frozenset(name for name in packages if not missing(name))


def missing(package: str) -> str:
    """Reason that a package cannot be used, as the end of a sentence about it; empty where it can be."""
    if importlib.util.find_spec(package) is None:
        return "is not installed"
    if package not in FLOORS:
        return ""
    distribution, floor = FLOORS[package]
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if numbers(found) >= floor:
        return ""
    return f"{found} is installed, and {'.'.join(map(str, floor))} is the oldest that works"


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: 0.8.5 of 0.8.5.post1, 1.0 of 1.0rc1."""
    found: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)
