"""Captured passes: a token's kernels are recorded once and started by a single call, as CUDA graphs do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memtrain.errors import first_line_of

Run = Callable[[], None]

PUTS = (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)
"""Indexed writes. A number of Python (`x[rows, places] = True`) reaches them as a tensor of the host, which
torch copies to the device, and waits; elsewhere such a number is an argument of the kernel."""


class Recorder(Protocol):
    """Records a function without arguments or results; the recording starts the same kernels again.

    Tensors keep their places in memory, numbers of Python are those of the recording. Recording computes
    nothing.
    """

    def rehearse(self, run: Run) -> str:
        """Compute `run` without recording it; the reason why it cannot be recorded, where it shows one."""
        ...

    def record(self, run: Run) -> Run:
        """The recording of `run`.

        Raises: RuntimeError when it waits for the device, or cannot be recorded.
        """
        ...

    def release(self) -> None:
        """Free the memory of recordings; none is started any more."""
        ...


SYNCHRONIZES = "synchronizing CUDA operation"
"""Words of torch's warning about an operator that waits for the device (c10/cuda/CUDAFunctions.cpp)."""


class CudaGraphs:
    """CUDA graphs that share one pool of memory: none keeps a result between two starts.

    Captured by hand: `torch.cuda.graph` empties the caches of the device and of pinned memory before each
    capture, and leaves its stream the current one where the end of a capture fails.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._is_new = True
        """Nothing was captured into the pool yet."""

    def rehearse(self, run: Run) -> str:
        """Whether `run` waits for the device, as torch warns of it: a capture that breaks off costs more."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = any(SYNCHRONIZES in str(one.message) for one in told)
        return "it waits for the device" if waits else ""

    def record(self, run: Run) -> Run:
        """A graph of the current device."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if self._is_new:
            # A capture gets no memory that the allocator keeps for others, and cannot free it.
            torch.cuda.empty_cache()
            self._is_new = False
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except BaseException:
            self._abandon()
            raise
        return graph.replay

    def release(self) -> None:
        """Return the pool to the device: the next pass of the trainer needs its room."""
        torch.cuda.empty_cache()
        self._pool, self._is_new = torch.cuda.graph_pool_handle(), True

    def _abandon(self) -> None:
        """Undo what a capture that broke off leaves behind: torch undoes nothing where ending it fails.

        The allocator would free nothing any more, and the first random number on the device would raise.

        Source: `CUDAGraph::capture_end` (aten/src/ATen/cuda/CUDAGraph.cpp), which returns at its first fault.
        """
        device = torch.cuda.current_device()
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # pyright: ignore
            with suppress(RuntimeError):  # It had come so far.
                end(device, self._pool)
        generator = torch.cuda.default_generators[device]
        # A copy of the state, which no capture waits for.
        generator.graphsafe_set_state(generator.clone_state())
        self._pool, self._is_new = torch.cuda.graph_pool_handle(), True


class OperatorTape:
    """A tape of the operators on a CPU, with the very tensors, for tests of CUDA graphs' effects.

    A number that Python changes between two starts, a tensor that is made anew, a wait for the device, or a
    number that the host would have to send shows here as it would there.
    """

    def __init__(self) -> None:
        self.num_records = 0
        self.num_starts = 0

    def rehearse(self, run: Run) -> str:
        """Nothing is found: the tape itself breaks off without harm."""
        run()
        return ""

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
        self.of_python: list[Tensor] = []
        """Tensors that torch made of Python's numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a recording cannot wait for a number")
        if func is torch.ops.aten.lift_fresh.default:
            self.of_python.append(args[0])
            is_sent = args[0].dim() > 0
        else:
            is_sent = func in PUTS and any(args[2] is one for one in self.of_python)
        if is_sent:
            raise RuntimeError("a recording cannot wait for the host to send numbers")
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
    is_rehearsed: bool = False
    """A pass was computed by hand, and nothing in it speaks against a recording."""

    def rehearse(self, run: Run) -> None:
        """Compute `run`, and record none of its kind where it cannot be recorded."""
        self.recorder = self.recorder or self.make()
        reason = self.recorder.rehearse(run)
        self.is_rehearsed = not reason
        if reason:
            self.give_up(reason)

    def record(self, run: Run) -> Run | None:
        """The recording of `run`; None where there is none to be had."""
        if not self.is_on:
            return None
        try:
            self.recorder = self.recorder or self.make()
            return self.recorder.record(run)
        except RuntimeError as error:
            first = _first_of(error)
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            self.give_up(first_line_of(first))
            return None

    def give_up(self, reason: str) -> None:
        """Record nothing from now on, and tell it."""
        self.is_on = False
        self.emit(
            "the passes of this model that write a token cannot be captured as CUDA graphs: without them the "
            f"completions are the same, and take longer ({reason})"
        )

    def release(self) -> None:
        """Give back the memory of all recordings."""
        if self.recorder is not None:
            self.recorder.release()


def _first_of(error: BaseException) -> BaseException:
    """The error that began it: the end of a broken capture raises another over it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error
