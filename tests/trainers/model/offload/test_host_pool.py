"""Offloading: bit-identical gradients in any order, recycled memory, and faults that are seen."""

import copy
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.memory.plan.sizes import block_bytes
from memtrain.trainers.model.offload.activations import is_part_of
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.model.offload.copy_engines import LazyEngine, SyncEngine
from memtrain.trainers.model.offload.host_pool import DiskTier, HostPool
from memtrain.trainers.model.offload.offloader import Offloader, Saved
from memtrain.trainers.runtime.namespaces import pid_namespace

TinyModel = Callable[..., Any]
IDS = torch.randint(1, 128, (2, 16), generator=torch.Generator().manual_seed(0))
INPUT_BYTES = 2 * 16 * 64 * 4
"""The input of one layer of a tiny model on IDS."""


def backward(model: Any, order: str = "once") -> dict[str, Tensor]:
    """Gradients after one backward pass, two, or two graphs whose first made comes first."""

    def loss(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=IDS, use_cache=False).loss

    model.zero_grad(set_to_none=True)
    if order == "interleaved":
        first, second = loss(IDS), loss(IDS.flip(1))
        first.backward()
        second.backward()
    elif order == "retained":
        kept = loss(IDS)
        kept.backward(retain_graph=True)
        kept.backward()
    else:
        for _ in range(3 if order == "thrice" else 1):
            loss(IDS).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    differences = [(a[name] - b[name]).abs().max() for name in a]
    return max(float(torch.nan_to_num(d, nan=float("inf"))) for d in differences)


def offloaded(model: Any, how: str, **options: Any) -> tuple[Any, Offloader]:
    """A copy of `model` whose layers are offloaded."""
    model = copy.deepcopy(model)
    options = {"engine": LazyEngine(), "min_bytes": 1024, "keeps": is_part_of(model)} | options
    offloader = Offloader(**options)
    if how == "boundaries":
        checkpoint_layers(model, 1, offloader.run_recomputed)
    else:
        checkpoint_layers(model, 0, run_others=offloader.run_kept)
    return model, offloader


@pytest.mark.parametrize("order", ["once", "thrice", "interleaved", "retained"])
@pytest.mark.parametrize("engine", [SyncEngine, LazyEngine])
@pytest.mark.parametrize("how", ["boundaries", "all"])
def test_gradients_are_the_same_bits(tiny_model: TinyModel, how: str, engine: type, order: str):
    plain = tiny_model(num_hidden_layers=3).train()
    for keep_last in (0, 1):
        model, offloader = offloaded(plain, how, engine=engine(), keep_last=keep_last)
        assert worst(backward(plain, order), backward(model, order)) == 0.0
        assert offloader.pool.used_bytes == 0
        assert offloader.traffic.back_bytes > 0


@pytest.mark.parametrize("how", ["boundaries", "all"])
def test_what_does_not_fit_the_host_goes_to_disk_and_comes_back(tiny_model: TinyModel, tmp_path, how: str):
    plain = tiny_model(num_hidden_layers=6).train()
    disk = DiskTier(tmp_path)
    model, offloader = offloaded(plain, how, disk=disk, host_limit_bytes=2 * block_bytes(INPUT_BYTES))
    for order in ("once", "interleaved", "retained"):
        assert worst(backward(plain, order), backward(model, order)) == 0.0
    assert disk.written_bytes > 0
    assert offloader.pool.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_only_the_inputs_of_layers_travel_and_the_last_stays(tiny_model: TinyModel):
    """Five layers: five go out; the last is still there when it is needed, so four come back."""
    model, offloader = offloaded(tiny_model(num_hidden_layers=5).train(), "boundaries")
    backward(model)
    assert offloader.traffic.out_bytes == 5 * INPUT_BYTES
    assert offloader.traffic.back_bytes == 4 * INPUT_BYTES


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_last_k_layers_are_kept_and_only_the_others_come_back(tiny_model: TinyModel, count: int):
    model, offloader = offloaded(tiny_model(num_hidden_layers=5).train(), "boundaries", keep_last=count)
    backward(model)
    assert offloader.traffic.out_bytes == 5 * INPUT_BYTES
    assert offloader.traffic.back_bytes == (5 - count) * INPUT_BYTES


def test_the_layer_before_is_fetched_while_one_is_used():
    """Four layers leave; when the last is used the third is on its way, and no other."""
    offloader = Offloader(LazyEngine(), keep_last=0, min_bytes=1)
    saved = [offloader.pack(torch.full((64,), float(layer))) for layer in range(4)]
    blocks = [one.block for one in saved if isinstance(one, Saved)]
    assert all(block.device is None for block in blocks)
    offloader.unpack(saved[3])
    assert [block.device is not None for block in blocks[:3]] == [False, False, True]
    assert offloader.unpack(saved[2])[0] == 2.0
    assert [block.device is not None for block in blocks[:2]] == [False, True]


def test_host_memory_is_recycled_from_step_to_step(tiny_model: TinyModel):
    model, offloader = offloaded(tiny_model(num_hidden_layers=5).train(), "boundaries")
    backward(model)
    first = offloader.pool.num_bytes
    backward(model, "thrice")
    assert first == offloader.pool.num_bytes == 5 * block_bytes(INPUT_BYTES)


def test_a_pass_that_is_never_followed_by_a_backward_leaves_nothing(tiny_model: TinyModel):
    model, offloader = offloaded(tiny_model().train(), "all")
    loss = model(input_ids=IDS, labels=IDS).loss
    assert offloader.pool.used_bytes > 0
    del loss
    assert offloader.pool.used_bytes == 0


def test_a_storage_saved_by_several_nodes_is_copied_once_and_leaves():
    """TRL's offloader keeps such a tensor on the device: a quarter of all bytes."""
    offloader = Offloader(LazyEngine(), keep_last=0, min_bytes=1)
    x = torch.randn(32, 32)
    views = [x, x.t(), x[3:7], x.view(-1)[5:]]
    saved = [offloader.pack(view) for view in views]
    assert offloader.traffic.out_bytes == 32 * 32 * 4
    blocks = {id(one.block) for one in saved if isinstance(one, Saved)}
    assert len(blocks) == 1
    assert all(isinstance(one, Saved) and one.block.device is None for one in saved)
    assert all(torch.equal(offloader.unpack(one), view) for one, view in zip(saved, views, strict=True))
    assert offloader.traffic.back_bytes == 32 * 32 * 4


def test_contents_changed_between_two_saves_are_two_blocks():
    offloader = Offloader(LazyEngine(), keep_last=0, min_bytes=1)
    x = torch.zeros(8)
    first = offloader.pack(x)
    x.add_(1)
    second = offloader.pack(x)
    assert torch.equal(offloader.unpack(first), torch.zeros(8))
    assert torch.equal(offloader.unpack(second), torch.ones(8))


def test_a_new_storage_at_an_old_address_is_not_mistaken():
    offloader = Offloader(SyncEngine(), keep_last=0, min_bytes=1)
    saved = [offloader.pack(torch.full((64,), float(i))) for i in range(50)]
    assert [offloader.unpack(one)[0].item() for one in saved] == list(map(float, range(50)))


def test_weights_and_small_tensors_stay():
    layer = torch.nn.Linear(64, 64)
    offloader = Offloader(SyncEngine(), min_bytes=1024, keeps=is_part_of(layer))
    for tensor in (layer.weight, layer.weight.t(), layer.weight.detach()[3:], torch.zeros(4)):
        kept = offloader.pack(tensor)
        assert isinstance(kept, Tensor)
        assert kept.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("fault", ["none", "no wait before use", "memory reused before it was copied"])
def test_a_missing_wait_is_seen(tiny_model: TinyModel, monkeypatch, fault: str):
    """Negative controls: what would be a rare race on a GPU is a wrong gradient here, every time."""
    plain = tiny_model(num_hidden_layers=4).train()
    model, offloader = offloaded(plain, "boundaries")

    def reuse(block: Any) -> None:
        if block.device is not None:
            block.device.fill_(7.0)
            block.device = None

    if fault == "no wait before use":
        monkeypatch.setattr(offloader.engine, "wait", lambda ticket: None)
    if fault == "memory reused before it was copied":
        monkeypatch.setattr(offloader, "_drop_device", reuse)
    assert (worst(backward(plain), backward(model)) > 1e-3) == (fault != "none")


@pytest.mark.parametrize("remembers", [True, False])
def test_host_memory_is_not_written_while_its_last_reader_has_not_run(remembers: bool):
    """Zeros are on their way back to the device when their host memory is given to ones."""
    engine = LazyEngine()
    pool = HostPool(engine)
    host, _ = pool.take(256)
    engine.wait(engine.copy_out(host, torch.zeros(256, dtype=torch.uint8), None))
    target = torch.full((256,), 9, dtype=torch.uint8)
    reader = engine.copy_back(target, host, None)
    pool.give_back(host, reader if remembers else None)
    again, busy = pool.take(200)
    assert again is host
    engine.wait(engine.copy_out(again, torch.ones(256, dtype=torch.uint8), busy))
    engine.wait(reader)
    assert target.any() == (not remembers)


def test_block_sizes_recur():
    assert [block_bytes(n) for n in (1000, 1024, 2**21 - 1, 2**21 + 1, 5 * 2**20)] == [
        1024, 1024, 2**21, 2**22, 6 * 2**20
    ]  # fmt: skip


def test_blocks_of_a_killed_process_are_removed_and_those_of_others_stay(tmp_path: Path):
    host = socket.gethostname()
    gone = subprocess.Popen(["true"])
    gone.wait()
    host = f"{host}-{pid_namespace()}"
    alive, elsewhere = f"activation-{host}-{os.getpid()}-abc", "activation-another-host-1-abc"
    for name in (alive, elsewhere, f"activation-{host}-{gone.pid}-abc"):
        (tmp_path / name).write_bytes(b"x")
    tier = DiskTier(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive, elsewhere])
    stored = tier.write(torch.arange(8, dtype=torch.uint8))
    back = torch.empty(8, dtype=torch.uint8)
    stored.read_into(back)
    assert back.tolist() == list(range(8))


def test_an_activation_at_the_address_of_a_replaced_weight_is_no_part_of_the_model():
    """FSDP2 replaces weights by shards: an activation that got a freed address stayed on the device, now and
    then, and a trace of 70B that drew it once in three runs said 45 GiB where 28 are."""
    layer = torch.nn.Linear(64, 64)
    keeps = is_part_of(layer)
    assert keeps(layer.weight)
    assert keeps(layer.weight[:3])
    layer.weight = torch.nn.Parameter(torch.zeros(2, 64))
    made = [torch.zeros(64, 64) for _ in range(200)]
    assert not any(keeps(one) for one in made)
