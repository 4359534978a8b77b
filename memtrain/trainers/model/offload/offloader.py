"""Activations that wait in host memory between the forward and the backward pass. Same numbers.

The unit is a storage, not a tensor: one that is saved by several nodes, or through several views, is copied
once, leaves the device, and comes back once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.memory.plan.sizes import MIN_BYTES
from memtrain.trainers.model.offload.checkpointing import recompute
from memtrain.trainers.model.offload.copy_engines import CopyEngine, Ticket
from memtrain.trainers.model.offload.host_pool import DiskTier, HostPool, StoredBlock
from memtrain.trainers.runtime.device_waits import host_acts

Key = tuple[int, int]
"""A storage and the version of its contents."""


@dataclass(slots=True)
class Traffic:
    """Bytes that travelled so far."""

    out_bytes: int = 0
    back_bytes: int = 0


class Block:
    """An offloaded storage: on the device, on the host, on disk, or on the way."""

    __slots__ = (
        *("_owner", "key", "source", "place", "num_bytes", "previous", "uses", "__weakref__"),
        *("device", "host", "stored", "out", "back"),
    )

    def __init__(self, owner: Offloader, key: Key, source: StorageWeakRef, flat: Tensor) -> None:
        self._owner = owner
        self.key = key
        self.source = source
        self.place = (flat.numel(), flat.dtype, flat.device)
        self.num_bytes = flat.numel() * flat.itemsize
        self.device: Tensor | None = flat
        self.host: Tensor | None = None
        self.stored: StoredBlock | None = None
        self.out: Ticket = None
        self.back: Ticket = None
        self.previous: weakref.ref[Block] | None = None
        self.uses = 0

    def on_host(self) -> Tensor:
        """[size] the host memory that mirrors the storage."""
        assert self.host is not None, "The block has no host memory."
        return self.host[: self.num_bytes].view(self.place[1])

    def __del__(self) -> None:
        self._owner.forget(self)


@dataclass(frozen=True, slots=True)
class Saved:
    """Replacement of a saved tensor in autograd: a block, and the tensor's place in it."""

    block: Block
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Offloader:
    """Moves saved storages out in the forward pass and back, one ahead, in the backward pass.

    Backward passes mostly need them in the reverse order, and the one before is fetched while one is used.
    That is a hint only: any order, several graphs at once, and repeated backward passes are right too. At
    most `keep_last` storages stay on the device for their copy's sake: the last ones, which are needed
    first. With 0 a node's storage leaves when the node's pass is through. With a `disk`, the host holds at
    most `host_limit_bytes`: the oldest, which are needed last, go to files.
    """

    def __init__(
        self,
        engine: CopyEngine,
        *,
        keep_last: int = 1,
        min_bytes: int = MIN_BYTES,
        keeps: Callable[[Tensor], bool] = lambda tensor: False,
        disk: DiskTier | None = None,
        host_limit_bytes: int = 0,
        fetches_ahead: bool = True,
        recompute: Callable[..., Any] = recompute,
    ) -> None:
        self.recompute = recompute
        self.pool = HostPool(engine)
        self.traffic = Traffic()
        self.engine = engine
        """Engine of the copies; `travel_by` changes it."""
        self._keep_last = keep_last
        self._fetches_ahead = fetches_ahead
        self.min_bytes = min_bytes
        """Storages below this many bytes stay."""
        self._keeps = keeps
        self._disk = disk
        self._host_limit_bytes = host_limit_bytes
        self._known: dict[Key, weakref.ref[Block]] = {}
        self._newest: weakref.ref[Block] | None = None
        self._leaving: deque[weakref.ref[Block]] = deque()
        self._oldest: deque[weakref.ref[Block]] = deque()
        self._writing: deque[tuple[StoredBlock, Tensor]] = deque()

    def travel_by(self, engine: CopyEngine) -> None:
        """Copy by another engine from now on; nothing may be under way."""
        self.engine, self.pool = engine, HostPool(engine)

    def run_recomputed(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """A checkpointed layer: its inputs travel and nothing else, as hooks of the checkpoint see the
        rest."""
        with self.hooks():
            return self.recompute(layer, *inputs)

    def run_kept(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        """A layer that is not recomputed: everything it saves travels."""
        with self.hooks():
            return layer(*inputs)

    def hooks(self) -> saved_tensors_hooks:
        """Context of a forward pass in which every saved tensor travels that is worth it."""
        return saved_tensors_hooks(self.pack, self.unpack)

    @contextmanager
    def leaving(self, tensor: Tensor) -> Iterator[None]:
        """Context of a node of autograd's graph that saves `tensor`: its copy starts at once.

        A custom function's tensors are packed when its forward pass is through. Without this the copy would
        start then, and hold the tensor through the next node's pass. At the end, when the node's own pass has
        long hidden the copy, the device's memory is let go down to `keep_last` storages.
        """
        begun = self._block_of(tensor, keep=max(1, self._keep_last)) if self._is_worth_it(tensor) else None
        with self.hooks():
            yield
        del begun
        self._retire_all_but(self._keep_last)

    # Forward: out.

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """`tensor` itself when it stays, else the handle of its copy."""
        if not self._is_worth_it(tensor):
            # The tensor itself would hold the node that saves its own output: a cycle that nothing frees.
            return tensor if tensor.is_leaf else tensor.detach()
        block = self._block_of(tensor)
        block.uses += 1
        place = (tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))
        return Saved(block, tensor.dtype, *place)

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, FakeTensor)
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= self.min_bytes
            and not self._keeps(tensor)
        )

    def _block_of(self, tensor: Tensor, keep: int | None = None) -> Block:
        """The block of the tensor's storage: a new one unless these very contents are offloaded already.

        `keep`: storages that stay on the device, in place of `keep_last`."""
        source = StorageWeakRef(tensor.untyped_storage())
        key = (source.cdata, tensor._version)
        known = self._known.get(key)
        # A weak reference keeps the storage's address from being given to another one.
        if known is not None and (block := known()) is not None and not block.source.expired():
            return block
        flat = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        block = Block(self, key, source, flat)
        block.host, busy = self.pool.take(block.num_bytes)
        block.out = self.engine.copy_out(block.on_host(), flat, busy)
        self.traffic.out_bytes += block.num_bytes
        reference = weakref.ref(block)
        block.previous, self._newest, self._known[key] = self._newest, reference, reference
        self._leaving.append(reference)
        self._retire_all_but(self._keep_last if keep is None else keep)
        self._spill(reference)
        return block

    def _retire_all_but(self, keep: int) -> None:
        while len(self._leaving) > keep:
            self._retire(self._leaving.popleft()())

    def _retire(self, block: Block | None) -> None:
        """Let go of the device memory of a block that nobody has fetched back."""
        if block is not None and block.back is None:
            self._drop_device(block)

    def _drop_device(self, block: Block) -> None:
        if block.device is not None:
            # Whoever gets this memory next must not write it while it is still being copied.
            self.engine.wait(block.out)
            self.engine.wait(block.back)
            block.device = None

    # Backward: back.

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """The tensor that was packed, on its device."""
        if isinstance(saved, Tensor):
            return saved
        block = saved.block
        if block.device is None:
            self._fetch(block)
        self.engine.wait(block.back)
        assert block.device is not None, "A fetched block is on the device."
        flat = block.device
        block.uses -= 1
        if block.uses <= 0:
            self._drop_device(block)
        before = block.previous() if block.previous is not None and self._fetches_ahead else None
        if before is not None and before.device is None and before.uses > 0:
            self._fetch(before)
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def _fetch(self, block: Block) -> None:
        if block.host is None:
            self._load(block)
        block.device = self.engine.allocate_device(*block.place)
        block.back = self.engine.copy_back(block.device, block.on_host(), block.out)
        self.traffic.back_bytes += block.num_bytes

    def forget(self, block: Block) -> None:
        """Recycle the host memory of a block that autograd no longer holds."""
        self._drop_device(block)
        if block.host is not None:
            self.pool.give_back(block.host, block.out if block.back is None else block.back)
        known = self._known.get(block.key)
        if known is not None and known() is None:
            del self._known[block.key]

    # Disk.

    def _spill(self, newest: weakref.ref[Block]) -> None:
        """Write the oldest blocks until the host holds no more than it may."""
        if self._disk is None:
            return
        host_acts("activations are written to a disk")
        self._oldest.append(newest)
        self._collect(wait=False)
        leaving_bytes = sum(host.numel() for _, host in self._writing)
        while self.pool.used_bytes - leaving_bytes > self._host_limit_bytes and self._oldest:
            block = self._oldest[0]()
            if block is not None and block.device is not None:
                break
            self._oldest.popleft()
            if block is not None and block.host is not None:
                self.engine.settle(block.out)
                block.stored = self._disk.write(block.host[: block.num_bytes])
                self._writing.append((block.stored, block.host))
                leaving_bytes += block.host.numel()
                block.host = None
        self._collect(wait=self.pool.used_bytes > self._host_limit_bytes)

    def _collect(self, *, wait: bool) -> None:
        """Take back the host memory of blocks that are written; wait for the oldest of them if need be."""
        while self._writing and self._writing[0][0].is_written(wait=wait):
            self.pool.give_back(self._writing.popleft()[1], None)
            wait = wait and self.pool.used_bytes > self._host_limit_bytes

    def _load(self, block: Block) -> None:
        assert block.stored is not None, "A block is on the device, on the host or on disk."
        block.host, busy = self.pool.take(block.num_bytes)
        self.engine.settle(busy)
        block.stored.read_into(block.host[: block.num_bytes])
        block.out = None
