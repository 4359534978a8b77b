"""However a step's rows are laid out, cut up and dealt, its loss and its gradient are those of one batch.

One step of plain gradient descent at rate 1: the final weights are the first ones minus the gradient.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ONE_STEP = (
    "data.train.limit=14",
    "data.eval_fraction=0",
    "train.batch_size=14",
    "train.max_steps=1",
    "optim.kind=sgd",
    "optim.lr=1.0",
    "optim.max_grad_norm=null",
    "optim.warmup_steps=0",
)

VARIANTS = {
    "padded": ("length.padding_free=false",),
    "padded, one row at a time": ("length.padding_free=false", "train.micro_batch_size=1"),
    "padded to a multiple": ("length.pad_to_multiple_of=64",),
    "one row at a time": ("train.micro_batch_size=1",),
    "three rows at a time": ("train.micro_batch_size=3",),
    "few tokens at a time": ("train.micro_tokens=200",),
    "packed": ("length.packing=bfd",),
    "packed, one sequence at a time": ("length.packing=bfd", "train.micro_batch_size=1"),
    "batch said in tokens": ("train.batch_size=null", "train.batch_tokens=100000"),
    "no checkpointing": ("memory.activation_checkpointing=off",),
    "every second layer": ("memory.checkpoint_every=2",),
    "offloaded": ("memory.activation_offloading=on",),
    "the logits": ("memory.loss=full",),
    "small tiles": ("memory.loss_chunk_size=64KiB",),
    "not shuffled": ("train.shuffle=false",),
    "grouped": ("length.padding_free=false", "length.group_by_length=true"),
}

RANKS = {
    "two ranks": (2, ()),
    "two ranks, accumulating": (2, ("train.micro_batch_size=2",)),
    "two ranks, one of them with an empty micro-batch": (2, ("train.micro_batch_size=5",)),
    "two ranks, padded, one of them with an empty micro-batch": (
        2,
        ("train.micro_batch_size=5", "length.padding_free=false"),
    ),
    "two ranks, packed": (2, ("length.packing=bfd",)),
}


@pytest.fixture(scope="module")
def one_batch(shared_runs) -> Path:
    return shared_runs.done("one-batch", *ONE_STEP)


def gradient(folder: Path, begin: dict[str, torch.Tensor]) -> torch.Tensor:
    final = load_file(folder / "final" / "model.safetensors")
    return torch.cat([(begin[name] - weight).flatten() for name, weight in final.items()])


@pytest.fixture(scope="module")
def begin(shared_runs) -> dict[str, torch.Tensor]:
    """The weights before the step, from a run whose rate is next to nothing."""
    folder = shared_runs.done("begin", *ONE_STEP, "optim.lr=1e-30")
    return load_file(folder / "final" / "model.safetensors")


@pytest.fixture
def assert_same_step(one_batch: Path, begin, metrics) -> Callable[[Path], None]:
    def compare(folder: Path) -> None:
        expected, found = metrics(one_batch, "step")[0], metrics(folder, "step")[0]
        assert (found["tokens"], found["loss_tokens"]) == (expected["tokens"], expected["loss_tokens"])
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6)
        wanted = gradient(one_batch, begin)
        assert wanted.norm().item() == pytest.approx(expected["grad_norm"], rel=1e-4)
        # Weights of about 0.02 minus gradients: fp32 keeps them to 2e-9.
        torch.testing.assert_close(gradient(folder, begin), wanted, rtol=1e-5, atol=1e-6)

    return compare


@pytest.mark.parametrize("name", VARIANTS)
def test_one_process_makes_the_step_of_one_batch(runs, assert_same_step, name: str):
    assert_same_step(runs.done("other", *ONE_STEP, *VARIANTS[name]))


@pytest.mark.parametrize("name", RANKS)
def test_several_ranks_make_the_step_of_one_batch(runs, assert_same_step, name: str):
    num_ranks, overrides = RANKS[name]
    ranks = runs.fork_ranks("other", num_ranks, *ONE_STEP, *overrides)
    assert [rank.wait() for rank in ranks] == [0] * num_ranks, "\n".join(rank.said for rank in ranks)
    assert_same_step(runs.folder / "other")


def test_what_is_logged_moves_no_bit(runs, curve_of):
    often = runs.done("often", "log.every_steps=1", "memory.measure_peaks=true", "eval.every_steps=1")
    assert curve_of(often) == curve_of(runs.done("rarely", "log.every_steps=1000"))
