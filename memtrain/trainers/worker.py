"""What every process of a run does with its plan: build, resume, train, save, report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from torch import Tensor

from memtrain.errors import Interrupted, MemtrainError, OutOfMemory
from memtrain.memory.plan import Plan, read_plan
from memtrain.trainers.build import Built, build
from memtrain.trainers.engine import distribute, make_accelerator, make_engine, ranks_of
from memtrain.trainers.feed import Steps
from memtrain.trainers.finish import finish
from memtrain.trainers.loop import Position, Run, train
from memtrain.trainers.model.load import local_device
from memtrain.trainers.run.checkpoint import Found, mend_checkpoints, newest_complete, save_checkpoint
from memtrain.trainers.run.events import EvalEvent, Event, MemoryEvent, NoteEvent, StepEvent
from memtrain.trainers.run.folder import RunFolder, RunState
from memtrain.trainers.run.manifest import facts_of
from memtrain.trainers.run.metrics import MetricsWriter
from memtrain.trainers.run.progress import Progress
from memtrain.trainers.run.ranks import Ranks
from memtrain.trainers.run.resume import check_resumable
from memtrain.trainers.run.signals import StopRequest
from memtrain.trainers.run.trackers import Trackers, open_trackers
from memtrain.trainers.run.watch import MemoryWatch
from memtrain.trainers.schedule import lr_at
from memtrain.trainers.snapshot import parts_of, restore

LOCKED = "MEMTRAIN_RUN_LOCKED"
"""Set by the launcher, which holds the lock of the run folder while its workers write into it."""


def work(plan: Plan, *, resume: bool = True) -> None:
    """Run `plan` on this rank, from its newest checkpoint where there is one.

    Raises: MemtrainError of every kind; Interrupted when asked to stop, after saving.
    """
    started = time.time()
    with ExitStack() as stack:
        accelerator = make_accelerator(plan.settings)
        ranks = ranks_of(accelerator)
        folder = RunFolder(Path(plan.run_dir))
        if ranks.is_main and LOCKED not in os.environ:
            stack.enter_context(folder.open_for_run())
        stop = stack.enter_context(StopRequest())
        position = Position()
        stack.enter_context(_status(folder, ranks, position))
        built = build(plan)
        model = distribute(accelerator, built.scorer)
        found = _look_for_checkpoint(folder, ranks, resume=resume)
        notes = check_resumable(found.checkpoint.manifest.facts, plan) if found.checkpoint else []
        if found.checkpoint is not None:
            restore(found.checkpoint, built.scorer, built.optimizer, position)
        tell = stack.enter_context(_teller(plan, folder, ranks, position))
        if not position.step:
            tell(replace(built.train.told("train"), rows_skipped=plan.data.train.num_skipped))
            if built.eval is not None:
                tell(built.eval.told("held-out"))
        for note in (*(f"passed over {one.path.name}: {one.reason}" for one in found.rejected), *notes):
            tell(NoteEvent(step=position.step, text=note))
        run = Run(
            plan=plan,
            model=model,
            method=built.method,
            optimizer=built.optimizer,
            lr_at=lambda step: lr_at(step, optim=plan.recipe.optim, max_steps=plan.settings.max_steps),
            steps=Steps(built.train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle),
            eval_feed=built.eval,
            ranks=ranks,
            engine=make_engine(accelerator),
            device=local_device(plan.settings),
            tell=tell,
            watch=_watch(plan, built, tell, ranks, position),
            is_asked_to_stop=lambda: stop.asked,
            save=_saver(plan, folder, built, ranks),
            position=position,
            started=started,
        )
        if found.checkpoint is not None:
            tell(NoteEvent(step=position.step, text=f"continued after step {position.step}"))
        train(run)
        finish(run, built, folder)
        ranks.barrier()
        accelerator.end_training()


def _look_for_checkpoint(folder: RunFolder, ranks: Ranks, *, resume: bool) -> Found:
    if not resume:
        return Found(None, ())
    if ranks.is_main:
        mend_checkpoints(folder)
    ranks.barrier()
    return newest_complete(folder)


def _saver(plan: Plan, folder: RunFolder, built: Built, ranks: Ranks) -> Callable[[Position], None]:
    save = plan.recipe.save

    def write(position: Position) -> None:
        facts = facts_of(plan, step=position.step, epoch=0, offset=0, eval_loss=position.eval_loss)
        parts = parts_of(built.scorer, built.optimizer, position) if ranks.is_main else {}
        save_checkpoint(folder, parts, facts, keep=save.keep, keep_best=save.keep_best, ranks=ranks)

    return write


def _watch(
    plan: Plan, built: Built, tell: Callable[[Event], None], ranks: Ranks, position: Position
) -> MemoryWatch:
    def note(phase: str, allocated: int, reserved: int, rss: int) -> None:
        tell(MemoryEvent(step=position.step, phase=phase, allocated=allocated, reserved=reserved, rss=rss))

    weights = resident(list(built.scorer.parameters()) + list(built.scorer.buffers()))
    state = resident(
        [t for held in built.optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
    )
    watch = MemoryWatch(local_device(plan.settings), weights + state, note, is_on=plan.recipe.memory.watch)
    if watch.is_on and ranks.is_main:
        note("load", weights, 0, psutil.Process().memory_info().rss)
    return watch


def resident(tensors: list[Tensor]) -> int:
    """Bytes of the storages of `tensors`, shared ones once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@contextmanager
def _teller(
    plan: Plan, folder: RunFolder, ranks: Ranks, position: Position
) -> Iterator[Callable[[Event], None]]:
    """What takes the events: metrics, terminal, trackers; nothing on other ranks than the main one."""
    if not ranks.is_main:
        yield lambda event: None
        return
    with ExitStack() as stack:
        metrics = stack.enter_context(
            MetricsWriter(folder.metrics, resumed_at=position.step if position.step else None)
        )
        trackers: Trackers = open_trackers(plan, folder)
        stack.callback(trackers.close)
        progress = stack.enter_context(
            Progress(
                plan.settings.max_steps,
                every_steps=plan.recipe.log.every_steps,
                first_step=position.step,
                log=folder.log,
            )
        )

        def tell(event: Event) -> None:
            metrics.write(event)
            trackers.tell(event)
            if isinstance(event, StepEvent):
                progress.stepped(event)
            elif isinstance(event, EvalEvent):
                progress.evaluated(event.step, event.loss)
            elif isinstance(event, NoteEvent):
                progress.say(event.text)

        yield tell


@contextmanager
def _status(folder: RunFolder, ranks: Ranks, position: Position) -> Iterator[None]:
    """`status.json` tells how the run stands, whatever ends it."""

    def write(state: RunState, message: str = "") -> None:
        if ranks.is_main:
            folder.write_status(state, position.step, message)

    write(RunState.RUNNING)
    try:
        yield
    except Interrupted as error:
        write(RunState.SAVED, error.faults[0].what)
        raise
    except OutOfMemory as error:
        write(RunState.OUT_OF_MEMORY, error.faults[0].what)
        raise
    except MemtrainError as error:
        write(RunState.FAILED, error.faults[0].what)
        raise
    except Exception as error:
        write(RunState.FAILED, f"{type(error).__name__}: {error}")
        raise
    write(RunState.DONE)


def main() -> int:
    """Entry point of a launched process: the plan's path is its only argument. The exit code."""
    try:
        plan = read_plan(Path(sys.argv[1]))
        work(plan, resume="--no-resume" not in sys.argv)
    except MemtrainError as error:
        rank = int(os.environ.get("RANK", "0"))
        print(error.text() if rank == 0 else f"rank {rank}: {error.text()}", file=sys.stderr)
        return error.exit_code
    finally:
        _leave_process_group()
    return 0


def _leave_process_group() -> None:
    """A process group left open makes gloo abort at exit."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
