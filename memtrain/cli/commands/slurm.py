"""`memtrain slurm`: a run as a SLURM job, planned for the nodes it will get before it is submitted."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument
from memtrain.cli.output.terminal import print_text, whole
from memtrain.errors import RecipeError

if TYPE_CHECKING:
    from memtrain.cli.launch.submit import Submission


def _option(name: str, summary: str) -> typer.models.OptionInfo:
    return typer.Option(name, help=summary, show_default=False)


def slurm(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[int | None, _option("--nodes", "Nodes of the job.")] = None,
    gpus: Annotated[int | None, _option("--gpus", "GPUs of each node.")] = None,
    gpu: Annotated[str | None, _option("--gpu", "Kind of GPU to plan for, such as h100.")] = None,
    time: Annotated[str | None, _option("--time", "Time limit, such as 2:00:00.")] = None,
    partition: Annotated[str | None, _option("--partition", "Partition.")] = None,
    account: Annotated[str | None, _option("--account", "Account.")] = None,
    qos: Annotated[str | None, _option("--qos", "Quality of service.")] = None,
    array: Annotated[
        list[str] | None,
        _option(
            "--array",
            "Values to try, one job each: train.seed=0,1,2. Given twice: one job for each combination.",
        ),
    ] = None,
    run_dir: Annotated[
        str | None, _option("--run-dir", "Run folder, instead of the recipe's run_dir.")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the script.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script, and ask SLURM whether it would accept it.")
    ] = False,
) -> None:
    """Write a run as a SLURM job, and submit it with --submit. Options stand for keys of cluster.slurm."""
    if submit and dry_run:
        raise RecipeError(
            "--submit and --dry-run cannot be used together", "the command line", "give one of the two"
        )
    given = {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "gpu": gpu,
        "time": time,
        "partition": partition,
        "account": account,
        "qos": qos,
        "array": array,
    }
    words = [f"cluster.slurm.{key}={json.dumps(value)}" for key, value in given.items() if value is not None]

    from memtrain.cli.launch.submit import prepare

    submission = prepare(recipe, [*(overrides or []), *words], run_dir)
    if submission is None:
        print_text(
            "Every run of this job is finished; nothing was written. To run it again: another --run-dir."
        )
        return
    _write(submission, submit=submit, dry_run=dry_run)


def _write(submission: Submission, *, submit: bool, dry_run: bool) -> None:
    """Tell the plan, write the job, and submit or try it."""
    from memtrain.cli.launch.slurm_queue import has_slurm, submit_script, try_submission
    from memtrain.cli.launch.summary import print_plan

    print_plan(submission.planned[0])
    job = submission.job
    if job.is_array:
        print_text(
            f"{len(job.runs)} runs, the plan of the first above: {', '.join(run.name for run in job.runs)}."
        )
    print_text(f"SLURM asks the run to save {job.lead_s} s before the time limit: {submission.lead_reason}.")
    submission.write()
    if dry_run:
        typer.echo(job.script.read_text())
        if has_slurm():
            print_text(try_submission(job.script))
    if not submit:
        print_text("Nothing was submitted. To submit it:")
        typer.echo(f"sbatch {shlex.quote(str(job.script))}")
        return
    number = submit_script(job.script)
    submission.record(number)
    print_text(f"Submitted as job {number}. `memtrain status {whole(job.folder)}` shows its state.")
