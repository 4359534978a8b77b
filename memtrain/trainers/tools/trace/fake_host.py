"""The host of a traced CUDA run: fake `meta` tensors, which the device's count does not see."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from memtrain.trainers.model.offload.copy_engines import Ticket

HOST = "meta"
"""Device that plays the host's memory."""


class TracedHost:
    """Copies at once between the device and the host, as far as memory goes.

    A CUDA run lets go of device memory at the same lines: its streams wait, its Python does not.
    """

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Host memory without data."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=HOST)

    def allocate_device(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Device memory without data."""
        return torch.empty(size, dtype=dtype, device=device)

    def copy_out(self, host: Tensor, device: Tensor, after: Ticket) -> Ticket:
        """Nothing is made by a copy."""

    def copy_back(self, device: Tensor, host: Tensor, after: Ticket) -> Ticket:
        """Nothing is made by a copy."""

    def wait(self, ticket: Ticket) -> None:
        """Nothing to wait for."""

    def settle(self, ticket: Ticket) -> None:
        """Nothing to wait for."""


def bytes_on_host(tensors: Iterable[Tensor]) -> int:
    """Bytes of the given tensors in the host's memory, each storage once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == HOST
    }
    return sum(storages.values())
