"""Optimizer states that wait on the host: the same bits, whoever continues whom."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.optim import master_weights
from memtrain.trainers.optim import offload as optim_offload
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.step import step_whole

KINDS = {
    "adamw": {},
    "adafactor": {},
    "muon": {},
    "float32 copies": {"master_weights": True, "dtype": "bfloat16"},
    "split copies": {"master_weights": True, "dtype": "bfloat16", "copies": "split"},
    "muon, float32 copies": {"master_weights": True, "dtype": "bfloat16"},
}
OF_COPIES = [kind for kind, settings in KINDS.items() if settings]


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    return model.bfloat16() if kind in OF_COPIES else model


def make_optimizer(
    model: nn.Module, kind: str, make_settings: Any, *, offloads: bool
) -> torch.optim.Optimizer:
    name: Any = "muon" if "muon" in kind else "adamw" if kind in OF_COPIES else kind
    settings = make_settings(optimizer=name, optimizer_offload=offloads, **KINDS[kind])
    return build_optimizer(model, Optim(kind=name, lr=1e-2, weight_decay=0.1), settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        step_whole(optimizer)
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim_offload, "OFFLOAD_BUCKET", 1200)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_states_on_the_device(make_settings, kind: str):
    plain = make_model(kind)
    offloaded = copy.deepcopy(plain)
    train(plain, make_optimizer(plain, kind, make_settings, offloads=False), range(5))
    train(offloaded, make_optimizer(offloaded, kind, make_settings, offloads=True), range(5))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first", "then"), [(False, True), (True, False), (True, True)])
def test_one_continues_the_other(make_settings, kind: str, first: bool, then: bool):
    plain = make_model(kind)
    train(plain, make_optimizer(plain, kind, make_settings, offloads=False), range(6))
    model = make_model(kind)
    begun = make_optimizer(model, kind, make_settings, offloads=first)
    train(model, begun, range(3))
    state = copy.deepcopy(begun.state_dict())
    gone_on = make_optimizer(model, kind, make_settings, offloads=then)
    gone_on.load_state_dict(state)
    train(model, gone_on, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adamw", *OF_COPIES])
def test_a_step_that_breaks_off_keeps_the_states_of_what_was_stepped(make_settings, monkeypatch, kind: str):
    """Copying the second bucket's states fails twice, ahead and when they are needed; the step is made again
    for what is left."""
    plain = make_model(kind)
    train(plain, make_optimizer(plain, kind, make_settings, offloads=False), range(4))
    model = make_model(kind)
    optimizer = make_optimizer(model, kind, make_settings, offloads=True)
    train(model, optimizer, range(2))
    real, calls = optim_offload.device_memory, []

    def broken(value: Any, parameter: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) in (5, 6):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return real(value, parameter)

    monkeypatch.setattr(optim_offload, "device_memory", broken)
    train(model, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_is_read_before_it_was_waited_for(make_settings, monkeypatch, kind: str):
    """An engine that copies nothing until somebody waits: a missing wait is a wrong number."""
    monkeypatch.setattr(optim_offload, "SyncEngine", LazyEngine)
    monkeypatch.setattr(optim_offload, "OFFLOAD_BUCKET", 300)
    monkeypatch.setattr(master_weights, "MASTER_BUCKET", 300)
    plain = make_model(kind)
    offloaded = copy.deepcopy(plain)
    train(plain, make_optimizer(plain, kind, make_settings, offloads=False), range(4))
    train(offloaded, make_optimizer(offloaded, kind, make_settings, offloads=True), range(4))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon", "float32 copies"])
def test_states_of_two_buckets_are_on_the_device_and_never_of_three(make_settings, monkeypatch, kind: str):
    """Four tensors, each a bucket: while one is stepped, the next one has come and none before is left."""
    monkeypatch.setattr(optim_offload, "OFFLOAD_BUCKET", 1)
    monkeypatch.setattr(master_weights, "MASTER_BUCKET", 1)
    model = make_model(kind)
    optimizer: Any = make_optimizer(model, kind, make_settings, offloads=True)
    train(model, optimizer, range(1))
    sizes: list[tuple[int, int]] = []
    real = optim_offload.BucketedOptimizer._step_bucket

    def counted(self: Any, bucket: list[torch.Tensor], gradients: Any) -> None:
        coming = [held.nbytes for held, _, _ in self.shuttle._coming.values() if held.ndim]
        sizes.append((sum(coming), len(self.shuttle._leaving)))
        real(self, bucket, gradients)

    monkeypatch.setattr(optim_offload.BucketedOptimizer, "_step_bucket", counted)
    train(model, optimizer, range(1, 2))
    # Matrices of 128 and 64 numbers, then, in a step of their own, biases of 16 and 4 with two moments each.
    of = 1 if kind == "muon" else 2
    first, second = 4 * of * 128, 4 * of * 64
    assert sizes == [(first + second, 0), (second, 0), (8 * 20, 0), (8 * 4, 0)]
    of_copies = [optimizer._inner.shuttle, optimizer.form.shuttle] if kind == "float32 copies" else []
    shuttles = of_copies or [optimizer.shuttle]
    assert all(not one._coming and not one._leaving for one in shuttles)


@pytest.mark.parametrize("kind", OF_COPIES)
def test_copies_wait_on_the_host_with_the_moments(make_settings, monkeypatch, kind: str):
    """What is put there: for 212 weights a copy of 4 bytes or bits of 2, and moments of 4 bytes each."""
    put: list[int] = []
    real = optim_offload.host_memory

    def counted(value: Any, parameter: torch.Tensor, home: Any = None) -> Any:
        put.append(value.nbytes if home is None and value.ndim else 0)
        return real(value, parameter, home)

    monkeypatch.setattr(optim_offload, "host_memory", counted)
    model = make_model(kind)
    optimizer: Any = make_optimizer(model, kind, make_settings, offloads=True)
    beside = (2 if kind == "split copies" else 4) * 212
    assert sum(put) == beside
    train(model, optimizer, range(1))
    # Muon has one moment of the 192 numbers of matrices, and two of the biases.
    assert sum(put) == beside + 4 * (192 + 2 * 20 if "muon" in kind else 2 * 212)
    assert all(leaf.untyped_storage().nbytes() == 4 for _, leaf in optimizer.pairs())


def test_copies_begin_anew_from_weights_that_were_written(make_settings):
    model = make_model("split copies")
    for form in ("float32", "split"):
        settings = make_settings(dtype="bfloat16", master_weights=True, copies=form)
        optimizer: Any = build_optimizer(model, Optim(lr=1e-2), settings)
        train(model, optimizer, range(1))
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        optimizer.follow()
        taken = [optimizer.form.take(parameter) for parameter in model.parameters()]
        assert all(torch.equal(a, b.float()) for a, b in zip(taken, model.parameters(), strict=True))
