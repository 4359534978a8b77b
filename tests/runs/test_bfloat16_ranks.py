"""bfloat16 weights over two processes: gradients summed in float32, and forms of their float32 numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_out import assert_same_curve, assert_same_model, stop_after
from torch import Tensor

from memtrain.errors import RecipeError

BFLOAT16 = ("model.dtype=bfloat16", "data.train.limit=300")
MANY = (*BFLOAT16, "train.batch_size=128", "train.max_steps=1", "data.eval_fraction=0")
STEPS = (*BFLOAT16, "save.every_steps=2", "save.keep=4", "train.micro_batch_size=2")
FSDP2 = "cluster.engine=fsdp2"


def ended(runs, name: str, *overrides: str) -> Path:
    ranks = runs.fork_ranks(name, 2, *overrides)
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    return runs.folder / name


@pytest.fixture(scope="module")
def large_batch(shared_runs) -> Path:
    """A step of 128 rows in one micro-batch of one process, in float32."""
    said = ("data.train.limit=300", *MANY[2:], "train.micro_batch_size=128")
    return shared_runs.done("large", "model.dtype=float32", *said)


@pytest.fixture(scope="module")
def drawn_in_float32() -> Iterator[None]:
    """Random weights drawn in float32 and rounded: before 2.13 torch draws others where they are bfloat16."""
    plain = torch.Tensor.normal_

    def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, **named: Any) -> Tensor:
        # bfloat16 is the default type while a model is made so.
        return tensor.copy_(plain(torch.empty(tensor.shape, dtype=torch.float32), mean, std, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", normal_)
        yield


@pytest.mark.usefixtures("drawn_in_float32")
@pytest.mark.parametrize(
    ("weights", "engine"),
    [
        pytest.param("float32 copies", "fsdp2", marks=pytest.mark.slow),
        ("pure", "ddp"),
        pytest.param("float32 copies", "ddp", marks=pytest.mark.slow),
        pytest.param("pure", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_128_rows_one_by_one_over_two_ranks_are_one_large_batch(
    runs, large_batch: Path, curve_of, engine: str, weights: str
):
    """A sum of 64 bfloat16 gradients on each rank would be some per cent short of it."""
    pure = ("optim.master_weights=false",) if weights == "pure" else ()
    folder = ended(runs, "two", *MANY, "train.micro_batch_size=1", f"cluster.engine={engine}", *pure)
    assert_same_curve(curve_of(folder), curve_of(large_batch), rel=3e-3)


@pytest.fixture(scope="module")
def split(shared_runs) -> Path:
    """A run with split copies over shards that nobody interrupted."""
    return ended(shared_runs, "split-copies", *STEPS, FSDP2, "optim.copies=split")


def test_split_copies_over_shards_are_whole_ones(runs, curve_of, split: Path):
    """The same bits as with whole copies, step by step and in the saved model."""
    whole = ended(runs, "whole", *STEPS, FSDP2)
    assert curve_of(split) == curve_of(whole)
    assert_same_model(split, whole, exactly=True)


@pytest.mark.parametrize("layout", ["sharded", pytest.param("full", marks=pytest.mark.slow)])
def test_a_killed_run_with_split_copies_goes_on_to_the_last_bit(
    runs, curve_of, monkeypatch, split: Path, layout: str
):
    said = (*STEPS, FSDP2, "optim.copies=split", f"save.layout={layout}")
    stop_after(runs, "run", 2, 4, monkeypatch, *said)
    ended(runs, "run", *said)
    assert curve_of(runs.folder / "run") == curve_of(split)
    assert_same_model(runs.folder / "run", split, exactly=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.copies=stochastic", "every rank's rows would be rounded by the same ones"),
        ("optim.compressed_moments=true", "a rank's rows may begin between them"),
    ],
)
def test_forms_that_shards_cannot_be_are_refused_before_anything_starts(runs, override: str, words: str):
    refused = runs.run("run", *BFLOAT16, "cluster.processes=2", FSDP2, override, "--dry-run")
    assert refused.code == RecipeError.exit_code
    assert words in refused.err
