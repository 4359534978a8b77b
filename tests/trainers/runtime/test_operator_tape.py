"""The tape of operators: it does what a CUDA graph does, and breaks off where a capture would."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from memtrain.trainers.model.offload.checkpointing import recompute
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.runtime.operator_tape import OperatorTape
from memtrain.trainers.runtime.random_states import own_states, random_states, restored

CPU = torch.device("cpu")


class Pass:
    """Forward and backward of two maps on a fixed buffer, with what a treatment does to a layer."""

    def __init__(self, layer: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.x = torch.randn(4, 8)
        self.loss = torch.zeros(())
        self.layer = layer

    def __call__(self) -> None:
        x = self.x
        for layer in self.layers:
            x = self.layer(layer, x.tanh())
        loss = x.square().sum()
        loss.backward()
        self.loss.copy_(loss.detach())

    def numbers(self) -> list[Tensor]:
        return [self.loss.clone(), *(p.grad.clone() for p in self.layers.parameters() if p.grad is not None)]

    def fill(self, seed: int) -> None:
        """Other inputs, no gradients, and the generator at a state of its own."""
        torch.manual_seed(seed)
        self.x.copy_(torch.randn(4, 8))
        for parameter in self.layers.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


def noisy(layer: nn.Module, x: Tensor) -> Tensor:
    return dropout(layer(dropout(x, 0.4)), 0.3)


def at_own_states(layer: nn.Module, x: Tensor) -> Tensor:
    """The same numbers twice, of states that a draw decides, and the generator goes on behind them."""
    states = own_states(CPU)
    with restored(CPU, is_on=True):
        states.restore()
        first = dropout(layer(x), 0.5)
        states.restore()
        second = dropout(layer(x), 0.5)
    return first * second + dropout(x, 0.5)


def offloaded(layer: nn.Module, x: Tensor) -> Tensor:
    return OFFLOADER.run_recomputed(layer, x)


OFFLOADER = Offloader(LazyEngine(), min_bytes=0, keep_last=0)

TREATMENTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda layer, x: layer(x),
    "dropout": noisy,
    "dropout, computed again": lambda layer, x: recompute(lambda one: noisy(layer, one), x),
    "states of its own": at_own_states,
    "on the host": offloaded,
    "in place, in views": lambda layer, x: (
        layer(x).clone().mul_(2.0).add_(x[:, :1]).view(2, 2, 8).transpose(0, 1).reshape(4, 8)
    ),
}


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_replay_has_the_bits_of_the_pass_on_other_inputs(treatment: str):
    """Loss and gradients, and the generator afterwards. Gradients are summed on those that are there."""
    step = Pass(TREATMENTS[treatment])
    step()
    before = step.numbers()
    replay = OperatorTape().record(step)
    for mine, earlier in zip(step.numbers(), before, strict=True):
        assert torch.equal(mine, earlier), "recording computes nothing"
    for seed in (1, 2):
        step.fill(seed)
        step()
        step()
        expected, after = step.numbers(), torch.get_rng_state()
        step.fill(seed)
        replay()
        replay()
        for mine, theirs in zip(step.numbers(), expected, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(torch.get_rng_state(), after)


def test_gradients_that_were_gone_are_of_the_recording_and_hold_nothing_before_it_starts():
    step = Pass()
    tape = OperatorTape()
    replay = tape.record(step)
    assert all(parameter.grad.isnan().all() for parameter in step.layers.parameters())
    step.fill(3)
    replay()
    replay()
    found = step.numbers()
    for parameter in step.layers.parameters():
        parameter.grad = None
    step()
    for mine, theirs in zip(found, step.numbers(), strict=True):
        assert torch.equal(mine, theirs), "each replay writes them anew"


def test_two_halves_are_recorded_one_after_the_other():
    """The second backs through what the first one made, and returns to random states of its replay."""
    layer, x, held = nn.Linear(8, 8), torch.randn(4, 8), {}

    def forward() -> None:
        held["y"] = recompute(lambda one: noisy(layer, one), x)

    def backward() -> None:
        held["y"].square().sum().backward()

    tape = OperatorTape()
    halves = [tape.record(forward), tape.record(backward)]
    for seed in (1, 2):
        x.copy_(torch.randn(4, 8))
        torch.manual_seed(seed)
        for half in halves:
            half()
        found = layer.weight.grad.clone()
        torch.manual_seed(seed)
        expected = torch.autograd.grad(noisy(layer, x).square().sum(), layer.weight)[0]
        assert torch.equal(found, expected)


def test_what_an_operator_is_given_to_write_into_is_undone_and_written_again():
    held, x = torch.ones(3), torch.ones(3)
    replay = OperatorTape().record(lambda: torch.add(x, 1.0, out=held))
    assert held.tolist() == [1.0] * 3
    x.fill_(4.0)
    replay()
    assert held.tolist() == [5.0] * 3


def test_a_list_of_tensors_that_an_operator_writes_is_undone_and_written_again():
    held = [torch.ones(3), torch.ones(2)]
    replay = OperatorTape().record(lambda: torch._foreach_add_(held, 1.0))
    assert [one.tolist() for one in held] == [[1.0] * 3, [1.0] * 2]
    replay()
    replay()
    assert [one.tolist() for one in held] == [[3.0] * 3, [3.0] * 2]


def test_a_tensor_that_was_let_go_is_named():
    held, out = {"x": torch.ones(7)}, torch.zeros(7)
    replay = OperatorTape().record(lambda: out.copy_(held["x"] * 2))
    replay()
    assert out.tolist() == [2.0] * 7
    held.clear()
    with pytest.raises(RuntimeError, match=r"reads a tensor \[7\] that was let go"):
        replay()


def test_a_table_that_is_kept_from_within_a_recording_holds_nothing():
    """On a GPU it would lie in the graph's memory, and be right by luck."""
    held: dict[str, Tensor] = {}
    OperatorTape().record(lambda: held.setdefault("table", torch.arange(3.0) * 2))
    assert held["table"].isnan().all()


def test_released_memory_is_not_started():
    tape, out = OperatorTape(), torch.zeros(1)
    replay = tape.record(lambda: out.add_(1.0))
    tape.release()
    with pytest.raises(RuntimeError, match="released"):
        replay()


X, MASK = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, True])
WAITS: dict[str, Callable[[], object]] = {
    "a number": lambda: X.sum().item(),
    "a truth": lambda: bool((X > 2).any()),
    "a list": lambda: X.tolist(),
    "an array": lambda: X.numpy(),
    "a copy to the host": lambda: X.cpu(),
    "a mask": lambda: X[MASK],
    "a mask to write at": lambda: X.clone().index_put_((MASK,), torch.zeros(())),
    "places of what is not 0": lambda: MASK.nonzero(),
    "different numbers": lambda: X.unique(),
    "different neighbours": lambda: X.unique_consecutive(),
    "repetitions": lambda: X.repeat_interleave(X.long()),
    "counts": lambda: X.long().bincount(),
    "equality": lambda: torch.equal(X, X),
    "a choice": lambda: X.masked_select(MASK),
    "numbers to send": lambda: torch.tensor([1.0, 2.0]),
    "a number to a device": lambda: torch.tensor(1.0, device=X.device),
    "a number like another": lambda: X.new_tensor(1.0),
    "a number to send": lambda: torch.zeros(3).index_put_((X.long() % 3,), torch.tensor(1.0)),
}


@pytest.mark.parametrize("kind", WAITS)
def test_a_pass_that_waits_breaks_off_and_leaves_everything_as_it_was(kind: str):
    tape, held = OperatorTape(), torch.zeros(3)
    state = torch.get_rng_state()

    def run() -> None:
        held.add_(torch.rand(3))
        WAITS[kind]()

    with pytest.raises(RuntimeError, match="a recording cannot wait"):
        tape.record(run)
    assert held.tolist() == [0.0] * 3
    assert torch.equal(torch.get_rng_state(), state)
    assert tape.num_records == 0
    WAITS[kind]()


def test_repetitions_whose_number_is_known_do_not_wait():
    OperatorTape().record(lambda: X.repeat_interleave(X.long(), output_size=6))


def test_states_are_read_as_ever_where_nothing_is_recorded():
    torch.manual_seed(1)
    states = random_states(CPU)
    first = torch.rand(3)
    states.restore()
    assert torch.equal(torch.rand(3), first)
