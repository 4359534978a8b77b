"""The doctor: versions, devices, and every optional part run once, not merely looked for."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import memtrain
from memtrain.memory.hardware.devices import Hardware, detect
from memtrain.memory.plan.units import gib
from memtrain.trainers.model.attention.probe import Outcome, probe
from memtrain.trainers.runtime.allocator import expandable_in_force, use_expandable_segments

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "peft", "safetensors"),
    *("triton", "flash-attn", "flash-attn-3", "liger-kernel", "bitsandbytes", "deepspeed", "vllm"),
)
"""Distributions whose versions are shown."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A part: its name, the outcome of its trial, and the figure, the fault, or why it was not run."""

    area: str
    """device, attention, quantization, optimizer, kernels"""
    name: str
    outcome: Outcome
    words: str


@dataclass(frozen=True, slots=True)
class Examination:
    """All that was found."""

    versions: dict[str, str]
    """Of Python and each package; empty when it is not installed."""
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> list[Finding]:
        """Installed packages that do not work."""
        return [finding for finding in self.findings if finding.outcome is Outcome.BROKEN]

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)


def examine() -> Examination:
    """Run everything once on this machine: seconds on a CPU, and up to a minute where kernels are
    compiled."""
    hardware = detect()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    findings = [_device(hardware)]
    findings += [Finding("attention", p.backend, p.outcome, p.words) for p in probe(device, dtype)]
    for area, name, package, check in OPTIONAL:
        findings.append(run_check(area, name, package, check, device))
    return Examination(_versions(), tuple(findings))


def run_check(
    area: str, name: str, package: str, check: Callable[[torch.device], str], device: str
) -> Finding:
    """The outcome of an optional part: missing without its package or CUDA, else the result of its trial."""
    if find_spec(package) is None:
        return Finding(area, name, Outcome.NOT_HERE, f"{package} is not installed")
    try:
        import_module(package)
        if device != "cuda":
            return Finding(area, name, Outcome.NOT_HERE, "needs a CUDA device")
        return Finding(area, name, Outcome.WORKS, check(torch.device("cuda", torch.cuda.current_device())))
    except Exception as fault:  # a package can fail to load in any way; the report says in which
        first = (str(fault).strip().splitlines() or [""])[0]
        return Finding(area, name, Outcome.BROKEN, f"{type(fault).__name__}: {first}")


def _versions() -> dict[str, str]:
    # Its own is that of the code that runs, which may not be installed.
    found = {"python": platform.python_version(), "memtrain": memtrain.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _device(hardware: Hardware) -> Finding:
    """The device that training takes, once torch has computed on it."""
    if hardware.device == "cuda" and not torch.cuda.is_available():
        words = f"nvidia-smi shows {hardware.name}, and torch {torch.__version__} cannot use it"
        return Finding(
            "device", hardware.name, Outcome.BROKEN, f"{words}; install torch for this CUDA version"
        )
    if hardware.device == "cpu":
        threads = f"{hardware.num_cores} cores, {torch.get_num_threads()} threads"
        return Finding("device", "CPU", Outcome.WORKS, f"{threads}, {gib(hardware.free_bytes)} free")
    free, total = torch.cuda.mem_get_info()
    half = "bfloat16" if hardware.has_bfloat16 else "no bfloat16"
    use_expandable_segments(True)
    segments = "expandable segments" if expandable_in_force() else "no expandable segments"
    words = f"{hardware.num_devices} x {gib(total)}, {gib(free)} free, CUDA {torch.version.cuda}, {half}"
    words = f"{words}, {segments}"
    return Finding("device", hardware.name, Outcome.WORKS, words)


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def _held(error: float, limit: float) -> str:
    """The error in words. Raises: ValueError when it is beyond what the format can explain."""
    if not error <= limit:
        raise ValueError(f"off by {error:.1e}, where {limit:.0e} would be right")
    return f"within {error:.1e} of full precision"


def _linear(device: torch.device, make: Callable[[Any], nn.Module], limit: float) -> str:
    import bitsandbytes  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    plain = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    quantized = make(bitsandbytes.nn)
    quantized.load_state_dict(plain.state_dict())
    quantized.to(device)
    return _held(_relative(quantized(x), plain.to(device)(x)), limit)


def _four_bit(device: torch.device) -> str:
    """Normal weights lose about a tenth of their norm in NF4 (measured for blocks of 64 in its paper)."""
    return _linear(
        device,
        lambda kinds: kinds.Linear4bit(
            256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=True
        ),
        limit=0.15,
    )


def _eight_bit(device: torch.device) -> str:
    return _linear(
        device, lambda kinds: kinds.Linear8bitLt(256, 256, False, has_fp16_weights=False), limit=0.05
    )


def _adamw_8bit(device: torch.device) -> str:
    """Ten steps beside torch's AdamW."""
    import bitsandbytes  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    start = torch.randn(128, 128, device=device)
    target = torch.randn(128, 128, device=device)
    ends: list[Tensor] = []
    for kind in (bitsandbytes.optim.AdamW8bit, torch.optim.AdamW):
        weight = nn.Parameter(start.clone())
        optimizer = kind([weight], lr=1e-2, weight_decay=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
        ends.append(weight.detach() - start)
    return _held(_relative(ends[0], ends[1]), 0.1)


def _liger(device: torch.device) -> str:
    from liger_kernel.transformers import LigerRMSNorm  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    x = torch.randn(32, 256, device=device)
    norm = LigerRMSNorm(256, eps=1e-6).to(device)
    return _held(_relative(norm(x), nn.functional.rms_norm(x, (256,), eps=1e-6)), 1e-4)


OPTIONAL: tuple[tuple[str, str, str, Callable[[torch.device], str]], ...] = (
    ("quantization", "4bit", "bitsandbytes", _four_bit),
    ("quantization", "8bit", "bitsandbytes", _eight_bit),
    ("optimizer", "8-bit AdamW", "bitsandbytes", _adamw_8bit),
    ("kernels", "liger", "liger_kernel", _liger),
)
"""Area, name, package to import, and the check that runs it."""
