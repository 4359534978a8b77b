"""A checkpoint is written while its run goes on, and is as whole and as safe as one that is waited for."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_checkpoints import assert_usable, kill_at_every_moment, parts_of, save, steps_of
from two_ranks import on_two_ranks

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.async_save import Background
from memtrain.trainers.checkpoints.checkpoint import Parts, Save, newest_complete
from memtrain.trainers.checkpoints.manifest import facts_of
from memtrain.trainers.checkpoints.pinned_copy import HostCopies
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.ranks import Ranks

MakePlan = Callable[..., Plan]


class Gate:
    """A part that is not written before the gate is opened."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self.is_reached = threading.Event()

    def parts(self, step: int) -> Parts:
        def held(path: Path) -> None:
            self.is_reached.set()
            assert self._is_open.wait(20)
            path.write_text("through")

        return {"held": held, **parts_of(step)}

    def open(self) -> None:
        self._is_open.set()


def asked(folder: RunFolder, plan: Plan, step: int, parts: Parts | None = None, keep: int = 2) -> Save:
    return Save(folder, parts_of(step) if parts is None else parts, facts_of(plan, step=step), keep)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_nothing_of_a_save_is_seen_before_it_is_whole(folder: RunFolder, make_plan: MakePlan):
    save(folder, make_plan(), 5, keep=1)
    gate, background = Gate(), Background(Ranks())
    assert background.begin(asked(folder, make_plan(), 10, gate.parts(10), keep=1))
    assert gate.is_reached.wait(20)
    assert (background.is_open, background.is_at_work) == (True, True)
    assert_usable(folder, {5})
    gate.open()
    background.settle()
    assert (background.is_open, background.is_at_work) == (False, False)
    assert steps_of(folder) == [10]
    assert_usable(folder, {10})


def test_one_process_names_it_without_waiting_for_a_step(folder: RunFolder, make_plan: MakePlan):
    background = Background(Ranks())
    background.begin(asked(folder, make_plan(), 10))
    until = time.monotonic() + 20
    while background.is_at_work and time.monotonic() < until:
        time.sleep(0.001)
    assert_usable(folder, {10})
    assert background.is_open
    assert background.advance()


def test_a_sound_one_is_not_written_again(folder: RunFolder, make_plan: MakePlan):
    save(folder, make_plan(), 5)
    background = Background(Ranks())
    assert not background.begin(asked(folder, make_plan(), 5))
    assert not background.is_open


def full(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_disk_that_refuses_is_reported_at_the_next_step(folder: RunFolder, make_plan: MakePlan):
    save(folder, make_plan(), 5)
    background = Background(Ranks())
    background.begin(asked(folder, make_plan(), 10, {"model": full}))
    with pytest.raises(LaunchError, match=r"step 10 cannot be written \(step-000005 stands\): No space"):
        background.settle()
    assert not list(folder.checkpoints.glob(".*"))
    assert_usable(folder, {5})
    background.begin(asked(folder, make_plan(), 15))
    background.settle()
    assert_usable(folder, {15})


def test_a_fault_of_our_own_is_not_swallowed(folder: RunFolder, make_plan: MakePlan):
    def broken(path: Path) -> None:
        raise ZeroDivisionError

    background = Background(Ranks())
    background.begin(asked(folder, make_plan(), 10, {"model": broken}))
    with pytest.raises(ZeroDivisionError):
        background.settle()


@pytest.mark.slow
@pytest.mark.parametrize("already_there", [False, True])
def test_a_kill_at_any_moment_leaves_a_usable_one(tmp_path: Path, make_plan: MakePlan, already_there: bool):
    """As of a save that is waited for, whichever thread dies."""
    plan = make_plan()

    def act(folder: RunFolder) -> None:
        background = Background(Ranks())
        background.begin(asked(folder, plan, 10, keep=1))
        background.settle()

    kill_at_every_moment(tmp_path, plan, act, already_there=already_there)


def test_two_ranks_agree_between_steps(tmp_path: Path, make_plan: MakePlan):
    """Named when both are done, and given up by both when one cannot write."""
    folder = RunFolder(tmp_path / "run")

    def act(ranks: Ranks) -> None:
        def write(path: Path) -> None:
            path.write_text(f"rank {ranks.rank}")

        name, background = f"rng-{ranks.rank}", Background(ranks)
        gate = Gate()
        background.begin(asked(folder, make_plan(), 1, gate.parts(1) if ranks.rank else {name: write}))
        rounds = 0
        while background.is_open:
            assert (folder.checkpoints / "step-000001").exists() <= (rounds > 1)
            busy = ranks.any(background.is_at_work)
            assert busy or rounds
            if rounds == 1:
                gate.open()
            rounds += 1
            if not busy:
                background.advance()
            ranks.barrier()
        assert newest_complete(folder).checkpoint is not None
        background.begin(asked(folder, make_plan(), 2, {name: full if ranks.rank else write}))
        with pytest.raises(LaunchError, match=r"step 2 cannot be written \(step-000001 stands\)"):
            background.settle()

    on_two_ranks(tmp_path, act)
    found = newest_complete(folder).checkpoint
    assert found is not None
    assert found.part("rng-0").read_text() == "rank 0"
    assert found.part("held").read_text() == "through"
    assert not list(folder.checkpoints.glob(".*"))


def test_a_copy_is_not_moved_by_what_comes_after():
    copies = HostCopies()
    live = {"step": 1, "moments": [torch.arange(4.0), torch.ones(2, 3).t()], "rows": (np.arange(3),)}
    kept = copies.state(live)
    live["moments"][0].mul_(0)
    live["moments"][1].mul_(0)
    live["rows"][0][:] = 0
    live["step"] = 2
    assert kept["step"] == 1
    assert kept["moments"][0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert kept["moments"][1].eq(1).all()
    assert kept["rows"][0].tolist() == [0, 1, 2]


def test_buffers_are_used_again_and_made_anew_where_they_do_not_fit():
    copies = HostCopies()
    tensors = [torch.rand(3, 4), torch.tensor(7), torch.rand(5, dtype=torch.float64)]
    first = copies.state(tensors)
    places = [one.data_ptr() for one in first]
    assert copies.num_bytes == 48 + 8 + 40
    copies.begin()
    second = copies.state([one + 1 for one in tensors])
    assert [one.data_ptr() for one in second] == places
    assert all(torch.equal(one, other + 1) for one, other in zip(second, tensors, strict=True))
    copies.begin()
    third = copies.state([torch.rand(2, 2), *tensors[1:]])
    assert third[0].shape == (2, 2)
    assert [one.data_ptr() for one in third[1:]] == places[1:]
