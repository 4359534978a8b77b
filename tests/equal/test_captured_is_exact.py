"""Captured passes: what is replayed is what the pass computes, to the bit; or it says why it is none."""

import itertools
from typing import Any

import pytest
import torch
from sampled import sampled

from memtrain.trainers.losses.head.linear import StepCount, over
from memtrain.trainers.methods.reward import Reward
from memtrain.trainers.methods.sft import Sft
from tests.equal.test_matrix import exactness

captured_cells: Any = exactness.captured_cells
HAND = {
    "optimizer_in_backward": "weights are stepped within the pass",
    "weights_offload": "gradients of weights on the host",
}
"""Strategies of whole models that no graph repeats, by what the host does."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return exactness.Matrix(tmp_path_factory.mktemp("captured"))


def faults(matrix: Any, cells: Any) -> list[str]:
    """Cells that are neither captured nor say why."""
    found = [matrix.outcome(cell) for cell in cells]
    by_hand = {one.says for one in found if one.kind == "by hand"}
    unknown = [says for says in by_hand if not any(part in says for part in HAND.values())]
    return [f"{one.cell.name}: {one.says}" for one in found if one.kind == "broken"] + unknown


FEW = [
    ("sft", "torch_cpu", "LoRA with dropout, checkpointed"),
    ("sft", "torch_cpu", "4 bits, LoRA"),
    ("sft", "torch_cpu", "weights on the host, LoRA"),
    ("sft", "torch_cpu", "a mixture, evened"),
    ("kto", "torch_cpu", "shared_prompts"),
    ("dpo", "masked", "chunked_loss"),
    ("reward", "transformers", "activation_checkpointing"),
    ("grpo", "torch_cpu", "shared_prompts"),
    ("ppo", "transformers", "chunked_loss"),
    ("sft", "torch_cpu", "optimizer_in_backward"),
    ("sft", "torch_cpu", "weights_offload"),
]


@pytest.mark.parametrize(("method", "backend", "name"), sampled(FEW))
def test_a_captured_pass_is_the_pass(matrix: Any, method: str, backend: str, name: str):
    treatment = name if name in captured_cells.TREATMENTS else ""
    found = matrix.outcome(exactness.Cell(method, backend, (name,), is_captured=True, treatment=treatment))
    assert found.kind == ("by hand" if name in HAND else "captured"), found.says
    assert HAND.get(name, "") in found.says


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", exactness.METHODS_SHOWN)
def test_every_cell_is_captured_or_says_why(matrix: Any, method: str):
    assert faults(matrix, (cell for cell in exactness.captured() if cell.method == method)) == []


def test_a_pass_that_reads_a_number_breaks_its_cell_off(matrix: Any, monkeypatch: pytest.MonkeyPatch):
    """A planted wait: the cell is by hand, with the operator's name, and is never said to be captured."""
    plain = Sft.loss

    def waits(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        assert made.value.item() == made.value.item()
        return made

    monkeypatch.setattr(Sft, "loss", waits)
    found = matrix.outcome(exactness.Cell("sft", "masked", ("chunked_loss",), is_captured=True))
    assert found.kind == "by hand"
    assert "_local_scalar_dense reads a number" in found.says


def test_a_number_that_python_changes_breaks_its_cell(matrix: Any, monkeypatch: pytest.MonkeyPatch):
    """A planted factor that is another in every pass: a replay has that of the recording."""
    plain, calls = Reward.loss, itertools.count(1)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain(self, *args, **kwargs)
        return made._replace(value=made.value * next(calls))

    monkeypatch.setattr(Reward, "loss", changed)
    found = matrix.outcome(exactness.Cell("reward", "masked", ("chunked_loss",), is_captured=True))
    assert found.kind == "broken"
    assert "other bits" in found.says


def test_counts_of_a_step_stand_at_one_place():
    """A captured pass reads them where the step before had its own."""
    count, device = StepCount(), torch.device("cpu")
    places = set()
    for number in (3.0, 5.0):
        count.write(number, device)
        places.add(count.value.data_ptr())
        assert count.value.item() == number
    assert len(places) == 1


def test_a_sum_over_a_count_on_the_device_is_that_over_pythons_number():
    """In the sum's precision, to the bit: two scalars would be divided in float64."""
    drawn = torch.Generator().manual_seed(0)
    for total, count in zip(torch.randn(200, generator=drawn), range(3, 203), strict=True):
        on_device = over(total, torch.tensor(float(count), dtype=torch.float64))
        assert on_device.dtype is torch.float32
        assert torch.equal(on_device, over(total, float(count)))
