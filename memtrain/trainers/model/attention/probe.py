"""Each attention back end run here and now, forward and backward, against the masked reference."""

# T: tokens, H: query heads, K: key heads, D: head width.

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from memtrain.memory.hardware.packages import installed
from memtrain.memory.rules.attention import PACKAGES, PREFERENCE, AttentionBackend, AttentionFacts, refusal
from memtrain.trainers.model.attention.functions import NAMES, attend_of
from memtrain.trainers.model.attention.row_layout import shared_layout

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest relative error (norm of the difference over norm) of output and gradients; fp32 has room for TF32.
The wrong gradient to be found is off by 2e-1."""


class Outcome(StrEnum):
    """Outcome of a probe."""

    WORKS = "works"
    BROKEN = "broken"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class Probed:
    """A back end, the outcome of its run, and the measured error, the fault, or the reason of no run."""

    backend: AttentionBackend
    outcome: Outcome
    words: str


def probe(device: str, dtype: torch.dtype) -> list[Probed]:
    """Probes of our back ends, in order of preference, then back ends of other devices."""
    order = list(PREFERENCE[device]) + [backend for backend in NAMES if backend not in PREFERENCE[device]]
    return [probe_one(backend, device, dtype) for backend in order if backend in NAMES]


def probe_one(backend: AttentionBackend, device: str, dtype: torch.dtype) -> Probed:
    """Run one back end on a few tokens of `dtype`: packed rows and shared prompts, with grouped heads."""
    if backend not in PREFERENCE[device]:
        return Probed(backend, Outcome.NOT_HERE, f"does not run on {device}")
    facts = AttentionFacts(
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        compute_capability=torch.cuda.get_device_capability() if device == "cuda" else None,
        packages=installed(*PACKAGES),
    )
    refused = refusal(backend, facts)
    if refused:
        return Probed(backend, Outcome.NOT_HERE, refused)
    try:
        error = _error(backend, device, dtype)
    except Exception as fault:  # A kernel can fail in any way; the report says in which.
        return Probed(backend, Outcome.BROKEN, f"{type(fault).__name__}: {fault}")
    if not error <= TOLERANCE[dtype]:
        return Probed(backend, Outcome.BROKEN, f"off by {error:.1e} against the masked reference")
    return Probed(backend, Outcome.WORKS, f"within {error:.1e} of the masked reference, gradients too")


def _error(backend: AttentionBackend, device: str, dtype: torch.dtype) -> float:
    """Worst relative error of output and gradients against `masked` in fp32 on the same rounded numbers."""
    layout = shared_layout([(70, [40, 9]), (5, [130])], device)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(layout.num_tokens, heads, 64, generator=generator) for heads in (4, 2, 2, 4)]
    rounded = [tensor.to(device, dtype) for tensor in tensors]

    def run(attend_backend: AttentionBackend, inputs: list[Tensor]) -> list[Tensor]:
        query_THD, key_TKD, value_TKD = (tensor.detach().requires_grad_() for tensor in inputs[:3])
        out_THD = attend_of(attend_backend)(query_THD, key_TKD, value_TKD, layout, 0.125)
        return [out_THD, *torch.autograd.grad(out_THD, (query_THD, key_TKD, value_TKD), inputs[3])]

    found = run(backend, rounded)
    expected = run(AttentionBackend.MASKED, [tensor.float() for tensor in rounded])
    return max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))
