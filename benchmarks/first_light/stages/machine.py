"""The machine: versions, the card, and the settings of the allocator that are really in force."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from first_light.bench import Bench
from first_light.device import GIB

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "triton", "pydantic", "datasets"),
    *("bitsandbytes", "liger-kernel", "flash-attn", "trl", "vllm", "deepspeed"),
)


def versions(bench: Bench) -> dict[str, Any]:
    """Packages, the driver, the card and its rates, the host."""
    import memtrain
    from memtrain.memory.hardware.devices import detect

    hardware = detect(bench.device.kind)  # pyright: ignore[reportArgumentType]
    found = {name: _version(name) for name in PACKAGES}
    limit, free = hardware.host_bytes, psutil.virtual_memory().available
    made: dict[str, Any] = {
        "words": f"torch {found['torch']}, {hardware.words()}",
        "packages": found | {"memtrain": memtrain.__version__, "python": platform.python_version()},
        "card": hardware.name,
        "cuda": torch.version.cuda,
        "smi": _smi(),
        "host": {"cores": hardware.num_cores, "limit_bytes": limit, "available_bytes": free},
        "environment": {key: os.environ[key] for key in sorted(os.environ) if "ALLOC_CONF" in key},
    }
    size = 8192 if bench.device.is_cuda else 256
    left, right = (torch.randn(size, size, device=bench.device.torch).to(bench.dtype) for _ in range(2))
    made["matmul_per_s"] = 2 * size**3 / bench.device.seconds(lambda: left @ right, 9)
    source = torch.randint(0, 255, (GIB if bench.device.is_cuda else 2**20,), dtype=torch.uint8)
    source = source.to(bench.device.torch)
    target = torch.empty_like(source)
    made["copy_bytes_per_s"] = 2 * source.nbytes / bench.device.seconds(lambda: target.copy_(source), 9)
    return made | bench.device.of_driver(beside_bytes=bench.device.beside_bytes())


def allocator(bench: Bench) -> dict[str, Any]:
    """Whether expandable segments are in force, seen on a block that was really allocated."""
    if not bench.device.is_cuda:
        return {"skipped": "a CPU has no caching allocator"}
    from memtrain.trainers.runtime.allocator import expandable_in_force, use_expandable_segments

    before = expandable_in_force()
    use_expandable_segments(True)
    after = expandable_in_force()
    return {
        "words": f"expandable segments: {before} as started, {after} when asked for",
        "as_started": before,
        "asked_for": after,
        "environment": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
    }


def _smi() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = "--query-gpu=name,driver_version,memory.total,memory.used,clocks.sm,power.limit,compute_cap"
    reported = subprocess.run([program, query, "--format=csv"], capture_output=True, text=True, check=False)
    return reported.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
