"""Jobs that lose their nodes, on a real SLURM: each goes on, with the losses of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def status(folder: Path) -> tuple[str, int]:
    reported = json.loads((folder / "status.json").read_text())
    return reported["state"], reported["step"]


def notes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]


def task_of(folder: Path, rank: int) -> psutil.Process:
    """The process of one rank."""
    for one in psutil.process_iter(["name", "cmdline"]):
        is_task = one.info["name"] != "srun" and str(folder / "plan.json") in (one.info["cmdline"] or ())
        if is_task and one.environ().get("SLURM_PROCID") == str(rank):
            return one
    raise AssertionError(f"rank {rank} does not run")


def goes_on(run, whole, curve_of, restarts: int = 1) -> None:
    """The job ends by itself after so many restarts, resumed, every loss that of the undisturbed run."""
    shown = run.end()
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", str(restarts)), run.log
    assert status(run.folder) == ("done", 200)
    assert [note.partition(" at ")[0] for note in notes(run.folder)] == ["resumed"] * restarts
    assert curve_of(run.folder) == curve_of(whole.folder)


def test_a_job_runs_to_its_end_on_two_nodes(cluster, whole, curve_of):
    shown = whole.show()
    assert (shown["NodeList"], shown["ExitCode"], shown["Restarts"]) == ("n[1-2]", "0:0", "0")
    assert [line[0] for line in curve_of(whole.folder)] == list(range(1, 201))
    reported = cluster.memtrain("status", str(whole.folder)).stdout
    assert "200 of 200" in reported
    assert "COMPLETED, on n[1-2]" in reported
    assert "step 200/200" in cluster.memtrain("logs", str(whole.folder)).stdout
    again = cluster.memtrain("slurm", str(cluster.recipe), "--run-dir", str(whole.folder), "--submit")
    assert again.stdout.startswith("Every run of this job is finished")


def test_the_signal_before_the_time_limit_saves_and_queues_again(cluster, whole, curve_of, ask):
    run = cluster.submit("limit")
    run.until_step(5)
    ask("scancel", "--batch", "--signal=USR1", run.job)
    run.until_restarted()
    goes_on(run, whole, curve_of)
    assert "saved; back into the queue" in run.log


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_real_time_limit_is_outlived_and_no_second_job_takes_the_folder(cluster, curve_of):
    """So many steps take longer than two minutes on any machine of today."""
    words = ("train.max_steps=2500", "save.every_steps=500")
    undisturbed = cluster.submit("long", *words)
    assert undisturbed.end(timeout_s=900)["JobState"] == "COMPLETED"
    run = cluster.submit("short", *words, "--time", "0:02:00")
    run.until_step(5)
    refused = cluster.memtrain("slurm", str(cluster.recipe), "--run-dir", str(run.folder))
    assert refused.returncode == 5
    assert f"job {run.job} uses this run folder: RUNNING" in refused.stderr
    shown = run.end(timeout_s=1400)
    assert shown["JobState"] == "COMPLETED", run.log
    assert int(shown["Restarts"]) >= 1
    assert curve_of(run.folder) == curve_of(undisturbed.folder)


def test_a_requeued_job_goes_on(cluster, whole, curve_of, ask):
    run = cluster.submit("requeue")
    run.until_step(5)
    ask("scontrol", "requeue", run.job)
    run.until_restarted()
    goes_on(run, whole, curve_of)


def test_a_cancelled_job_saves_stays_cancelled_and_can_be_submitted_again(cluster, whole, curve_of, ask):
    run = cluster.submit("cancel")
    run.until_step(5)
    ask("scancel", run.job)
    shown = run.end()
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0")
    time.sleep(10)
    assert run.state == "CANCELLED"
    state, step = status(run.folder)
    assert state == "saved"
    assert 5 <= step < 200
    again = cluster.submit("cancel")
    assert again.job != run.job
    assert again.end()["JobState"] == "COMPLETED"
    assert curve_of(run.folder) == curve_of(whole.folder)


@pytest.mark.parametrize("partition", ["main", "abrupt"], ids=["with_grace", "without_grace"])
def test_a_preempted_job_goes_on(cluster, whole, curve_of, ask, partition: str):
    run = cluster.submit(f"preempted-{partition}", "--partition", partition)
    run.until_step(5)
    ask("sbatch", "--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
    run.until_restarted()
    goes_on(run, whole, curve_of)


def test_a_job_whose_node_fails_goes_on(cluster, whole, curve_of, ask):
    run = cluster.submit("node")
    run.until_step(50)
    # A node that answers comes back by itself (ReturnToService=2).
    ask("scontrol", "update", f"nodename={run.show()['BatchHost']}", "state=down", "reason=test")
    run.until_restarted()
    goes_on(run, whole, curve_of)
    assert "DUE TO NODE FAILURE" in run.log


def test_a_killed_rank_fails_the_job_with_its_code_and_is_not_queued_again(cluster, whole, curve_of):
    run = cluster.submit("killed")
    run.until_step(45)
    task_of(run.folder, 1).kill()
    shown = run.end()
    assert (shown["JobState"], shown["Restarts"]) == ("FAILED", "0"), run.log
    assert shown["ExitCode"].partition(":")[0] != "0"
    assert status(run.folder)[0] == "failed"
    again = cluster.submit("killed")
    assert again.end()["JobState"] == "COMPLETED", again.log
    assert curve_of(run.folder) == curve_of(whole.folder)


def test_ranks_that_hang_are_ended_within_the_grace_and_the_log_says_where(cluster, whole, curve_of, ask):
    """A stopped process stands for one whose disk answers no more; the other one, of another node, waits."""
    run = cluster.submit("hangs", "cluster.stop_grace_s=6")
    run.until_step(45)
    tasks = [task_of(run.folder, rank) for rank in (0, 1)]
    tasks[1].suspend()
    ask("scancel", "--batch", "--signal=USR1", run.job)
    shown = run.end(timeout_s=60)
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "5:0", "0"), run.log
    assert "made no progress for 6 s: it was killed. rank 0 is in " in run.log
    assert not psutil.wait_procs(tasks, timeout=10)[1]
    assert status(run.folder)[0] == "failed"
    again = cluster.submit("hangs")
    assert again.end()["JobState"] == "COMPLETED", again.log
    assert not (run.folder / ".faults").exists()
    assert curve_of(run.folder) == curve_of(whole.folder)


def test_a_rank_that_fails_gives_its_exit_code_to_the_job(cluster, whole):
    """One that refuses: the plan was replaced while the job waited."""
    run = cluster.folder / "gone"
    done = cluster.memtrain("slurm", str(cluster.recipe), "--run-dir", str(run))
    assert done.returncode == 0, done.stderr
    plan = json.loads((run / "plan.json").read_text())
    plan["settings"]["num_processes"] = 3
    (run / "plan.json").write_text(json.dumps(plan))
    submitted = subprocess.run(
        ["sbatch", "--parsable", run / "job.sbatch"], capture_output=True, text=True, check=True
    )
    job = type(whole)(run, submitted.stdout.strip())
    shown = job.end()
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "5:0"), job.log
    assert "is not the plan that this process was started for" in job.log


def test_restarts_are_bounded(cluster, ask):
    run = cluster.submit("bounded", "cluster.slurm.max_restarts=0")
    run.until_step(5)
    ask("scancel", "--batch", "--signal=USR1", run.job)
    shown = run.end()
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "75:0", "0")
    assert status(run.folder)[0] == "saved"
    assert "not queued again: this was restart 0 of 0" in run.log


def test_an_array_trains_each_seed_and_one_of_them_may_be_queued_again(cluster, curve_of, ask):
    array = cluster.submit("seeds", "--nodes", "1", "--array", "train.seed=0,1,2")
    runs = [type(array)(array.folder / f"seed={seed}", f"{array.job}_{seed}") for seed in range(3)]
    runs[1].until_step(5)
    ask("scancel", "--batch", "--signal=USR1", runs[1].job)
    ends = [run.end() for run in runs]
    assert [shown["JobState"] for shown in ends] == ["COMPLETED"] * 3, array.log
    assert [shown["Restarts"] for shown in ends] == ["0", "1", "0"]
    curves = [curve_of(run.folder) for run in runs]
    assert len({curve[-1] for curve in curves}) == 3
    for seed, found in enumerate(curves):
        alone = cluster.folder / f"alone-{seed}"
        words = ("--run-dir", str(alone), f"train.seed={seed}")
        assert cluster.memtrain("sft", str(cluster.recipe), *words).returncode == 0
        assert found == curve_of(alone)
    reported = cluster.memtrain("status", str(array.folder)).stdout
    assert reported.count("200 of 200") == 3
