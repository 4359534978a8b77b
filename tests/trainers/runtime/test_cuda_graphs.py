"""Random states within a CUDA graph: what a replay draws, on a model of the generators of a device.

The model is that of aten/src/ATen/cuda/CUDAGeneratorImpl.cpp: a kernel takes (seed, offset) and moves the
offset; a captured one takes those of its state at the start of the replay, and how far the graph has moved
it before.
"""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn import Linear
from torch.utils.checkpoint import checkpoint

from memtrain.trainers.runtime import random_states as states_module
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs
from memtrain.trainers.runtime.random_states import own_states, random_states, restored

CUDA = torch.device("cuda")
DRAWS = 4


class State:
    def __init__(self, seed: int, offset: int) -> None:
        self.seed, self.offset, self.within = seed, offset, 0


class Generator:
    """A handle of a state; `device` is the one whose state captured kernels ask."""

    capturing: "Graph | None" = None

    def __init__(self, state: State) -> None:
        self.state = state

    def initial_seed(self) -> int:
        return self.state.seed

    def manual_seed(self, seed: int) -> "Generator":
        assert Generator.capturing is None, "No capture seeds."
        self.state.seed, self.state.offset = seed, 0
        return self

    def get_offset(self) -> int:
        return self.state.offset

    def set_offset(self, offset: int) -> None:
        assert Generator.capturing is None, "No capture sets an offset."
        self.state.offset = offset

    def graphsafe_get_state(self) -> "Generator":
        return Generator(self.state)

    def graphsafe_set_state(self, other: "Generator") -> None:
        self.state = other.state

    def clone_state(self) -> "Generator":
        return Generator(State(self.state.seed, self.state.offset))


class Graph:
    def __init__(self) -> None:
        self.states: dict[State, int] = {}
        self.kernels: list[Callable[[], None]] = []

    def register_generator_state(self, generator: Generator) -> None:
        assert Generator.capturing is None, "Cannot register the state during capturing stage."
        self.states[generator.state] = 0

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.register_generator_state(DEVICE)
        for state in self.states:
            state.within = 0
        Generator.capturing = self

    def capture_end(self) -> None:
        Generator.capturing = None
        self.states = {state: state.within for state in self.states}

    def replay(self) -> None:
        starts = {state: (state.seed, state.offset) for state in self.states}
        for state, moved in self.states.items():
            state.offset += moved
        self.starts = starts
        for kernel in self.kernels:
            kernel()


DEVICE = Generator(State(7, 40))


def kernel(out: list[tuple[int, int]]) -> None:
    """Draws some numbers on the device: which ones is told by (seed, offset)."""
    state, graph = DEVICE.state, Generator.capturing
    if graph is None:
        out.append((state.seed, state.offset))
        state.offset += DRAWS
        return
    assert state in graph.states, "Offset increment outside graph capture: the state is not registered."
    within = state.within
    state.within += DRAWS

    def start() -> None:
        seed, offset = graph.starts[state]
        out.append((seed, offset + within))

    graph.kernels.append(start)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def stream(of: object):
        yield

    class Read:
        def __init__(self) -> None:
            self.cpu, self.at = torch.get_rng_state(), (DEVICE.initial_seed(), DEVICE.get_offset())

        def restore(self) -> None:
            torch.set_rng_state(self.cpu)
            DEVICE.manual_seed(self.at[0]).set_offset(self.at[1])

    def seeded(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        DEVICE.manual_seed(seed)

    fakes = {
        "graph_pool_handle": lambda: 0,
        "CUDAGraph": Graph,
        "Stream": lambda: 0,
        "stream": stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "default_generators": (DEVICE,),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for module in ("random_states", "cuda_graphs"):
        monkeypatch.setattr(f"memtrain.trainers.runtime.{module}.read_states", lambda device: Read())
    monkeypatch.setattr(states_module, "seed_torch", seeded)


def computed_again(out: list[tuple[int, int]]) -> None:
    """Two layers with draws, then their backward passes, each of which draws the same numbers again."""
    noted = []
    for _ in range(2):
        noted.append(random_states(CUDA))
        kernel(out)
        kernel(out)
    kernel(out)
    for states in reversed(noted):
        with restored(CUDA, is_on=True):
            states.restore()
            kernel(out)
            kernel(out)
        kernel(out)


def of_their_own(out: list[tuple[int, int]]) -> None:
    """Slices with states of their own, gone through twice; one of them is never returned to."""
    states = [own_states(CUDA) for _ in range(3)]
    for _ in range(2):
        with restored(CUDA, is_on=True):
            for one in states[:2]:
                one.restore()
                kernel(out)
        kernel(out)


def noted_within(out: list[tuple[int, int]]) -> None:
    """A place is noted behind a return, and returned to."""
    first = random_states(CUDA)
    kernel(out)
    first.restore()
    kernel(out)
    second = random_states(CUDA)
    kernel(out)
    second.restore()
    kernel(out)


PASSES = {"computed again": computed_again, "of their own": of_their_own, "noted within": noted_within}


@pytest.mark.parametrize("name", PASSES)
def test_a_replay_draws_what_the_pass_draws(name: str):
    """From the seed and place of the generators then; both go on as after the pass."""
    run, graphs, out = PASSES[name], CudaGraphs(), []
    start = None
    for seed in (3, 4, 5):
        for generator in (torch.default_generator, DEVICE):
            generator.manual_seed(seed)
        DEVICE.set_offset(8 * seed)
        before = torch.get_rng_state()
        expected: list[tuple[int, int]] = []
        by_hand = partial(run, expected)
        if start is None:
            assert graphs.rehearse(by_hand) == ""
        else:
            by_hand()
        after = (torch.get_rng_state(), DEVICE.initial_seed(), DEVICE.get_offset())
        torch.set_rng_state(before)
        DEVICE.manual_seed(seed).set_offset(8 * seed)
        start = start or graphs.record(lambda: run(out))
        assert (DEVICE.initial_seed(), DEVICE.get_offset()) == (seed, 8 * seed), "recording draws nothing"
        out.clear()
        start()
        assert out == expected
        assert torch.equal(torch.get_rng_state(), after[0])
        assert (DEVICE.initial_seed(), DEVICE.get_offset()) == after[1:]
    assert len(set(out)) < len(out), "some numbers are drawn twice"


def test_a_pass_that_returns_must_have_been_rehearsed():
    with pytest.raises(RuntimeError, match="computed once right before"):
        CudaGraphs().record(lambda: computed_again([]))


def test_a_pass_that_returns_to_others_than_its_rehearsal_is_not_recorded():
    graphs = CudaGraphs()
    graphs.rehearse(lambda: computed_again([]))
    state = DEVICE.state
    with pytest.raises(RuntimeError, match="than the one before it"):
        graphs.record(lambda: noted_within([]))
    assert DEVICE.state is not state or Generator.capturing is None


def test_layers_that_are_computed_again_note_their_states_so(monkeypatch: pytest.MonkeyPatch):
    """Not by torch's own way, which reads and sets a generator that is captured."""
    from memtrain.trainers.model.offload import checkpointing

    asked = []
    monkeypatch.setattr(
        checkpointing,
        "checkpoint",
        lambda *args, **kwargs: asked.append(kwargs) or checkpoint(*args, **kwargs),
    )
    layer = Linear(2, 2)
    checkpointing.recompute(layer, torch.ones(1, 2)).sum().backward()
    assert [one["preserve_rng_state"] for one in asked] == [False]
