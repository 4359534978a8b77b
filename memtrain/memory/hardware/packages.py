"""Optional packages that are installed, in a version that works."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping

FLOORS = {"liger_kernel": ("liger-kernel", (0, 8, 5))}
"""(distribution, first version that works) of a package. Liger before it lacks `accum_dtype`, or makes
gradients of `reduction="none"` in the forward pass."""

OPTIONAL: Mapping[str, tuple[str, str]] = {
    "flash_attn": ("flash-attn", "pip install 'memtrain[flash]'"),
    "flash_attn_interface": ("FlashAttention-3", "built from hopper/ of the flash-attention repository"),
    "liger_kernel": ("Liger", "pip install 'memtrain[liger]'"),
    "bitsandbytes": ("bitsandbytes", "pip install 'memtrain[quant]'"),
    "deepspeed": ("DeepSpeed", "pip install 'memtrain[deepspeed]'"),
    "vllm": ("vLLM", "in a separate environment, docs/generation.md"),
}
"""(name, how to get it) of the packages that a run on CUDA devices may need, by module."""

ELSEWHERE = frozenset((*OPTIONAL, "triton"))
"""Packages that a machine which is not this one is taken to have. A plan that needs one says so; Triton comes
with torch for CUDA, and goes without saying."""


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


def assumed_words(packages: Iterable[str]) -> str:
    """The sentence of a plan about packages that another machine is taken to have; empty without any."""
    each = [f"{name} ({way})" for name, way in (OPTIONAL[one] for one in OPTIONAL if one in set(packages))]
    if not each:
        return ""
    listed = f"{', '.join(each[:-1])} and {each[-1]}" if len(each) > 1 else each[0]
    return f"The plan assumes that the machine has {listed}."


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
