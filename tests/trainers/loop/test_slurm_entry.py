"""A task of an srun: its rank from SLURM's words, and 0 with a marker for a run that has saved."""

import os
import signal
import sys
from pathlib import Path

import pytest

from memtrain.errors import EXIT_SAVED, LaunchError
from memtrain.trainers.loop import slurm_entry as slurm_task
from memtrain.trainers.loop import worker
from memtrain.trainers.loop.slurm_entry import SAVED_FILE, rank_environment
from memtrain.trainers.runtime.signals import ASKED

GIVEN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "20012",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs a task whose worker ends with a code; the run folder."""

    def run(rank: int, code: int) -> int:
        for name, value in (GIVEN | {"SLURM_PROCID": str(rank)}).items():
            monkeypatch.setenv(name, value)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "")
        monkeypatch.setattr(sys, "argv", ["task", str(tmp_path / "plan.json")])
        monkeypatch.setattr(worker, "main", lambda: code)
        return slurm_task.main()

    before = {one: signal.getsignal(one) for one in ASKED}
    yield run
    for one, handler in before.items():
        signal.signal(one, handler)


def test_slurm_says_the_rank():
    assert rank_environment(GIVEN) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
    }


def test_outside_of_an_srun_it_says_what_to_do():
    with pytest.raises(LaunchError, match="MASTER_ADDR not set"):
        rank_environment({name: GIVEN[name] for name in GIVEN if name != "MASTER_ADDR"})


def test_a_run_that_has_saved_leaves_word_and_ends_with_0(task, tmp_path: Path):
    assert task(1, EXIT_SAVED) == 0
    assert not (tmp_path / SAVED_FILE).exists()
    assert task(0, EXIT_SAVED) == 0
    assert (tmp_path / SAVED_FILE).exists()


def test_a_signal_after_the_work_is_done_does_not_spoil_it(task):
    assert task(0, 0) == 0
    os.kill(os.getpid(), signal.SIGUSR1)


def test_other_codes_are_the_workers(task, tmp_path: Path):
    assert [task(0, code) for code in (0, 4)] == [0, 4]
    assert not (tmp_path / SAVED_FILE).exists()


@pytest.mark.parametrize("num_nodes", ["1", "2"])
def test_ranks_of_one_node_meet_on_loopback_and_those_of_several_say_where(
    task, num_nodes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    met: list[bool] = []
    monkeypatch.setattr("memtrain.trainers.runtime.loopback.listen_on_loopback", lambda: met.append(True))
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", num_nodes)
    assert task(0, 0) == 0
    if num_nodes == "1":
        assert (met, os.environ["MASTER_ADDR"]) == ([True], "127.0.0.1")
    else:
        assert (met, os.environ["MASTER_ADDR"]) == ([], "n1")
        assert "the ranks of 2 nodes connect at n1:20012" in capsys.readouterr().out
