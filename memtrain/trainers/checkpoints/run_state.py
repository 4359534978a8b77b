"""How a run folder stands towards a plan, asked before anything is written into it."""

from __future__ import annotations

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import complete_steps
from memtrain.trainers.checkpoints.manifest import CheckpointFacts, read_manifest
from memtrain.trainers.checkpoints.resume import check_resumable
from memtrain.trainers.run_folder.folder import RunFolder, RunState


def is_over(folder: RunFolder, plan: Plan) -> bool:
    """Whether the run that `plan` describes was made to its end.

    Looks at manifests only: the worker verifies the files.

    Raises: ResumeError when the folder holds checkpoints of another run.
    """
    newest = newest_facts(folder)
    if newest is None:
        return False
    check_resumable(newest, plan)
    status = folder.read_status()
    is_done = status is not None and status.state is RunState.DONE
    return is_done and newest.step == plan.settings.max_steps and folder.final.is_dir()


def newest_facts(folder: RunFolder) -> CheckpointFacts | None:
    """What the newest checkpoint of a folder says of its run; None where none can be read."""
    for path in reversed(complete_steps(folder.checkpoints).values()):
        try:
            return read_manifest(path).facts
        except ValueError:
            continue
    return None
