"""The processes of a run: the rank of this process, and agreement between all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from memtrain.trainers.runtime.rank_messages import from_bytes, to_bytes

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Place of this process among all of a run. Every rank must call every method, in the same order."""

    rank: int = 0
    """Number of this process, over all nodes."""
    world: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of this process on its node."""
    device: torch.device = torch.device("cpu")
    """Device on which small tensors are put to be sent."""
    num_sharing: int = 1
    """Number of neighbours that hold the same rows, a slice of each (context parallelism)."""

    @property
    def replica(self) -> int:
        """Part of a step's rows that this rank has, alone or together with its neighbours."""
        return self.rank // self.num_sharing

    @property
    def num_replicas(self) -> int:
        """Into how many parts the rows of a step are dealt."""
        return self.world // self.num_sharing

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over the ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """The largest of each value over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        return self.max({"flag": float(flag)})["flag"] > 0

    def gather(self, item: Item) -> list[Item]:
        """The item of every rank, by rank, on every rank; of types that rank_messages.py can send."""
        if self.world == 1:
            return [item]
        mine = self._message(to_bytes(item))
        size = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        sizes = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size)
        lengths = [int(one) for one in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(mine)] = mine
        messages = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(messages, padded)
        return [self._item(one[:length]) for one, length in zip(messages, lengths, strict=True)]

    def broadcast(self, item: Item) -> Item:
        """The item of the main rank."""
        if self.world == 1:
            return item
        message = self._message(to_bytes(item) if self.is_main else b"")
        size = torch.tensor([len(message)], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        if not self.is_main:
            message = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(message, src=0)
        return item if self.is_main else self._item(message)

    def _message(self, raw: bytes) -> torch.Tensor:
        """uint8 [bytes] where it is sent from."""
        message = torch.empty(len(raw), dtype=torch.uint8)
        message.numpy()[:] = np.frombuffer(raw, np.uint8)
        return message.to(self.device)

    def _item(self, message: torch.Tensor) -> Any:
        return from_bytes(message.cpu().numpy().tobytes())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def _reduce(self, values: Mapping[str, float], how: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.world == 1:
            return dict(values)
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return dict(zip(values, tensor.tolist(), strict=True))


def current_ranks(num_sharing: int = 1) -> Ranks:
    """The ranks of the process group that accelerate or torchrun has set up; one rank when there is none.

    Small tensors go through the CPU with gloo, through this rank's CUDA device with nccl.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(local_rank=local_rank)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else "cpu"
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, torch.device(device), num_sharing)
