"""SLURM jobs as text (golden files), what SLURM says, and what is refused before anything is submitted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from memtrain.cli.launch import slurm_nodes as nodes_module
from memtrain.cli.launch.sbatch import Job, lead_s, sbatch_text
from memtrain.cli.launch.slurm_exit import verdict
from memtrain.cli.launch.slurm_nodes import Node, hardware_of, parse_nodes
from memtrain.cli.launch.slurm_queue import JobRecord, parse_job, read_record
from memtrain.cli.launch.topology import Topology
from memtrain.errors import DataError, LaunchError, RecipeError
from memtrain.memory.plan.units import GIB
from memtrain.recipes.reading.load import LoadedRecipe, load_recipe
from memtrain.recipes.sections.slurm import Slurm
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.rank_failures import note_fault

GOLDEN = Path(__file__).parents[1] / "golden"

ONE = Job(
    summary="sft: my.yaml",
    name="my",
    asked=Slurm(),
    topology=Topology(num_nodes=1, processes_per_node=1, device="cuda", threads=8),
    folder=Path("/runs/my"),
    runs=(Path("/runs/my"),),
    digests=("0123abcd",),
    here=Path("/elsewhere"),
    python="/env/bin/python",
    lead_s=120,
    grace_s=600,
)
MANY = replace(
    ONE,
    asked=Slurm.model_validate(
        {
            "partition": "gpu",
            "account": "lab",
            "qos": "high",
            "time": "1-00:00:00",
            "nodes": 2,
            "gpus_per_node": 8,
            "cpus_per_task": 6,
            "mem": "512GiB",
            "constraint": "a100&ib",
            "lines": ["--exclusive", "--mail-type=END"],
            "setup": ["module load cuda", "export NCCL_SOCKET_IFNAME=ib0"],
            "max_restarts": 3,
            "array": ["train.seed=0,1"],
            "array_limit": 1,
        }
    ),
    topology=Topology(num_nodes=2, processes_per_node=8, device="cuda", threads=6),
    runs=(Path("/runs/my/seed=0"), Path("/runs/my/it's 100%")),
    digests=("0123abcd", "4567cdef"),
    folder=Path("/runs/my 100%"),
    lead_s=600,
)


@pytest.mark.parametrize(("name", "job"), [("one", ONE), ("many", MANY)])
def test_the_script_is_as_it_was_read_and_agreed_to(name: str, job: Job):
    assert sbatch_text(job) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("job", [ONE, MANY])
def test_the_script_is_bash(job: Job):
    done = subprocess.run(["bash", "-n"], input=sbatch_text(job), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


HOSTILE = (
    "a b", "it's", 'say "x"', "$(touch owned)", "`touch owned`", "; touch owned #", "a#b", "back\\slash", "*",
    "-n", "%j", "${HOME}", "a)b(", "!!", "é日本", "\\",
)  # fmt: skip


def hostile_job(name: str) -> Job:
    return replace(ONE, folder=Path("/r") / name, runs=(Path("/r") / name,), here=Path("/h") / name,
                   name=name, python=f"/env/{name}/python", summary=name)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_one_word_of_the_script_and_runs_nothing(name: str, tmp_path: Path):
    """What bash makes of it: the run and the python of the script, and no file `owned`."""
    text = sbatch_text(hostile_job(name))
    said = text.partition("max_restarts=")[0] + 'printf "%s\\n" "$run" "$python"\n'
    done = subprocess.run(["bash"], input=said, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.splitlines() == [f"/r/{name}", f"/env/{name}/python"], done.stderr
    assert list(tmp_path.iterdir()) == []
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    plain = [line for line in sbatch_text(ONE).splitlines() if line.startswith("#SBATCH")]
    assert len(options) == len(plain)


@pytest.mark.parametrize("name", ["a", *HOSTILE])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing_in_a_script_of_a_hostile_name(name: str):
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "--severity=warning", "-"],
        input=sbatch_text(hostile_job(name)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\u2028", "\x00"])
def test_a_line_break_in_a_name_is_refused(letter: str):
    job = hostile_job(f"x{letter}touch owned")
    with pytest.raises(LaunchError, match="contains a line break or another control character"):
        sbatch_text(job)


def test_the_lead_has_time_for_three_saves_and_two_steps():
    """3 * 60 s + 2 * 10 s = 200 s; 3 * 80e9 B / 200e6 B/s = 1200 s; a short limit leaves half of itself."""
    asked = Slurm(time="2:00:00")
    assert lead_s(asked, save_s=60, step_s=10, checkpoint_bytes=0)[0] == 200
    assert lead_s(asked, save_s=None, step_s=0, checkpoint_bytes=80 * 10**9)[0] == 1200
    assert lead_s(asked, save_s=1, step_s=1, checkpoint_bytes=0)[0] == 120
    assert lead_s(Slurm(time="0:02:00"), save_s=1, step_s=1, checkpoint_bytes=0)[0] == 60
    # One that is under way in the background is waited for first: 6 * 60 s + 2 * 10 s.
    later = lead_s(asked, save_s=60, step_s=10, checkpoint_bytes=0, is_background=True)
    assert later == (380, "time for six saves (60.0 s, measured) and two steps")
    assert lead_s(Slurm(signal_lead_s=30), save_s=60, step_s=1, checkpoint_bytes=0) == (30, "asked for")


JOB = (
    "JobId=12 JobName=my run UserId=me(1000) JobState=RUNNING Reason=None Requeue=1 Restarts=2 ExitCode=0:0 "
    "RunTime=00:12:05 TimeLimit=02:00:00 NodeList=n[1-2] BatchHost=n1"
)


def test_a_job_is_read_from_scontrol():
    state = parse_job(JOB)
    assert state.is_living
    assert state.words() == "RUNNING, on n[1-2], 00:12:05 of 02:00:00, restart 2"
    waiting = parse_job(
        JOB.replace("RUNNING", "PENDING")
        .replace("Reason=None", "Reason=Priority")
        .replace("n[1-2]", "(null)")
    )
    assert waiting.words() == "PENDING (Priority), 00:12:05 of 02:00:00, restart 2"
    failed = parse_job(JOB.replace("RUNNING", "FAILED").replace("ExitCode=0:0", "ExitCode=4:0"))
    assert not failed.is_living
    assert failed.words().endswith("exit code 4")


def test_a_record_comes_back(tmp_path: Path):
    assert read_record(tmp_path) is None
    record = JobRecord("12_1", tmp_path / "slurm" / "12_1.log")
    record.write(tmp_path)
    assert read_record(tmp_path) == record


NODES = """\
NodeName=a1 CPUTot=64 Gres=gpu:nvidia_a100-sxm4-40gb:4(S:0-1) NodeAddr=a1 RealMemory=512000 Partitions=gpu,all
NodeName=h1 CPUTot=64 Gres=gpu:h100:8 NodeAddr=h1 RealMemory=1024000 Partitions=gpu
NodeName=c1 CPUTot=64 Gres=(null) NodeAddr=c1 RealMemory=256000 Partitions=cpu,all
NodeName=u1 CPUTot=64 Gres=gpu:4 NodeAddr=u1 RealMemory=256000 Partitions=old
"""


def test_nodes_are_read_from_scontrol():
    a1, h1, c1, u1 = parse_nodes(NODES)
    assert (a1.gpu, h1.gpu, c1.gpu, u1.gpu) == ("nvidia_a100-sxm4-40gb", "h100", "", "")
    assert a1.partitions == ("gpu", "all")
    assert h1.memory_bytes == 1000 * GIB


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., LoadedRecipe]:
    path = tmp_path / "my.yaml"
    path.write_text("method: sft\nmodel: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\n")
    return lambda *words: load_recipe(str(path), words)


def test_the_smallest_card_of_the_partition_is_planned_for(loaded):
    found = hardware_of(
        loaded("cluster.slurm.nodes=2", "cluster.slurm.gpus_per_node=4"), parse_nodes(NODES)[:2]
    )
    assert (found.name, found.num_devices, found.num_nodes) == ("A100-40", 4, 2)
    named = hardware_of(loaded("cluster.slurm.gpu=h100", "cluster.slurm.mem=100GiB"), [])
    assert (named.name, named.num_devices, named.host_bytes) == ("H100", 1, 100 * GIB)


def test_a_card_that_nobody_knows_must_be_said(loaded):
    with pytest.raises(RecipeError, match=r"a GPU of partition old is unknown[\s\S]*--gpu NAME"):
        hardware_of(loaded("cluster.slurm.partition=old"), parse_nodes(NODES)[3:])
    with pytest.raises(RecipeError, match=r"its nodes say: a100\)"):
        hardware_of(loaded(), [Node(("gpu",), GIB, "a100")])


def test_a_cpu_job_has_the_cores_and_memory_of_its_nodes(loaded):
    words = ("cluster.device=cpu", "cluster.slurm.nodes=2", "cluster.processes=4", "cluster.threads=3")
    found = hardware_of(loaded(*words), [Node(("cpu",), 8 * GIB, "")])
    assert (found.device, found.num_cores, found.num_nodes, found.memory_bytes) == ("cpu", 6, 2, 8 * GIB)
    with pytest.raises(RecipeError, match="multiple of 2"):
        hardware_of(loaded(*words, "cluster.processes=3"), [])
    with pytest.raises(RecipeError, match="gpus_per_node is 2, but cluster.device is cpu"):
        hardware_of(loaded(*words, "cluster.slurm.gpus_per_node=2"), [])


def test_without_slurm_the_nodes_are_not_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes_module, "has_slurm", lambda: False)
    assert nodes_module.nodes_of("gpu") == []


def test_the_verdict_is_that_of_the_rank_that_failed_first(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.write_status(RunState.RUNNING, 7)
    note_fault(folder, 1, DataError("row 3 is no text", "a.jsonl:3", "fix it"))
    note_fault(folder, 0, RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    text, code = verdict(folder, 2, 143)
    assert text.startswith("error: rank 1: row 3 is no text")
    assert code == 4
    status = folder.read_status()
    assert status is not None
    assert (status.state, status.message) == (RunState.FAILED, "rank 1: row 3 is no text")


def test_without_a_word_the_code_of_srun_stands(tmp_path: Path):
    text, code = verdict(RunFolder(tmp_path), 2, 137)
    assert "killed by signal 9 without an error message" in text
    assert code == 137
