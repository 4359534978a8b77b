"""From a recipe to a job that can be submitted: every run of it planned for its nodes, the script written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrain.cli.launch.local import recipe_yaml
from memtrain.cli.launch.sbatch import Job, lead_s, sbatch_text
from memtrain.cli.launch.slurm_nodes import hardware_of, nodes_of
from memtrain.cli.launch.slurm_queue import JobRecord, has_slurm, job_state, read_record
from memtrain.cli.launch.topology import Topology
from memtrain.cli.plan.check_rewards import check_rewards
from memtrain.cli.plan.make_plan import Planned, make_plan
from memtrain.errors import LaunchError
from memtrain.memory.estimate.static import copy_size
from memtrain.memory.estimate.workload import DTYPE_BYTES
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.load import LoadedRecipe, load_recipe
from memtrain.recipes.reading.sweep import folder_name, sweep
from memtrain.recipes.sections.slurm import Slurm
from memtrain.trainers.protocols.events import SaveEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import read_owner
from memtrain.trainers.run_folder.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class Submission:
    """A job, the plan of each of its runs, and the finished runs left out."""

    job: Job
    planned: tuple[Planned, ...]
    lead_reason: str

    def write(self) -> None:
        """Write plans, recipes and the script.

        Raises: LaunchError when a run folder cannot be written, or is in use.
        """
        from memtrain.trainers.checkpoints.final_model import refuse_foreign_final

        for planned, run in zip(self.planned, self.job.runs, strict=True):
            folder = RunFolder(run)
            _release(folder)
            with folder.open_for_run():
                refuse_foreign_final(folder)
                planned.plan.write(run)
                folder.recipe.write_text(recipe_yaml(planned.plan))
        self.job.logs.mkdir(parents=True, exist_ok=True)
        self.job.script.write_text(sbatch_text(self.job))

    def record(self, number: str) -> None:
        """Note in each run folder which job has it."""
        for index, run in enumerate(self.job.runs):
            job = f"{number}_{index}" if self.job.is_array else number
            JobRecord(job, self.job.logs / f"{job}.log").write(run)


def prepare(recipe: str, overrides: Sequence[str], run_dir: str | None) -> Submission | None:
    """The job of a recipe, each of its runs planned for the nodes it will get; None when all runs are over.

    Raises: RecipeError, DataError, DoesNotFit; LaunchError when a job that has one of the run folders may
    still write; ResumeError when a folder holds another run.
    """
    from memtrain.trainers.checkpoints.run_state import is_over

    loaded = load_recipe(recipe, overrides)
    asked = loaded.recipe.cluster.slurm or Slurm()
    above = Path(run_dir or loaded.recipe.run_dir or Path("runs") / loaded.path.stem)
    nodes = nodes_of(asked.partition)
    planned: list[Planned] = []
    for words in sweep(asked.array, loaded.where("cluster.slurm.array")):
        each = load_recipe(recipe, [*overrides, *words]) if words else loaded
        folder = above / folder_name(words) if words else above
        made = make_plan(each, run_dir=str(folder), hardware=hardware_of(each, nodes), keeps=True)
        check_rewards(each, made.plan.data)
        _check_free(folder)
        if not is_over(RunFolder(folder), made.plan):
            planned.append(made)
    if not planned:
        return None
    return _submission(loaded, asked, above.absolute(), planned)


def _submission(loaded: LoadedRecipe, asked: Slurm, above: Path, planned: list[Planned]) -> Submission:
    plans = [one.plan for one in planned]
    runs = tuple(Path(plan.run_dir).absolute() for plan in plans)
    leads = [_lead(asked, plan, RunFolder(run)) for plan, run in zip(plans, runs, strict=True)]
    lead, reason = max(leads)
    job = Job(
        summary=f"{loaded.recipe.method}: {loaded.path}",
        name=above.name,
        asked=asked,
        topology=Topology.of(plans[0].settings, asked.nodes),
        folder=above,
        runs=runs,
        digests=tuple(plan.digest() for plan in plans),
        here=Path.cwd(),
        python=asked.python or sys.executable,
        lead_s=lead,
        grace_s=loaded.recipe.cluster.stop_grace_s,
    )
    return Submission(job, tuple(planned), reason)


def _lead(asked: Slurm, plan: Plan, folder: RunFolder) -> tuple[int, str]:
    events = read_metrics(folder.metrics)
    saves = [event.seconds for event in events if isinstance(event, SaveEvent)]
    steps = [event.seconds for event in events if isinstance(event, StepEvent)]
    return lead_s(
        asked,
        save_s=max(saves, default=None),
        step_s=max(steps, default=0.0),
        checkpoint_bytes=_checkpoint_bytes(plan),
        is_background=plan.settings.background_save,
    )


def _checkpoint_bytes(plan: Plan) -> int:
    """Weights and states of a checkpoint, as the plan has them on the device and on the host."""
    settings = plan.settings
    saving = next(phase for phase in plan.prediction.phases if phase.phase == "saving")
    here = {owned.owner: owned.num_bytes for owned in saving.owners}
    states = here.get("optimizer", 0) + here.get("master copies", 0)
    if settings.adapter is not None:
        return states
    weights = here.get("weights", 0)
    if settings.optimizer_offload and settings.device == "cuda":
        size = DTYPE_BYTES[settings.dtype]
        moments = 2 * (4 if settings.master_weights else size)
        states += weights // size * (moments + copy_size(settings))
    return weights + states


def _check_free(folder: Path) -> None:
    """Raises: LaunchError when a job that was submitted for this folder may still write into it."""
    record = read_record(folder)
    state = job_state(record.job) if record is not None and has_slurm() else None
    if record is not None and state is not None and state.is_living:
        raise LaunchError(
            f"job {record.job} uses this run folder: {state.words()}",
            where=str(folder),
            fix=f"wait for it, `scancel {record.job}`, or choose another --run-dir",
        )


def _release(folder: RunFolder) -> None:
    """Take away the lock of a job that SLURM has ended: its process may have been on another host."""
    owner = read_owner(folder.lock)
    if owner is None or not owner.job or not has_slurm():
        return
    state = job_state(owner.job)
    if state is None or not state.is_living:
        folder.lock.unlink(missing_ok=True)
