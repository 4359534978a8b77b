"""Ranks agree on sums, on what one of them knows, and on a save that one of them cannot make."""

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from two_ranks import on_two_ranks

from memtrain.errors import Fault, LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import Save, newest_complete, save_checkpoint
from memtrain.trainers.checkpoints.manifest import FileEntry, facts_of
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.rank_messages import LENGTH, from_bytes, to_bytes
from memtrain.trainers.runtime.ranks import Ranks, current_ranks


def test_one_process_is_a_world_of_its_own():
    ranks = current_ranks()
    assert (ranks.rank, ranks.world, ranks.is_main) == (0, 1, True)
    assert ranks.sum({"a": 1.5}) == {"a": 1.5}
    assert ranks.gather("x") == ["x"]
    assert ranks.broadcast("x") == "x"
    assert not ranks.any(False)


def test_two_ranks_agree(tmp_path: Path):
    def act(ranks: Ranks) -> None:
        assert ranks.world == 2
        assert ranks.sum({"loss": 1.0 + ranks.rank, "tokens": 10.0}) == {"loss": 3.0, "tokens": 20.0}
        assert ranks.max({"peak": 5.0 * ranks.rank}) == {"peak": 5.0}
        assert ranks.any(ranks.rank == 1)
        assert ranks.gather(f"rank {ranks.rank}") == ["rank 0", "rank 1"]
        assert ranks.broadcast(f"rank {ranks.rank}") == "rank 0"

    on_two_ranks(tmp_path, act)


ITEMS = (
    None, True, -7, 0.1 + 0.2, float("inf"), "日本 \ud800 \x1b", b"\x00\xff", [1, [2.5]], (1, ("a",)), {}, (),
    [], {1: "one", "two": (2,), (3, "x"): None}, np.float64(1) / 3, np.int32(5),
    Sample((1, 2), (-0.5, -1e-30), "stop"), (Fault("what", "where", "fix"),),
    FileEntry(name="a", num_bytes=2**40, digest="ff"), [{"tuple": 3, "record": ["os", "system", {}]}],
)  # fmt: skip


@pytest.mark.parametrize("item", ITEMS, ids=repr)
def test_a_message_arrives_as_it_was_sent(item: object):
    assert from_bytes(to_bytes(item)) == item


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_and_arrays_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.arange(6)[: math.prod(shape)].reshape(shape) * 1.5).to(dtype)
    (there,) = from_bytes(to_bytes([tensor]))
    assert there.dtype == dtype
    assert torch.equal(there, tensor)
    if dtype is not torch.bfloat16:
        (array,) = from_bytes(to_bytes([tensor.numpy()]))
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())


def test_a_message_cannot_make_what_is_no_record_of_memtrain():
    for module, name in (("os", "system"), ("memtrain.errors", "MemtrainError"), ("memtrain.errors", "re")):
        header = json.dumps({"record": [module, name, {"command": "x"}]}).encode()
        message = LENGTH.pack(len(header)) + LENGTH.pack(2) + header + b"[]"
        with pytest.raises(ValueError, match="a message between ranks speaks of"):
            from_bytes(message)
    for item in (object(), print, {1}, np.array([object()]), 1j):
        with pytest.raises(TypeError, match="no message between ranks"):
            to_bytes(item)


def test_two_ranks_send_each_other_what_one_process_keeps(tmp_path: Path):
    def act(ranks: Ranks) -> None:
        mine = {"rank": ranks.rank, "items": ITEMS * (1 + 3 * ranks.rank)}
        for rank, theirs in enumerate(ranks.gather(mine)):
            assert theirs == {"rank": rank, "items": ITEMS * (1 + 3 * rank)}
        assert ranks.broadcast(mine) == {"rank": 0, "items": ITEMS}

    on_two_ranks(tmp_path, act)


def test_two_ranks_write_one_checkpoint_or_none(tmp_path: Path, make_plan: Callable[..., Plan]):
    folder = RunFolder(tmp_path / "run")

    def act(ranks: Ranks) -> None:
        def write(path: Path) -> None:
            path.write_text(f"rank {ranks.rank}")

        def full(path: Path) -> None:
            if ranks.rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(path)

        name = f"rng-{ranks.rank}"
        first = facts_of(make_plan(), step=1)
        save_checkpoint(Save(folder, {name: write}, first, keep=2), ranks)
        second = first.model_copy(update={"step": 2})
        with pytest.raises(LaunchError, match=r"step 2 cannot be written \(step-000001 stands\)"):
            save_checkpoint(Save(folder, {name: full}, second, keep=2), ranks)

    on_two_ranks(tmp_path, act)
    found = newest_complete(folder).checkpoint
    assert found is not None
    assert [entry.name for entry in found.manifest.files] == ["rng-0", "rng-1"]
    assert found.part("rng-1").read_text() == "rank 1"
    assert not list(folder.checkpoints.glob(".*"))
