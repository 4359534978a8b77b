"""What stays of float32 numbers between steps, and moments in 8 bits: against whole copies and moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.trainers.optim import master_weights
from memtrain.trainers.optim.compressed_moments import (
    CompressedMoments,
    compress_first,
    compress_second,
    expand_first,
    expand_second,
)
from memtrain.trainers.optim.master_weights import MasterWeights


def weights(seed: int = 0) -> list[nn.Parameter]:
    """A matrix as a model has it, and a norm's ones, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(40, 33, generator=generator) * 0.02).bfloat16()
    return [nn.Parameter(matrix), nn.Parameter(torch.ones(7, dtype=torch.bfloat16))]


def stepping(
    parameters: list[nn.Parameter], form: str, *, compress: bool = False, lr: float = 1e-5, seed: int = 0
) -> Any:
    """AdamW over the float32 numbers of some parameters."""

    def build(groups: Any) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(groups, lr=lr, fused=True)
        return CompressedMoments(inner) if compress else inner

    return MasterWeights([{"params": parameters, "weight_decay": 0.1}], build, lr, form=form, seed=seed)


def train(parameters: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    """Steps on gradients that mostly agree."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = (torch.randn(parameter.shape, generator=generator) + 1).bfloat16()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def numbers(parameters: list[nn.Parameter], optimizer: Any) -> list[Tensor]:
    """What the optimizer steps."""
    return [optimizer.form.take(parameter).clone() for parameter in parameters]


def test_split_copies_are_whole_ones(monkeypatch: pytest.MonkeyPatch):
    """The same weights bit for bit, and the same numbers but for a unit in the last place of a tie."""
    monkeypatch.setattr(master_weights, "MASTER_BUCKET", 1)
    whole, split = weights(), weights()
    first, second = stepping(whole, "float32"), stepping(split, "split")
    train(whole, first, range(50))
    train(split, second, range(50))
    for a, b in zip(whole, split, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(numbers(whole, first), numbers(split, second), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=0)
    assert sum(held.nbytes for p in split for held in second.form.held(p).values()) == 2 * (40 * 33 + 7)


def test_a_number_between_two_weights_comes_back_a_unit_smaller():
    """1 + 2^-8 lies between 1 and 1 + 2^-7; to nearest even that is 1, and the rest needs 2^15 units."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = stepping([weight], "split")
    given = torch.tensor([1 + 2**-8, 1 + 2**-9])
    with torch.no_grad():
        optimizer.form.give(weight, given.clone())
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.form.take(weight).tolist() == [1 + 2**-8 - 2**-23, 1 + 2**-9]


def test_stochastic_rounding_is_right_on_average_where_nearest_loses_every_update():
    """200,000 weights of 1, moved by a 40th of a step 40 times: as far as one step, on average."""
    weight = nn.Parameter(torch.ones(200_000, dtype=torch.bfloat16))
    optimizer = stepping([weight], "stochastic")
    step = 2.0**-7 / 40
    with torch.no_grad():
        for _ in range(40):
            optimizer.form.give(weight, optimizer.form.take(weight) + step)
            assert torch.equal((torch.ones(1).bfloat16().float() + step).bfloat16(), torch.ones(1).bfloat16())
    moved = weight.double().mean().item() - 1
    # The deviation of a weight is below 1 % of one; of 200,000 of them, 2e-5.
    assert moved == pytest.approx(2.0**-7, abs=1e-4)
    assert set(weight.float().unique().tolist()) <= {1 + n * 2.0**-7 for n in range(12)}


def test_infinite_numbers_stay_infinite_and_exact_ones_exact():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = stepping([weight], "stochastic")
    with torch.no_grad():
        optimizer.form.give(weight, torch.tensor([float("inf"), -float("inf"), 0.5, -1.0]))
    assert weight.tolist() == [float("inf"), -float("inf"), 0.5, -1.0]


@pytest.mark.parametrize("form", ["split", "stochastic"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(form: str, compress: bool):
    whole, first = weights(), weights()
    one = stepping(whole, form, compress=compress, lr=1e-3, seed=2**62)
    train(whole, one, range(8))
    two = stepping(first, form, compress=compress, lr=1e-3, seed=2**62)
    train(first, two, range(3))
    state = two.state_dict()
    second = [nn.Parameter(p.detach().clone()) for p in first]
    three = stepping(second, form, compress=compress, lr=1e-3, seed=2**62)
    three.load_state_dict(state)
    train(second, three, range(3, 8))
    for a, b in zip(whole, second, strict=True):
        assert torch.equal(a, b)


def test_moments_come_back_within_half_a_level():
    """A level of the first is at most 2 / 127 of the group's largest (where softsign is flat), of the root
    of the second 1 / 255."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1000, generator=generator) * 1e-8
    largest = torch.nn.functional.pad(first, (0, 24)).view(-1, 32).abs().amax(1).repeat_interleave(32)[:1000]
    back = expand_first(*compress_first(first))
    assert float(((back - first).abs() / largest).max()) < 1 / 127
    second = first.square()
    back = expand_second(*compress_second(second))
    assert float(((back.sqrt() - second.sqrt()).abs() / largest).max()) <= 1 / 255 + 1e-6
    assert bool((back > 0).all())


def test_moments_of_nothing_are_nothing():
    assert expand_first(*compress_first(torch.zeros(5))).tolist() == [0.0] * 5
    assert expand_second(*compress_second(torch.zeros(5))).tolist() == [0.0] * 5


def test_compressed_moments_take_two_and_a_quarter_bytes_and_move_weights_alike():
    whole, small = weights(), weights()
    first, second = stepping(whole, "float32", lr=1e-3), stepping(small, "float32", compress=True, lr=1e-3)
    train(whole, first, range(30))
    train(small, second, range(30))
    held = second.state[second._masters[0][0]]
    assert sum(t.nbytes for name, t in held.items() if name != "step") == pytest.approx(
        2.25 * 40 * 33, rel=0.01
    )
    start = weights()[0].detach().float()
    far = [numbers(p, o)[0] - start for p, o in ((whole, first), (small, second))]
    assert float((far[1] - far[0]).norm() / far[0].norm()) < 0.02


@pytest.mark.parametrize("step", [0, 1])
def test_compressed_moments_go_on_where_a_step_breaks_off(step: int):
    """The inner step writes one tensor and fails; the step is made again for the other."""

    class Breaking(torch.optim.AdamW):
        breaks = False

        def step(self, closure: Any = None) -> Any:
            if not self.breaks:
                return super().step(closure)
            last = self.param_groups[-1]["params"][-1]
            last.grad, kept = None, last.grad
            super().step(closure)
            last.grad, self.breaks = kept, False
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")

    made: list[list[nn.Parameter]] = []
    for breaks in (False, True):
        parameters = [nn.Parameter(one.detach().float()) for one in weights()]
        inner = Breaking(parameters, lr=1e-3, foreach=False)
        optimizer = CompressedMoments(inner)
        for n in range(3):
            draw_gradients(parameters, n)
            inner.breaks = breaks and n == step
            if inner.breaks:
                gradients = [one.grad for one in parameters]
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
                assert all(a.grad is b for a, b in zip(parameters, gradients, strict=True))
                parameters[0].grad = None
            optimizer.step()
        made.append(parameters)
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


def draw_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    """Gradients of one step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_a_bucket_is_widened_and_rounded_in_one_call_each(monkeypatch: pytest.MonkeyPatch):
    """Two weights, three steps: gradients and copies in one call each, and the bits of weights alone."""
    together, apart = weights(), weights()
    sizes: list[int] = []
    plain = torch._foreach_copy_

    def counted(into: list[Tensor], given: list[Tensor]) -> None:
        sizes.append(len(into))
        plain(into, given)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", counted)
        train(together, stepping(together, "float32"), range(3))
    assert sizes == [2, 2] * 3
    monkeypatch.setattr(master_weights, "MASTER_BUCKET", 1)
    train(apart, stepping(apart, "float32"), range(3))
    assert all(torch.equal(one, other) for one, other in zip(together, apart, strict=True))
