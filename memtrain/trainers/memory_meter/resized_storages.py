"""Live bytes where storages are emptied and filled in place, as FSDP2 does with the weights it gathers."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from memtrain.trainers.memory_meter.live_tensors import Living, TensorPeak


class ResizedPeak(TensorPeak):
    """Peak of live tensors as TensorPeak counts it, with storages that are resized inside: a dispatch mode
    sees nothing of that.

    A storage that was there before is counted by how much it grew.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self._grown: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def __enter__(self) -> ResizedPeak:
        plain = self._plain = UntypedStorage.resize_
        counting = self

        def resize(storage: UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            made = plain(storage, size)
            if storage.device.type == counting.device_type:
                counting._resized(storage, size - before)
            return made

        UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        UntypedStorage.resize_ = self._plain
        super().__exit__(*error)

    def count(self, tensor: Tensor, name: str = "") -> None:
        """Count a tensor as TensorPeak does; a storage that grew before it was seen is not counted twice."""
        entry = self._grown.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[0]() is not tensor.untyped_storage():
            super().count(tensor, name)

    def _resized(self, storage: UntypedStorage, more: int) -> None:
        key = storage._cdata
        entry = self._grown.get(key)
        known = entry[1] if entry is not None and entry[0]() is storage else 0
        self._grown[key] = (weakref.ref(storage), known + more)
        if more > 0:
            self._allocated(more, "")
        else:
            self._freed(-more, 0)

    def _storage_died(self, gone: Living) -> None:
        entry = self._grown.pop(gone.key, None)
        gone.num_bytes += 0 if entry is None else entry[1]
        super()._storage_died(gone)


def counting_mode(*, in_shards: bool) -> type[TensorPeak]:
    """Counter of live tensors of a run on a CPU."""
    return ResizedPeak if in_shards else TensorPeak
