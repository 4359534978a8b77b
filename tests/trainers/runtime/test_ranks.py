"""Ranks agree on sums, on what one of them knows, and on a save that one of them cannot make."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from two_ranks import on_two_ranks

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import Save, newest_complete, save_checkpoint
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.run_folder.folder import RunFolder
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
