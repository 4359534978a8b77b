"""cuBLAS's workspaces: blocks of the caching allocator that are no tensors, though torch counts them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def workspace_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that matrix products keep in this process; 0 elsewhere.

    A workspace for each thread that multiplies: the main one and autograd's; 32 MiB each on an H100, 8 MiB on
    cards before. They are given back and made anew to be counted, so the first call must come before CUDA
    graphs are captured, which hold on to theirs.
    Source: torch 2.11, aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.cuda.memory_allocated(device)
    square = torch.ones(16, 16, device=device, requires_grad=True)
    (square @ square).sum().backward()
    del square
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def begin_peak(device: torch.device) -> None:
    """Start of a new peak of a CUDA device; the workspaces are there before it."""
    workspace_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)


def peak_of_tensors(device: torch.device) -> int:
    """Bytes of the highest sum of tensors on a CUDA device since `begin_peak`."""
    return torch.cuda.max_memory_allocated(device) - workspace_bytes(device)
