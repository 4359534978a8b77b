"""What moves bytes between the GPU and the host: the same numbers as without it, from pinned memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints import pinned_copy
from memtrain.trainers.model.offload.copy_engines import CudaEngine
from memtrain.trainers.tools.verify.evidence import offloader_of

pytestmark = pytest.mark.gpu
KEPT = (
    "memory.activation_checkpointing=off",
    "memory.activation_offloading=off",
    "memory.streamed_layers=off",
)
CHECKPOINTED = ("memory.activation_checkpointing=on", "memory.activation_offloading=off")
PLAIN = (*CHECKPOINTED, "memory.streamed_layers=off")
STEPPED = ("optim.max_grad_norm=null",)
ADAPTER = ("model.adapter={r: 4}",)
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "boundaries": (PLAIN, ("memory.activation_checkpointing=on", "memory.activation_offloading=on")),
    "all": (KEPT, ("memory.activation_checkpointing=off", "memory.activation_offloading=on")),
    "optimizer states": (PLAIN, (*PLAIN, "memory.optimizer_offload=on")),
    "frozen weights": ((*PLAIN, *ADAPTER), (*PLAIN, *ADAPTER, "memory.weights_offload=on")),
    "steps in the backward pass": ((*PLAIN, *STEPPED), (*PLAIN, *STEPPED, "optim.in_backward=on")),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_engine_changes_no_bit(
    name: str, plan_of: Callable[..., Plan], steps_of: Callable, device: torch.device
):
    """Losses and weights after three steps. Sums of attention's backward pass are ordered for it."""
    plain, moved = (steps_of(plan_of("sft", *words, "train.micro_batch_size=8")) for words in PAIRS[name])
    assert plain.losses == moved.losses
    assert plain.weights.keys() == moved.weights.keys()
    assert all(torch.equal(plain.weights[one], moved.weights[one]) for one in plain.weights)


def test_activations_travel_on_side_streams(
    plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device
):
    plan = plan_of("sft", *PAIRS["boundaries"][1], "memory.offload_keep=0")
    offloader = offloader_of(steps_of(plan).built)
    assert offloader is not None
    assert isinstance(offloader.engine, CudaEngine)
    assert offloader.traffic.out_bytes == offloader.traffic.back_bytes > 0


def test_activations_go_on_to_the_disk(plan_of: Callable[..., Plan], steps_of: Callable, tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    words = (*PAIRS["boundaries"][1], f"memory.offload_disk={folder}", "memory.offload_host=64KiB")
    plain, moved = (steps_of(plan_of("sft", *one)) for one in (PLAIN, words))
    assert plain.losses == moved.losses


def test_streamed_layers_are_the_plain_ones_to_rounding(plan_of: Callable[..., Plan], steps_of: Callable):
    words = ("memory.streamed_layers=on", "memory.slice_tokens=32", "memory.activation_offloading=off")
    plain, streamed = (steps_of(plan_of("sft", *one, dtype="float32")) for one in (PLAIN, words))
    assert streamed.losses == pytest.approx(plain.losses, rel=1e-4)


def test_states_wait_in_pinned_memory(plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device):
    stepped = steps_of(plan_of("sft", *PLAIN, "memory.optimizer_offload=on", dtype="float32"))
    states = [
        value
        for entry in stepped.built.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    assert states
    assert all(one.device.type == "cpu" and one.is_pinned() for one in states)


def test_a_copy_of_states_is_made_through_pinned_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """A tensor of several pieces, one that is not contiguous, and the same buffers the second time."""
    monkeypatch.setattr(pinned_copy, "STAGE_BYTES", 4096)
    copies = pinned_copy.HostCopies()
    for _ in range(2):
        given = {"long": torch.randn(5000, device=device), "turned": torch.randn(40, 30, device=device).t()}
        copies.begin()
        made = copies.state(given)
        assert all(torch.equal(made[name], given[name].cpu()) for name in given)
    assert len(copies._buffers) == 2
