"""Captured passes: a token's kernels are recorded once and started by a single call, as CUDA graphs do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Run = Callable[[], None]


class Recorder(Protocol):
    """Records a function without arguments or results; the recording starts the same kernels again.

    Tensors keep their places in memory, numbers of Python are those of the recording. Recording computes
    nothing.
    """

    def record(self, run: Run) -> Run:
        """The recording of `run`.

        Raises: RuntimeError when it waits for the device, or cannot be recorded.
        """
        ...

    def release(self) -> None:
        """Free the memory of recordings; none is started any more."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: none keeps a result between two starts."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Run) -> Run:
        """A graph of the current device."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def release(self) -> None:
        """Return the pool to the device: the next pass of the trainer needs its room."""
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()


class OperatorTape:
    """A tape of the operators on a CPU, with the very tensors, for tests of CUDA graphs' effects.

    A number that Python changes between two starts, a tensor that is made anew, or a wait for the device
    shows here as it would there.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self.num_starts = 0

    def record(self, run: Run) -> Run:
        """A tape of the operators of `run`, whose writes are undone."""
        tape = _Tape()
        try:
            with _disable_current_modes(), tape:
                run()
        finally:
            tape.undo()
        self.num_records += 1

        def start() -> None:
            self.num_starts += 1
            with _disable_current_modes():
                tape.start()

        return start

    def release(self) -> None:
        """Nothing is held."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a recording cannot wait for a number")
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.setdefault(id(given), (given, given.clone()))
        made = func(*args, **kwargs)
        self.steps.append((func, args, kwargs, made))
        return made

    def undo(self) -> None:
        """Undo the writes."""
        for tensor, held in reversed(self.before.values()):
            tensor.copy_(held)

    def start(self) -> None:
        """Compute everything again, into the tensors of the recording."""
        for func, args, kwargs, made in self.steps:
            if func.is_view:
                continue
            again = func(*args, **kwargs)
            if any(argument.alias_info is not None for argument in func._schema.arguments):
                continue
            for old, new in zip(_tensors(made), _tensors(again), strict=True):
                old.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, tuple | list) else []


@dataclass(slots=True)
class DecodeGraphs:
    """Recordings of a sampler, until one fails: the same tokens are written without them from then on."""

    make: Callable[[], Recorder]
    emit: Callable[[str], None]
    recorder: Recorder | None = None
    is_on: bool = True

    def record(self, run: Run) -> Run | None:
        """The recording of `run`; None where there is none to be had."""
        if not self.is_on:
            return None
        try:
            self.recorder = self.recorder or self.make()
            return self.recorder.record(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.is_on = False
            self.emit(
                "the passes of this model that write a token cannot be captured as CUDA graphs: the same "
                f"completions without them, slower ({str(error).splitlines()[0]})"
            )
            return None

    def release(self) -> None:
        """Give back the memory of all recordings."""
        if self.recorder is not None:
            self.recorder.release()
