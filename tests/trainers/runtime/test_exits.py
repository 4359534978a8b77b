"""A run that is not over never ends as one that is, and words of another launch are not its own."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from memtrain.cli.launch import elastic_agent
from memtrain.errors import LaunchError
from memtrain.trainers.loop.exit_status import record_exit
from memtrain.trainers.online.rewards.calls import call_all
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.runtime.exits import no_way_out
from memtrain.trainers.runtime.launcher_words import drop_launcher_words, refuse_launcher
from memtrain.trainers.runtime.ranks import Ranks


class Stop(BaseException):
    """An error that is no Exception."""


def stops() -> None:
    raise Stop


async def is_cancelled() -> None:
    raise asyncio.CancelledError


async def exits() -> None:
    os._exit(0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: os._exit(0), "os._exit(0)"),
        (lambda: sys.exit(0), "sys.exit(0)"),
        (lambda: sys.exit("bye"), "sys.exit('bye')"),
        (stops, "Stop"),
        (is_cancelled, "CancelledError"),
        (exits, "os._exit(0)"),
    ],
)
def test_no_call_ends_the_process_or_hangs(call: Any, said: str):
    with no_way_out():
        (found,) = call_all([call], is_async=asyncio.iscoroutinefunction(call), timeout_s=20, at_once=1)
    assert str(found.error) == f"tried to end the process: {said}"


def test_children_end_as_ever_and_the_way_out_comes_back():
    before = os._exit
    with no_way_out():
        child = os.fork()
        if not child:
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert os._exit is not before
    assert os._exit is before


@pytest.mark.parametrize("end", [lambda: os._exit(0), lambda: sys.exit(0), lambda: sys.exit()])
def test_an_end_from_inside_is_the_runs_failure(tmp_path: Path, end: Any):
    folder = RunFolder(tmp_path)
    with pytest.raises(LaunchError, match="ended after step 3 by"), no_way_out():  # noqa: SIM117
        with record_exit(folder, Ranks(), TrainState(step=3)):
            end()
    status = folder.read_status()
    assert status is not None
    assert (status.state, status.step) == (RunState.FAILED, 3)


@pytest.mark.parametrize("state", [RunState.RUNNING, RunState.SAVED, None])
def test_ranks_that_end_with_zero_before_the_run_is_over_are_an_error(tmp_path: Path, state: RunState | None):
    folder = RunFolder(tmp_path)
    if state is not None:
        folder.write_status(state, 3)
    with pytest.raises(LaunchError, match="exit code 0 before the run was over"):
        elastic_agent.run_agent([sys.executable, "-c", "pass"], {}, folder, 2, 10.0)
    assert state is None or folder.read_status().state is not RunState.RUNNING  # pyright: ignore


LEFT = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}


def test_words_of_an_earlier_launch_are_taken_away():
    more = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    environment = {**LEFT, **more, "PATH": "/bin", "RANKS": "kept"}
    assert drop_launcher_words(environment) == sorted({**LEFT, **more})
    assert environment == {"PATH": "/bin", "RANKS": "kept"}


def test_one_of_several_processes_of_another_launcher_is_refused():
    with pytest.raises(LaunchError, match="process 1 of 2 that torchrun"):
        refuse_launcher({**LEFT, "TORCHELASTIC_RUN_ID": "x"})
    refuse_launcher(LEFT)
    refuse_launcher({**LEFT, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"})
