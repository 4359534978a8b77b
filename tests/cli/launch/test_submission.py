"""`memtrain slurm`, `status` and `logs` on a machine without SLURM: what is written, reported and refused."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from memtrain.cli.commands.status import grown
from memtrain.cli.launch.slurm_queue import JobRecord
from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.run_folder.folder import RunFolder, RunState

RECIPE = """\
method: sft
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}
  tokenizer: builtin:tiny
data: {train: {source: builtin:arithmetic, limit: 50}}
length: {max_length: 128}
train: {batch_size: 8, max_steps: 6}
cluster:
  slurm: {time: 1:00:00, nodes: 2, array: ["train.seed=0,1"]}
"""


@pytest.fixture
def memtrain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The command line in this process, without SLURM; (exit code, stdout, stderr)."""
    from memtrain.__main__ import main

    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(RECIPE)

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words)
        return code, out.getvalue(), err.getvalue()

    return run


def test_an_array_is_planned_for_its_gpus_and_written_whole(memtrain, tmp_path: Path):
    code, out, err = memtrain("slurm", "my.yaml", "--gpus", "4", "--gpu", "h100", "--partition", "long")
    assert code == 0, err
    above = tmp_path / "runs" / "my"
    assert f"\nsbatch {above}/job.sbatch\n" in out
    script = (above / "job.sbatch").read_text()
    for line in ("--partition=long", "--ntasks=8", "--gpus-per-node=4", "--array=0-1", "--signal=B:USR1@120"):
        assert f"#SBATCH {line}\n" in script
    assert f"  {above}/seed=0\n  {above}/seed=1\n" in script
    for seed in (0, 1):
        plan = read_plan(above / f"seed={seed}" / "plan.json")
        assert (plan.settings.device, plan.settings.num_processes) == ("cuda", 8)
        assert plan.recipe.train.seed == seed
        assert not (above / f"seed={seed}" / ".lock").exists()
    code, out, _ = memtrain("status", "runs/my")
    assert code == 0
    assert out.count("not started") == 2
    code, _, err = memtrain("logs", "runs/my")
    assert (code, "holds 2 runs" in err) == (5, True)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "the memory of a GPU of the partition is unknown"),
        (("--gpu", "h100", "--submit"), 5, "sbatch is not on this machine"),
        (("--gpu", "h100", "--submit", "--dry-run"), 2, "cannot be used together"),
        (("--gpu", "h100", "memory.budget=1MiB"), 3, "fits 1.00 MiB"),
        (("--gpu", "h100", "--time", "soon"), 2, "'soon' is not a time limit"),
        (("--gpu", "h100", "--array", "train.seed"), 2, "gives no values to try"),
    ],
)
def test_what_cannot_be_submitted_is_said_before(memtrain, tmp_path: Path, words, code: int, said: str):
    ended = memtrain("slurm", "my.yaml", *words)
    assert (ended[0], said in ended[2]) == (code, True), ended[2]


def test_a_run_tells_its_state_and_a_killed_one_says_so(memtrain, tmp_path: Path):
    assert memtrain("slurm", "my.yaml", "cluster.device=cpu", "cluster.slurm.array=[]")[0] == 0
    folder = RunFolder(tmp_path / "runs" / "my")
    folder.write_status(RunState.RUNNING, 3)
    JobRecord("12", tmp_path / "12.log").write(folder.path)
    (tmp_path / "12.log").write_text("first\nsecond\n")
    code, out, _ = memtrain("status", "runs/my")
    assert code == 0
    assert "killed: its process is gone" in out
    assert "0 of 6" in out
    assert "12 (SLURM is not on this machine)" in out
    assert memtrain("logs", "runs/my", "-n", "1")[1] == "second\n"


def test_no_run_is_said_with_what_a_run_is(memtrain):
    code, _, err = memtrain("status", "nowhere")
    assert (code, "there is no run in nowhere" in err) == (5, True)


def test_a_log_is_followed_until_nobody_writes_it(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    more = iter(["four\n", "", "five\n"])

    def goes_on() -> bool:
        text = next(more, None)
        with path.open("a") as file:
            file.write(text or "")
        return text is not None

    assert list(grown(path, 2, goes_on, poll_s=0.0)) == ["three\nfour\n", "five\n"]
