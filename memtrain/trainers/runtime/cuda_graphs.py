"""Passes whose kernels are recorded once and started by a single call: CUDA graphs over one pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from memtrain.trainers.runtime.device_waits import HostSide, recorded_by
from memtrain.trainers.runtime.random_states import RandomStates, drawn_states, noted_by, read_states

Run = Callable[[], None]


class Recording(Protocol):
    """Operators between `begin` and `end`; `replay` starts the same ones again, in the same memory.

    Tensors keep their places, numbers of Python are those of the recording. Recording computes nothing: what
    is made inside holds nothing before the first replay, and what is written there is as it was. Random
    numbers are drawn from the generators as they stand at a replay, and move them as the pass itself does.
    """

    def begin(self) -> None:
        """Record from here on."""
        ...

    def end(self) -> None:
        """Record no more.

        Raises: RuntimeError where the recording cannot be ended; it is abandoned then.
        """
        ...

    def abandon(self) -> None:
        """End a recording that an error broke off, and leave nothing of it behind."""
        ...

    def replay(self) -> None:
        """Start the operators again."""
        ...


class Recorder(Protocol):
    """Makes recordings that share one pool: what one of them keeps, the next does not take."""

    def rehearse(self, run: Run) -> str:
        """Compute `run` without recording it; the reason why it cannot be recorded, where it shows one.

        Where `run` returns to random states, it is rehearsed right before it is recorded.
        """
        ...

    def recording(self) -> Recording:
        """A recording that has not begun."""
        ...

    def record(self, run: Run) -> Run:
        """The replay of a recording of `run`.

        Raises: RuntimeError when it waits for the device, or cannot be recorded.
        """
        ...

    def release(self) -> None:
        """Free the memory of recordings; none is started any more."""
        ...


def recorded(recording: Recording, run: Run) -> Run:
    """The replay of a recording of `run`.

    Raises: RuntimeError when it waits for the device, or cannot be recorded.
    """
    recording.begin()
    try:
        run()
    except BaseException:
        recording.abandon()
        raise
    recording.end()
    return recording.replay


SYNCHRONIZES = "synchronizing CUDA operation"
"""Words of torch's warning about an operator that waits for the device (c10/cuda/CUDAFunctions.cpp)."""


class CudaGraphs:
    """CUDA graphs that share one pool of memory: none keeps a result between two starts.

    Captured by hand: `torch.cuda.graph` empties the caches of the device and of pinned memory before each
    capture, and leaves its stream the current one where the end of a capture fails. `stream`: the one to
    capture on, where autograd's nodes of the passes were made on it; else one of their own.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream or torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.is_new = True
        """Nothing was captured into the pool yet."""
        self._course: Course | None = None

    def rehearse(self, run: Run) -> str:
        """Whether `run` waits for the device, as torch warns of it: a capture that breaks off costs more."""
        before = torch.cuda.get_sync_debug_mode()
        self._course = Course(_current_generator())
        with warnings.catch_warnings(record=True) as told, noted_by(self._course):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        self._course.close()
        waits = any(SYNCHRONIZES in str(one.message) for one in told)
        return "it waits for the device" if waits else ""

    def recording(self) -> CudaGraph:
        """A graph of the current device."""
        course, self._course = self._course, None
        return CudaGraph(self, course)

    def record(self, run: Run) -> Run:
        """A graph of the current device."""
        return recorded(self.recording(), run)

    def release(self) -> None:
        """Return the pool to the device: the next pass of the trainer needs its room."""
        torch.cuda.empty_cache()
        self.pool, self.is_new = torch.cuda.graph_pool_handle(), True


class CudaGraph:
    """A CUDA graph of a recorder's pool."""

    def __init__(self, owner: CudaGraphs, course: Course | None) -> None:
        self._owner = owner
        self._graph = torch.cuda.CUDAGraph()
        self._draws = None if course is None or not course.returns else Draws(course, self._graph)
        self.host = HostSide()
        self._inside = ExitStack()

    def begin(self) -> None:
        """Start the capture."""
        owner = self._owner
        torch.cuda.synchronize()
        if owner.is_new:
            # A capture gets no memory that the allocator keeps for others, and cannot free it.
            torch.cuda.empty_cache()
            owner.is_new = False
        self._inside.enter_context(torch.cuda.stream(owner.stream))
        try:
            self._graph.capture_begin(pool=owner.pool, capture_error_mode="thread_local")
            self._inside.enter_context(noted_by(self._draws or NO_COURSE))
            self._inside.enter_context(recorded_by(self.host))
        except BaseException:
            self.abandon()
            raise

    def end(self) -> None:
        """End the capture."""
        try:
            self.host.close()
        except BaseException:
            self.abandon()
            raise
        try:
            self._leave()
            self._graph.capture_end()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._inside.close()

    def abandon(self) -> None:
        """End a capture that broke off: torch undoes nothing where ending it fails."""
        try:
            with suppress(RuntimeError):
                self._graph.capture_end()
            self._abandon()
        finally:
            self._inside.close()

    def replay(self) -> None:
        """Start the kernels."""
        self.host.start(self._start)

    def _start(self) -> None:
        with nullcontext() if self._draws is None else self._draws.of_a_replay():
            self._graph.replay()

    def _leave(self) -> None:
        if self._draws is not None:
            self._draws.leave()

    def _abandon(self) -> None:
        """Undo what a capture that broke off leaves behind.

        The allocator would free nothing any more, and the first random number on the device would raise.

        Source: `CUDAGraph::capture_end` (aten/src/ATen/cuda/CUDAGraph.cpp), which returns at its first fault.
        """
        owner, device = self._owner, torch.cuda.current_device()
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # pyright: ignore
            with suppress(RuntimeError):  # It had come so far.
                end(device, owner.pool)
        self._leave()
        generator = _current_generator()
        # A copy of the state, which no capture waits for.
        generator.graphsafe_set_state(generator.clone_state())
        owner.pool, owner.is_new = torch.cuda.graph_pool_handle(), True


def _current_generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


# Random states that a pass returns to. A captured kernel takes its numbers from a generator's seed, the
# generator's place at the start of the replay, and how many the graph has drawn from it before: the host
# cannot put it back within a graph. So every return within a pass gets a generator of its own, registered
# with the graph, which a replay puts at the place where the pass would have returned to. The places are those
# of a rehearsal, counted from where its draws began.


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the numbers of a stretch of a pass: `draws` numbers after the return (0: none) began."""

    stretch: int
    draws: int


@dataclass(eq=False)
class Course:
    """The random states of a rehearsed pass: where each was noted, and which of them it returned to."""

    generator: torch.Generator
    notes: list[Place | None] = field(default_factory=list)
    """In the order of the pass; None: the states were drawn."""
    returns: list[int] = field(default_factory=list)
    """The note of each return: after it stretch 1, 2, .. begins."""
    last: Place = Place(0, 0)

    def __post_init__(self) -> None:
        self._began = self.generator.get_offset()

    def states_here(self, device: torch.device) -> RandomStates:
        """Read, with the place."""
        self.notes.append(self._place())
        return Rehearsed(self, len(self.notes) - 1, read_states(device))

    def states_drawn(self, device: torch.device) -> RandomStates:
        """Drawn."""
        self.notes.append(None)
        return Rehearsed(self, len(self.notes) - 1, drawn_states(device))

    def returned(self, note: int) -> None:
        """The pass has returned to the states of a note."""
        self.returns.append(note)
        self._began = self.generator.get_offset()

    def close(self) -> None:
        """The pass is over."""
        self.last = self._place()

    def _place(self) -> Place:
        return Place(len(self.returns), self.generator.get_offset() - self._began)


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsed:
    """States of a rehearsal."""

    course: Course
    note: int
    states: RandomStates

    def restore(self) -> None:
        """Go on from them, and tell the course."""
        self.states.restore()
        self.course.returned(self.note)


class Draws:
    """The generators of a graph: the device's own, and one for each return within the pass."""

    def __init__(self, course: Course, graph: torch.cuda.CUDAGraph) -> None:
        self._course = course
        self._own = course.generator
        self._home = self._own.graphsafe_get_state()
        self._stretches = [self._own.clone_state() for _ in course.returns]
        for one in self._stretches:
            graph.register_generator_state(one)
        self._num_notes = self._num_returns = 0

    def states_here(self, device: torch.device) -> RandomStates:
        """The next note of the course."""
        return self._noted(is_drawn=False)

    def states_drawn(self, device: torch.device) -> RandomStates:
        """The next note of the course; a replay draws the number."""
        return self._noted(is_drawn=True)

    def returned(self, note: int) -> None:
        """Captured kernels draw from the generator of the next stretch from now on."""
        if self._num_returns == len(self._stretches) or self._course.returns[self._num_returns] != note:
            raise RuntimeError(OTHER_COURSE)
        self._own.graphsafe_set_state(self._stretches[self._num_returns])
        self._num_returns += 1

    def leave(self) -> None:
        """The device's generator is itself again."""
        self._own.graphsafe_set_state(self._home)

    @contextmanager
    def of_a_replay(self) -> Iterator[None]:
        """Put the generators where the pass returns to; afterwards the device's own where the pass ends."""
        starts = [(self._own.initial_seed(), self._own.get_offset())]
        known: list[tuple[int, int]] = []

        def at(place: Place) -> tuple[int, int]:
            seed, offset = starts[place.stretch]
            return seed, offset + place.draws

        notes = iter(self._course.notes)
        for note, generator in zip(self._course.returns, self._stretches, strict=True):
            known += [_start(place, at) for place in islice(notes, max(0, note + 1 - len(known)))]
            _put(generator, known[note])
            starts.append(known[note])
        for place in notes:
            # Drawn and not returned to.
            _start(place, at)
        yield
        _put(self._own, at(self._course.last))

    def _noted(self, *, is_drawn: bool) -> RandomStates:
        notes = self._course.notes
        if self._num_notes == len(notes) or (notes[self._num_notes] is None) != is_drawn:
            raise RuntimeError(OTHER_COURSE)
        self._num_notes += 1
        return Captured(self, self._num_notes - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """States of a pass that is captured."""

    draws: Draws
    note: int

    def restore(self) -> None:
        """Go on from them."""
        self.draws.returned(self.note)


def _start(place: Place | None, at: Callable[[Place], tuple[int, int]]) -> tuple[int, int]:
    return (int(torch.randint(2**62, (1,))), 0) if place is None else at(place)


def _put(generator: torch.Generator, place: tuple[int, int]) -> None:
    seed, offset = place
    generator.manual_seed(seed)
    generator.set_offset(offset)


OTHER_COURSE = "the pass returns to other random states than the one before it"


class _NoCourse:
    """A pass that was not rehearsed: it may note states, and return to none of them."""

    def states_here(self, device: torch.device) -> RandomStates:
        return self

    def states_drawn(self, device: torch.device) -> RandomStates:
        return self

    def restore(self) -> None:
        raise RuntimeError(
            "a pass that returns to random states is computed once right before it is captured"
        )


NO_COURSE: Any = _NoCourse()
