"""Liger's kernels as far as memory goes: their Python wrappers run and allocate, no kernel is launched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.tools.trace.client import uses_liger
from memtrain.trainers.tools.trace.fake_cuda import as_fake_cuda, without_launches

LIBRARY = "liger_kernel"


@contextmanager
def as_fake_liger(settings: Settings) -> Iterator[None]:
    """Liger's code takes the branches of a GPU inside."""
    if not uses_liger(settings):
        yield
        return
    with as_fake_cuda(LIBRARY), without_launches():
        _choose_kernels()
        yield


def _choose_kernels() -> None:
    """Let Liger look for its back ends before anything is counted: failed imports keep the
    tensors of the first call in their tracebacks (0.8.5)."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb  # pyright: ignore[reportMissingImports]

    heads_1HTD, angles_1TD = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 8)  # noqa: N806
    liger_rotary_pos_emb(heads_1HTD, heads_1HTD.clone(), angles_1TD, angles_1TD)
    gc.collect()
