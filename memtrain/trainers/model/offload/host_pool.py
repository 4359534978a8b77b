"""Host memory for offloaded tensors: recycled blocks, and a folder on disk for the tensors needed last."""

from __future__ import annotations

import os
import socket
import tempfile
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from memtrain.memory.plan.sizes import block_bytes
from memtrain.trainers.model.offload.copy_engines import CopyEngine, Ticket
from memtrain.trainers.runtime.namespaces import pid_namespace


class HostPool:
    """Blocks of host memory that are used again and never given back: pinning memory costs milliseconds.

    `num_bytes` is all that was ever allocated; `used_bytes` what holds tensors now.
    """

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._free: defaultdict[int, deque[tuple[Tensor, Ticket]]] = defaultdict(deque)
        self.num_bytes = 0
        self.used_bytes = 0

    def take(self, num_bytes: int) -> tuple[Tensor, Ticket]:
        """uint8 block of at least `num_bytes`, and the copy that still reads it."""
        size = block_bytes(num_bytes)
        self.used_bytes += size
        if self._free[size]:
            # The one that was returned first: its last copy is the likeliest to be over.
            return self._free[size].popleft()
        self.num_bytes += size
        return self._engine.allocate_host(size), None

    def give_back(self, block: Tensor, ticket: Ticket) -> None:
        """`block` may be written again once the copy `ticket` is over."""
        self.used_bytes -= block.numel()
        self._free[block.numel()].append((block, ticket))


class DiskTier:
    """Writes blocks into files of `folder`, one after the other on a thread of its own, and reads them
    back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _remove_left(folder)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")
        self.written_bytes = 0

    def write(self, host: Tensor) -> StoredBlock:
        """The file that will hold `host` (uint8, not to be changed until `is_written`)."""
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=f"{_prefix()}{os.getpid()}-")
        os.close(handle)
        self.written_bytes += host.numel()
        return StoredBlock(Path(name), self._writer.submit(_write, Path(name), host))


def _prefix() -> str:
    """Beginning of the names of files of processes that are seen here: the folder may be shared with other
    machines and containers."""
    return f"activation-{socket.gethostname()}-{pid_namespace()}-"


def _remove_left(folder: Path) -> None:
    """Remove the blocks of killed processes of this machine."""
    for path in folder.glob(f"{_prefix()}*"):
        pid = path.name.removeprefix(_prefix()).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


class StoredBlock:
    """A block on disk; its file is removed with the block."""

    def __init__(self, path: Path, writing: Future[None]) -> None:
        self._path = path
        self._writing = writing

    def is_written(self, *, wait: bool = False) -> bool:
        """Whether the whole block is in the file; raises the error of its writing."""
        if not wait and not self._writing.done():
            return False
        self._writing.result()
        return True

    def read_into(self, host: Tensor) -> None:
        """Fill `host` (uint8) with the block."""
        self.is_written(wait=True)
        with self._path.open("rb") as file:
            num_bytes = file.readinto(_bytes_of(host))
        assert num_bytes == host.numel(), f"{self._path} is shorter than the data written to it."

    def __del__(self) -> None:
        self._writing.cancel()
        self._path.unlink(missing_ok=True)


def _bytes_of(host: Tensor) -> memoryview:
    return memoryview(host.numpy())  # pyright: ignore[reportArgumentType] numpy's stubs hide the buffer


def _write(path: Path, host: Tensor) -> None:
    with path.open("wb") as file:
        file.write(_bytes_of(host))
