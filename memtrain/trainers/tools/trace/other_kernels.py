"""Packages of kernels that a trace does without: transformers' own code in torch stands for them."""

from __future__ import annotations

import sys

OTHER_KERNELS = ("fla", "mamba_ssm", "causal_conv1d")
"""Modules that transformers takes kernels of linear attention, state-space layers and convolutions from,
where they are installed: they are compiled for GPUs, and take no tensors without data. They keep less.

Source: transformers 5.23, integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`."""


def hide_other_kernels() -> None:
    """Make this process find none of them. Call it before a model's code is imported."""
    for name in OTHER_KERNELS:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
