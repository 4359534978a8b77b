"""State of a run folder towards a plan, asked before anything is written into it."""

from __future__ import annotations

from pathlib import Path

from memtrain.errors import Fault, ResumeError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import Found, complete_steps
from memtrain.trainers.checkpoints.final_model import final_fault, read_final
from memtrain.trainers.checkpoints.manifest import (
    CheckpointFacts,
    OtherVersion,
    is_of_another_version,
    read_manifest,
)
from memtrain.trainers.checkpoints.resume import check_resumable
from memtrain.trainers.run_folder.folder import RunFolder, RunState

WAYS_OUT = (
    "use the version of memtrain that wrote them, or keep them and choose another --run-dir; --no-resume "
    "removes them and starts over"
)


def is_over(folder: RunFolder, plan: Plan) -> bool:
    """Whether the run that `plan` describes was made to its end, and its model is there.

    Looks at manifests only: the worker verifies the files. A run whose checkpoints were removed to save space
    is known by its model.

    Raises: ResumeError when the folder holds another run, or checkpoints of another version.
    """
    status = folder.read_status()
    is_done = status is not None and status.state is RunState.DONE
    facts = newest_facts(folder)
    if facts is None and is_done:
        final = read_final(folder)
        facts = final.facts if final is not None and not final_fault(folder) else None
    if facts is None:
        return False
    check_resumable(facts, plan)
    is_at_end = facts.step == plan.settings.max_steps or _ended_early(facts, plan)
    return is_done and is_at_end and not final_fault(folder)


def _ended_early(facts: CheckpointFacts, plan: Plan) -> bool:
    """Whether early stopping ended the run, and is asked for as it was."""
    asked, saved = plan.recipe.model_dump(mode="json")["eval"], facts.recipe.get("eval")
    key = "early_stopping"
    return facts.stopped_early and isinstance(saved, dict) and saved.get(key) == asked[key]


def lost_model(folder: RunFolder) -> str:
    """Reason that the model of a finished run is not as it was written; empty where it
    is, or the run was not."""
    status = folder.read_status()
    return final_fault(folder) if status is not None and status.state is RunState.DONE else ""


def refuse_unread(found: Found) -> None:
    """Raise ResumeError where a run would begin anew beside its checkpoints, or before another version's.

    What was not understood is never removed, and a run that goes on removes later checkpoints.
    """
    is_lost = found.checkpoint is None
    unread = [one for one in found.rejected if is_lost or is_of_another_version(one.path)]
    faults = [
        Fault(f"{one.path.name} cannot be used: {one.reason}", str(one.path), WAYS_OUT) for one in unread
    ]
    if faults:
        raise ResumeError(faults)


def newest_facts(folder: RunFolder) -> CheckpointFacts | None:
    """Facts of the newest checkpoint of a folder; None where there is none.

    Damaged ones are passed over while an older one can be read.

    Raises: ResumeError when none can be read, or one of another version is newer than all that can.
    """
    faults: list[Fault] = []
    for path in reversed(complete_steps(folder.checkpoints).values()):
        try:
            return read_manifest(path).facts
        except OtherVersion as error:
            raise ResumeError(f"{path.name} cannot be read: {error}", str(path), WAYS_OUT) from None
        except ValueError as error:
            faults.append(_unusable(path, error))
    if faults:
        raise ResumeError(faults)
    return None


def _unusable(path: Path, reason: object) -> Fault:
    return Fault(f"{path.name} cannot be used: {reason}", str(path), WAYS_OUT)
