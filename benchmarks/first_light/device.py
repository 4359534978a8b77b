"""The device of a stage: a CUDA GPU, or the CPU standing in for one so that the ladder can be rehearsed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

GIB = 2**30
SAMPLE_S = 0.05
"""Between two looks at what the driver says is taken."""
NEIGHBOURS_BYTES = GIB
"""Taken of a card before this process has touched it: above that, by others. An idle card has less."""
CONTEXT_BYTES = 718_077_952
"""What a process takes of a card beside the allocator, where others take of it too and the driver's figure is
of all. Measured alone on an H100 (torch 2.11, CUDA 13.0) after large matrix products: machine/versions,
2026-11-27, commit 1eaa8187."""


PATIENCE_S = 10.0
"""So long processes that were ended just now may still hold memory of the card."""


def has_neighbours(patience_s: float = PATIENCE_S) -> bool:
    """Whether other processes use the card and stay, by nvidia-smi; asked before this one has a context."""
    from memtrain.memory.hardware.devices import detect

    until = time.monotonic() + patience_s
    while True:
        found = detect("cuda")
        if found.device != "cuda" or found.memory_bytes - found.free_bytes <= NEIGHBOURS_BYTES:
            return False
        if time.monotonic() >= until:
            return True
        time.sleep(min(1.0, patience_s))


class Device:
    """Counters and switches of the device; of a stand-in they are zero, and say so by `kind`."""

    def __init__(self, *, stand_in: bool, is_shared: bool = False) -> None:
        self.is_shared = is_shared
        """Whether other processes compute on it: times say nothing then, nor does the driver of this one."""
        assert stand_in or torch.cuda.is_available(), "The ladder needs a CUDA GPU, or --stand-in."
        self.kind = "cpu" if stand_in else "cuda"
        self.torch = torch.device("cpu") if stand_in else torch.device("cuda", torch.cuda.current_device())

    @property
    def is_cuda(self) -> bool:
        """Whether figures are of a GPU."""
        return self.kind == "cuda"

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def freed(self) -> int:
        """Let go of everything; the bytes that tensors still hold."""
        gc.collect()
        if not self.is_cuda:
            return 0
        with suppress(RuntimeError):  # A context that a fault has broken; the supervisor starts a new one.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        return 2**62

    def driver_bytes(self) -> int:
        """What the driver says is taken of the card, by everything."""
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def beside_bytes(self) -> int:
        """What the driver says is taken beside the caching allocator: the context and its kernels."""
        if self.is_cuda and self.is_shared:
            return CONTEXT_BYTES
        return self.driver_bytes() - torch.cuda.memory_reserved() if self.is_cuda else 0

    def of_driver(self, **found: int) -> dict[str, int]:
        """Figures of the driver, for a result: none where they are of other processes too."""
        return {} if self.is_shared else found

    def total_bytes(self) -> int:
        """Memory of the card."""
        return torch.cuda.mem_get_info()[1] if self.is_cuda else 0

    @contextmanager
    def no_more_than(self, num_bytes: int) -> Iterator[None]:
        """As if the card had so much memory: the allocator gets what the context leaves of it."""
        if not self.is_cuda:
            yield
            return
        share = (num_bytes - self.beside_bytes()) / self.total_bytes()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    @contextmanager
    def watched(self) -> Iterator[dict[str, int]]:
        """Filled with the highest figure of the driver, sampled from a thread."""
        found = {"driver_bytes": self.driver_bytes()}
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(SAMPLE_S):
                found["driver_bytes"] = max(found["driver_bytes"], self.driver_bytes())

        thread = threading.Thread(target=look, daemon=True)
        if self.is_cuda:
            thread.start()
        try:
            yield found
        finally:
            is_over.set()
            if self.is_cuda:
                thread.join()

    def seconds(self, work: Any, repeats: int = 3) -> float:
        """The median time of `work`, after one that is not counted."""
        taken: list[float] = []
        for _ in range(repeats + 1):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - began)
        return sorted(taken[1:])[repeats // 2]
