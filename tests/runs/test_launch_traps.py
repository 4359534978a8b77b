"""What a launch may quietly do wrong, each refused before a weight is loaded; and the files it leaves."""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType

from memtrain.errors import DataError, LaunchError
from memtrain.trainers.build import engine
from memtrain.trainers.loop import worker

TWO = ("cluster.processes=2",)


@pytest.fixture
def never_built(monkeypatch):
    """A rank that begins to load its model ends with another code."""

    def build(plan, spread):
        os._exit(3)

    monkeypatch.setattr(worker, "build", build)


def test_a_launch_that_started_one_process_is_refused(runs, never_built):
    process = runs.fork_ranks("run", 2, num_started=1)[0]
    assert process.wait() == LaunchError.exit_code
    assert "the plan asks for 2 processes and 1 run" in process.said


def test_processes_whose_gradients_accelerate_does_not_sum_are_refused(runs, never_built, monkeypatch):
    """What it sets up for `ddp_backend: gloo` alone: a process group, and no distribution."""
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.NO)
    ranks = runs.fork_ranks("run", 2)
    assert [rank.wait() for rank in ranks] == [LaunchError.exit_code] * 2
    assert "would not exchange gradients" in ranks[0].said


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_ranks_with_another_package_are_named(runs, never_built, monkeypatch, package: str):
    plain = worker.check_same_plan_on_ranks

    def check_same_plan_on_ranks(plan, ranks):
        if os.environ.get("RANK") == "1":
            setattr(engine, package, SimpleNamespace(__version__="0.0"))
        plain(plan, ranks)

    monkeypatch.setattr(worker, "check_same_plan_on_ranks", check_same_plan_on_ranks)
    ranks = runs.fork_ranks("run", 2)
    assert [rank.wait() for rank in ranks] == [LaunchError.exit_code] * 2
    assert f"rank 1 has another {package} than rank 0" in ranks[0].said


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_leaves_the_process_group_whatever_happens(runs, tmp_path: Path, monkeypatch, fails: bool):
    plain_leave, plain_build = dist.destroy_process_group, worker.build

    def leave(group: dist.ProcessGroup | None = None) -> None:
        (tmp_path / f"left-{os.environ['RANK']}").touch()
        plain_leave(group)

    def build(plan, spread):
        if fails and os.environ["RANK"] == "1":
            raise DataError("row 7 is gone")
        return plain_build(plan, spread)

    monkeypatch.setattr(dist, "destroy_process_group", leave)
    monkeypatch.setattr(worker, "build", build)
    codes = [rank.wait() for rank in runs.fork_ranks("run", 2, "train.max_steps=1")]
    assert (codes[1] == DataError.exit_code) if fails else (codes == [0, 0])
    assert sorted(path.name for path in tmp_path.glob("left-*")) == ["left-0", "left-1"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("cluster.engine=ddp",), "2 processes on cpu: ddp"),
        (
            ("cluster.engine=fsdp2", "cluster.context_parallel=2"),
            "2 processes on cpu: fsdp2, rows held by 2 (keys)",
        ),
        (("cluster.engine=zero2",), "2 processes on cpu: zero2"),
    ],
)
def test_the_launch_files_are_as_they_are_printed(runs, monkeypatch, said: tuple[str, ...], words: str):
    """`launch.sh` is the command that the run is; accelerate starts processes under every engine alike."""
    monkeypatch.setattr("memtrain.memory.hardware.packages.installed", lambda *names: frozenset(names))
    ended = runs.run("run", *TWO, *said, "--dry-run")
    assert ended.code == 0, ended.err
    folder = runs.folder / "run"
    place = shlex.quote(str(folder))
    assert (folder / "launch.sh").read_text().splitlines() == [
        "#!/usr/bin/env bash",
        f"# {words}",
        "set -e",
        "export OMP_NUM_THREADS=1",
        "export TOKENIZERS_PARALLELISM=false",
        "export ACCELERATE_USE_CPU=true",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f"exec {sys.executable} -m memtrain.trainers.runtime.loopback --config_file {place}/accelerate.yaml "
        f"-m memtrain.trainers.loop.worker {place}/plan.json",
    ]
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (config["distributed_type"], config["num_processes"], config["use_cpu"]) == ("MULTI_GPU", 2, False)
    has_deepspeed = (folder / "deepspeed.json").exists()
    assert has_deepspeed == ("zero" in said[0])
    if has_deepspeed:
        made = json.loads((folder / "deepspeed.json").read_text())
        assert made["zero_optimization"]["stage"] == 2
    assert f"{place}/launch.sh runs it" in ended.out.replace("\n", " ")
