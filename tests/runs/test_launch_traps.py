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
from memtrain.memory.plan.plan import read_plan
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
    assert "the plan needs 2 processes, and 1 are running" in process.said


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
    assert f"rank 1 does not have the same {package} as rank 0" in ranks[0].said


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
            "2 processes on cpu: fsdp2, rows held by 2 (all_gather)",
        ),
        (("cluster.engine=zero2",), "2 processes on cpu: zero2"),
    ],
)
def test_the_launch_files_are_as_they_are_printed(runs, monkeypatch, said: tuple[str, ...], words: str):
    """`launch.sh` is the command that the run is; accelerate starts processes under every engine alike."""
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset(names))
    ended = runs.run("run", *TWO, *said, "--dry-run")
    assert ended.code == 0, ended.err
    folder = runs.folder / "run"
    place = shlex.quote(str(folder))
    digest = read_plan(folder / "plan.json").digest()
    assert (folder / "launch.sh").read_text().splitlines() == [
        "#!/usr/bin/env bash",
        f"# {words}",
        "set -e",
        "export OMP_NUM_THREADS=1",
        "export TOKENIZERS_PARALLELISM=false",
        "export ONEDNN_PRIMITIVE_CACHE_CAPACITY=64",
        "export LRU_CACHE_CAPACITY=64",
        "export ACCELERATE_USE_CPU=true",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f"exec {sys.executable} -m memtrain.trainers.runtime.loopback --config_file {place}/accelerate.yaml "
        f"-m memtrain.trainers.loop.worker {place}/plan.json --plan-digest {digest}",
    ]
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (config["distributed_type"], config["num_processes"], config["use_cpu"]) == ("MULTI_GPU", 2, False)
    has_deepspeed = (folder / "deepspeed.json").exists()
    assert has_deepspeed == ("zero" in said[0])
    if has_deepspeed:
        made = json.loads((folder / "deepspeed.json").read_text())
        assert made["zero_optimization"]["stage"] == 2
    assert f"{place}/launch.sh runs it" in ended.out.replace("\n", " ")


def test_a_second_start_between_the_launcher_and_its_ranks_changes_nothing(runs, monkeypatch):
    """The ranks are about to be started, and none of them has the folder yet."""
    plan = runs.folder / "run" / "plan.json"
    reported: list[str] = []

    def run_agent(words, environment, *rest):
        before = plan.read_bytes()
        second = runs.fork("run", *TWO, "optim.lr=1e-4")
        assert second.wait() == LaunchError.exit_code, second.said
        reported.append(second.said)
        assert plan.read_bytes() == before
        assert read_plan(plan, words[-1]).recipe.optim.lr == 3e-3

    monkeypatch.setattr("memtrain.cli.launch.elastic_agent.run_agent", run_agent)
    runs.run("run", *TWO)
    assert f"process {os.getpid()} on" in reported[0]
    assert not (runs.folder / "run" / ".lock").exists()


def test_a_rank_takes_no_plan_but_the_one_it_was_started_for(runs, never_built, monkeypatch):
    folder = runs.folder / "run"
    assert runs.run("run", *TWO, "--dry-run").code == 0
    digest = read_plan(folder / "plan.json").digest()
    plain = worker.main

    def main() -> int:
        sys.argv += ["--plan-digest", digest]
        return plain()

    monkeypatch.setattr(worker, "main", main)
    ranks = runs.fork_ranks("run", 2, "optim.lr=1e-4")
    assert [rank.wait() for rank in ranks] == [LaunchError.exit_code] * 2
    assert "plan.json is not the plan that this process was started for" in ranks[0].said


def test_a_plan_that_is_replaced_while_the_ranks_meet_is_not_trained(runs, never_built, monkeypatch):
    """Ranks that were started by hand read the plan, meet, and take the folder only then."""
    folder = runs.folder / "run"
    plain = worker.make_accelerator

    def meet(settings):
        made = plain(settings)
        # In one piece: both ranks do so, and neither may read what the other has half written.
        other = folder / f"other-{os.getpid()}.json"
        other.write_text((folder / "plan.json").read_text().replace('"lr": 0.003', '"lr": 0.004'))
        other.replace(folder / "plan.json")
        return made

    monkeypatch.setattr(worker, "make_accelerator", meet)
    ranks = runs.fork_ranks("run", 2)
    assert ranks[0].wait() == LaunchError.exit_code, ranks[0].said
    assert "plan.json was replaced while this run started" in ranks[0].said
    assert ranks[1].wait() != 0
    assert not (folder / ".lock").exists()
