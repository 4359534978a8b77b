"""Streamed layers on several ranks: the losses and the model of one process without slices."""

import os
from importlib.util import find_spec

import pytest
from shared_out import assert_same_curve, assert_same_model

PACKED = ("length.max_length=256", "length.packing=bfd", "train.batch_size=4", "train.micro_batch_size=1")
STREAMED = ("memory.streamed_layers=on", "memory.slice_tokens=48")


DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
ENGINES = [
    pytest.param("ddp", marks=pytest.mark.slow),
    "fsdp2",
    pytest.param("zero1", marks=[DEEPSPEED, pytest.mark.slow]),
    pytest.param("zero2", marks=[DEEPSPEED, pytest.mark.slow]),
]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imported once, before the ranks are forked."""
    if find_spec("deepspeed") is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_with_slices_have_the_losses_of_one_process_without(shared_runs, curve_of, engine: str):
    one = shared_runs.folder / "one"
    if not one.exists():
        one = shared_runs.done("one", *PACKED)
    name = f"two-{engine}"
    ranks = shared_runs.fork_ranks(name, 2, *PACKED, *STREAMED, f"cluster.engine={engine}")
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    two = shared_runs.folder / name
    assert_same_curve(curve_of(two), curve_of(one))
    assert_same_model(two, one, exactly=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(("memory.activation_checkpointing=on",), id="whole"),
        pytest.param(STREAMED, id="in slices"),
    ],
)
def test_frozen_weights_live_on_the_host_of_each_rank(runs, curve_of, form: tuple[str, ...]):
    """Two ranks that bring in their layers have the bits of two that hold them."""
    lora = (*PACKED, "model.adapter={r: 4}", "cluster.engine=ddp")
    for name, offload in (("there", "off"), ("away", "on")):
        ranks = runs.fork_ranks(name, 2, *lora, *form, f"memory.weights_offload={offload}")
        assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    assert curve_of(runs.folder / "away") == curve_of(runs.folder / "there")
    assert_same_model(runs.folder / "away", runs.folder / "there", exactly=True)
