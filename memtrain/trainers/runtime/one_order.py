"""Kernels whose sums have one order, so that the same steps give the same bits twice.

On a GPU the backward passes of attention, and some of torch's own operators, add up by atomic additions, in
the order in which threads happen to end.
"""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic

from memtrain.errors import LaunchError

WORKSPACE, TWO_BUFFERS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable that lets cuBLAS sum in one order, read when CUDA starts, and its value.

Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
"""


def sum_in_one_order() -> None:
    """From now on, and before CUDA starts: an operator that has no such kernel raises a RuntimeError."""
    os.environ.setdefault(WORKSPACE, TWO_BUFFERS)
    torch.use_deterministic_algorithms(True)
    # torch would fill every empty tensor with NaN beside: time, and no number that depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def unordered_operator(error: Exception) -> str:
    """Operator that has no kernel which sums in one order, of the error that torch raises for it; empty for
    every other error."""
    operator, found, _ = str(error).partition(" does not have a deterministic implementation")
    return operator.split()[-1] if found else ""


def refusal_of(operator: str) -> LaunchError:
    """Error for a run that asks for one order of sums and uses the operator."""
    return LaunchError(
        f"torch has no kernel of {operator} that adds up in one order on this device",
        "train.deterministic",
        "set train.deterministic: false; the run goes on from its last checkpoint, equal to rounding",
    )
