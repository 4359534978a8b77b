"""Measurements of `memtrain calibrate`: rates of a device, and its needs beside tensors.

On a CPU: one thread's matrix products and memory, the allocator's granularity, the bytes of a process that
has loaded what a run loads. On a GPU besides: context, workspaces, pinned copies, launches, a communicator,
and the scratch of single kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

import psutil
import torch
import torch.nn.functional as F

from memtrain.errors import LaunchError
from memtrain.memory.hardware.calibration import Measured, versions
from memtrain.memory.hardware.devices import said_by_smi
from memtrain.memory.plan.units import GIB, MIB, gib

Kind = Literal["cpu", "cuda"]
ENOUGH_S = 0.4
"""Time that each figure is measured for, on a CPU."""
MOST_BESIDE = 4 * GIB
"""Bound of the memory of a process beside its tensors; contexts take 0.3 to 1 GiB. Taste."""


def measure(kind: Kind, name: str) -> Measured:
    """The device of this process, in some seconds on a CPU and about twenty on a GPU."""
    return of_gpu(name) if kind == "cuda" else of_cpu(name)


def of_cpu(name: str) -> Measured:
    """Measurements of one core: figures are of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, target = (
            torch.empty(64 * MIB, dtype=torch.uint8).fill_(1),
            torch.empty(64 * MIB, dtype=torch.uint8),
        )
        moved = 2 * source.nbytes / seconds_of(lambda: target.copy_(source))
        single, half = (products_a_second(1024, dtype, "cpu") for dtype in (torch.float32, torch.bfloat16))
        small = torch.zeros(16)
        launch = seconds_of(lambda: small.add_(1.0))
    finally:
        torch.set_num_threads(before)
    return Measured(
        device=name,
        made=today(),
        versions=versions(),
        beside_bytes=resident_of_a_run(),
        half_matmul_per_s=half,
        single_matmul_per_s=single,
        bytes_per_s=moved,
        host_bytes_per_s=moved,
        launch_s=launch,
        granularity_bytes=cpu_granularity(),
    )


def resident_of_a_run() -> int:
    """Resident bytes of this process with everything loaded that a run loads."""
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    import transformers

    assert transformers.AutoModelForCausalLM, "Loaded on the first look."
    return psutil.Process().memory_info().rss


def cpu_granularity() -> int:
    """Largest power of two that divides the addresses of small tensors: sizes are rounded up to it."""
    held = [torch.empty(1 + 7 * index, dtype=torch.uint8) for index in range(64)]
    joined = 0
    for tensor in held:
        joined |= tensor.data_ptr()
    return joined & -joined


def products_a_second(size: int, dtype: torch.dtype, device: str) -> float:
    """Floating-point operations a second of a product of size x size matrices."""
    # Random numbers: of ones a GPU draws less power, and keeps a higher clock than any training has.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else None
    return 2 * size**3 / seconds_of(lambda: left @ right, wait)


def seconds_of(work: Callable[[], object], wait: Callable[[], None] | None = None) -> float:
    """Time of one `work`, the mean of all within ENOUGH_S, after an uncounted first."""
    work()
    if wait is not None:
        wait()
    began, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - began < ENOUGH_S:
        work()
        count += 1
        if wait is not None and count % 16 == 0:
            wait()
    if wait is not None:
        wait()
    return (time.perf_counter() - began) / count


def of_gpu(name: str) -> Measured:
    """The current CUDA device. Where it is not free, what others hold is told apart by what the driver said
    before this process was there; no context may be there yet.

    Raises: LaunchError where others took or gave memory meanwhile, or the driver does not say what they hold.
    """
    before = in_use()
    torch.zeros(1, device="cuda")
    others = before.get(f"GPU-{torch.cuda.get_device_properties(0).uuid}", 0)
    square = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    # cuBLAS's workspaces are in the caching allocator, and no tensor of ours.
    own = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() + 2 * square.nbytes
    beside = beside_tensors(total - free - own, others)
    wait = torch.cuda.synchronize
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), wait)
    host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    part = source[: host.nbytes]
    there = host.nbytes / seconds_of(lambda: part.copy_(host, non_blocking=True), wait)
    back = host.nbytes / seconds_of(lambda: host.copy_(part, non_blocking=True), wait)
    small = torch.zeros(16, device="cuda")
    return Measured(
        device=name,
        made=today(),
        versions=versions(),
        beside_bytes=beside,
        others_bytes=others,
        communication_bytes=of_communicator(),
        half_matmul_per_s=products_a_second(8192, torch.bfloat16, "cuda"),
        single_matmul_per_s=products_a_second(4096, torch.float32, "cuda"),
        bytes_per_s=moved,
        host_bytes_per_s=min(there, back),
        launch_s=seconds_of(lambda: small.add_(1.0)),
        granularity_bytes=512,
        scratch=scratch_of_kernels(),
    )


def in_use() -> Mapping[str, int]:
    """Bytes in use on each GPU by its UUID, as the driver says; none where nvidia-smi is not there."""
    said = said_by_smi("uuid,memory.used") or ""
    rows = (line.split(",") for line in said.splitlines() if line.count(",") == 1)
    return {uuid.strip(): int(used) * MIB for uuid, used in rows if used.strip().isdigit()}


def beside_tensors(held: int, others: int) -> int:
    """Bytes of this process beside its tensors, of `held` on the card beside them.

    Raises: LaunchError where that is no process's: others came or went.
    """
    beside = held - others
    if 0 < beside < MOST_BESIDE:
        return beside
    raise LaunchError(
        f"the card is shared: beside this process's tensors {gib(held)} are held, of which others held "
        f"{gib(others)} before it",
        "nvidia-smi lists the other processes",
        "stop them, or name another card in CUDA_VISIBLE_DEVICES",
    )


def of_communicator() -> int | None:
    """Bytes that NCCL takes for a first collective, of one member; None where there is one device."""
    import torch.distributed as dist

    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        return None
    before = torch.cuda.mem_get_info()[0]
    store = dist.HashStore()
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        return max(0, before - torch.cuda.mem_get_info()[0])
    finally:
        dist.destroy_process_group()


def scratch_of_kernels() -> dict[str, int]:
    """Bytes that single kernels take while they run and give back, at 4096 tokens of an 8B model."""
    shape, half = (1, 32, 4096, 128), torch.bfloat16
    query, key, value = (torch.zeros(shape, device="cuda", dtype=half, requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    logits = torch.zeros(4096, 32768, device="cuda")
    targets = torch.zeros(4096, dtype=torch.long, device="cuda")
    rows = torch.zeros(4096, 4096, device="cuda", dtype=half)
    kernels: dict[str, Callable[[], object]] = {
        "attention": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "attention backward": lambda: torch.autograd.grad(
            out, (query, key, value), torch.ones_like(out), retain_graph=True
        ),
        "cross entropy": lambda: F.cross_entropy(logits, targets),
        "embedding backward": lambda: torch.ops.aten.embedding_dense_backward(
            rows, targets, 128256, -1, False
        ),
    }
    return {name: scratch_of(kernel) for name, kernel in kernels.items()}


def scratch_of(kernel: Callable[[], object]) -> int:
    """Peak while a kernel runs, less the rest after it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = kernel()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del kept
    return taken


def today() -> str:
    """The day, as 2026-11-21."""
    return datetime.now(UTC).date().isoformat()
