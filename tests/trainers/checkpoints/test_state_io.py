"""What is saved comes back bit for bit, and nothing is ever unpickled."""

import copy
import errno
import math
import random
import struct
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from memtrain.trainers.checkpoints.state_io import load_state, save_state
from memtrain.trainers.runtime import parallel_write
from memtrain.trainers.runtime.safetensors_header import DTYPES


def same(left: object, right: object) -> bool:
    """Equal in type and in every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.contiguous().reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8))
        )
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    return left == right


def round_trip(state: object, folder: Path) -> object:
    save_state(state, folder / "state")
    return load_state(folder / "state")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits at all, NaN payloads included, of any dtype and up to three axes, some of them of length 0."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8).clone() if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
keys = (
    st.text(max_size=5) | st.integers(-3, 9) | st.sampled_from(["a", "a.b", "__metadata__", "tensor", "dict"])
)
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=states)
def test_any_state_comes_back_bit_for_bit(tmp_path: Path, state: object):
    assert same(state, round_trip(state, tmp_path))


def test_an_optimizer_continues_as_if_nothing_had_happened(tmp_path: Path):
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    save_state(state, tmp_path / "all")
    steps(model, optimizer, 3)

    again = copy.deepcopy(model)
    other = torch.optim.AdamW(again.parameters(), lr=9.9)
    loaded = load_state(tmp_path / "all")
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    torch.set_rng_state(loaded["torch"])
    random.setstate(loaded["python"])
    steps(again, other, 3)
    assert same(dict(model.state_dict()), dict(again.state_dict()))
    assert same(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_random_generators_of_numpy_come_back(tmp_path: Path):
    legacy = np.random.RandomState(3).get_state()
    modern = np.random.default_rng(3).bit_generator.state
    assert same([legacy, modern], round_trip([legacy, modern], tmp_path))


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path):
    weight = torch.randn(10, 10)
    loaded = round_trip({"embed": weight, "head": weight, "row": weight[0]}, tmp_path)
    assert isinstance(loaded, dict)
    assert loaded["embed"] is loaded["head"]
    assert loaded["row"].equal(weight[0])
    assert list(load_file(tmp_path / "state.safetensors")) == ["embed", "row"]


def test_views_are_saved_as_they_are_seen(tmp_path: Path):
    whole = torch.arange(24.0).reshape(4, 6)
    views = {"t": whole.T, "part": whole[1:3, ::2], "whole": whole}
    loaded = round_trip(views, tmp_path)
    assert isinstance(loaded, dict)
    for name, view in views.items():
        assert loaded[name].equal(view)
        assert loaded[name].is_contiguous()


def test_a_mapping_comes_back_as_a_dict_in_order(tmp_path: Path):
    assert same(round_trip(OrderedDict(b=1, a=2), tmp_path), {"b": 1, "a": 2})


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", torch.float32, torch.empty(2, device="meta")])
def test_what_would_need_pickle_is_refused(tmp_path: Path, value: object):
    with pytest.raises(TypeError, match="optimizer.0"):
        save_state({"optimizer": [value]}, tmp_path / "state")


def test_several_threads_write_the_file_that_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    turned = torch.randn(30, 40).t()
    state = {"a": torch.randn(1000), "b": turned, "c": torch.arange(70), "d": torch.tensor(2.0).bfloat16()}
    save_state(state, tmp_path / "one")
    threads: set[str] = set()
    real = parallel_write._write_piece
    monkeypatch.setattr(parallel_write, "PIECE_BYTES", 256)
    monkeypatch.setattr(
        parallel_write,
        "_write_piece",
        lambda *given: (threads.add(threading.current_thread().name), real(*given)),
    )
    save_state(state, tmp_path / "several")
    assert threads == {"worker"}
    written = [(tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "several")]
    assert written[0] == written[1]
    assert same(load_state(tmp_path / "several"), state)


def test_a_disk_that_refuses_a_thread_refuses_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parallel_write, "PIECE_BYTES", 256)
    monkeypatch.setattr(parallel_write.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        save_state({"a": torch.randn(1000)}, tmp_path / "state")


def test_other_tools_read_the_file(tmp_path: Path):
    state = {
        "model.embed.weight": torch.randn(3, 5).bfloat16(),
        "flag": torch.tensor(True),
        "x": torch.ones(1),
    }
    save_state(state, tmp_path / "state")
    assert same(dict(sorted(load_file(tmp_path / "state.safetensors").items())), dict(sorted(state.items())))
