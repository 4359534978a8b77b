"""The worker: every process of a run builds, resumes, trains, saves and reports by its plan."""

from __future__ import annotations

import os
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
from torch import Tensor
from transformers.utils import logging as transformers_logging

from memtrain.errors import EXIT_OUR_FAULT, Interrupted, LaunchError, MemtrainError, printable
from memtrain.memory.plan.plan import Plan, PreparedSplit, read_plan
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.step_graphs import recorded_nowhere
from memtrain.trainers.build.components import Built, build, has_dropout
from memtrain.trainers.build.engine import (
    begin,
    check_same_plan_on_ranks,
    make_accelerator,
    make_spread,
    ranks_of,
    scaled_by,
)
from memtrain.trainers.build.step import OptimizerStep, capture_passes
from memtrain.trainers.checkpoints.checkpoint import (
    Found,
    mend_checkpoints,
    newest_complete,
    remove_checkpoints,
)
from memtrain.trainers.checkpoints.resume import check_resumable
from memtrain.trainers.checkpoints.run_state import is_over, refuse_unread
from memtrain.trainers.checkpoints.snapshot import restore
from memtrain.trainers.loop.exit_status import record_exit
from memtrain.trainers.loop.finish import finish
from memtrain.trainers.loop.held_out_metrics import open_metrics
from memtrain.trainers.loop.loop import Evaluation, Observers, Run, train
from memtrain.trainers.loop.observers import host_time_of, step_watch
from memtrain.trainers.loop.oom.post_mortem import post_mortem, refuse_over_budget
from memtrain.trainers.loop.oom.preflight import preflight
from memtrain.trainers.loop.oom.recover import Exhausted, Recovery
from memtrain.trainers.loop.sampling import open_writer, sampled
from memtrain.trainers.loop.saver import Saver
from memtrain.trainers.memory_meter.live_tensors import live_bytes, resident
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.memory_meter.resized_storages import counting_mode
from memtrain.trainers.model.heads.build import configure_loss
from memtrain.trainers.model.loading.load import is_random, local_device
from memtrain.trainers.model.loading.save import try_final
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.online.rollout.on_policy import on_policy_steps
from memtrain.trainers.online.rollout.online_loop import OnlineSteps, online_steps
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.protocols.events import DataEvent, Event, MemoryEvent, NoteEvent
from memtrain.trainers.protocols.feed import Steps, StepSource
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks, open_sinks
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.lock import OWNER, RunLock
from memtrain.trainers.run_folder.pulse import WATCHED, Family, Pulse
from memtrain.trainers.run_folder.rank_failures import LAUNCHED, clear_faults, note_fault
from memtrain.trainers.runtime.allocator import allocator_words
from memtrain.trainers.runtime.exits import end_at_once, no_way_out
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.safe_path import for_this_process_alone
from memtrain.trainers.runtime.signals import HUNG_UP, StopRequest, hold_signals, is_hung_up
from memtrain.trainers.runtime.streams import flush, go_on_without_readers, take_streams
from memtrain.trainers.runtime.weight_layout import local_of

GONE = "the launcher of this run is gone: saving; run the same command to resume"


def work(plan: Plan, *, resume: bool = True, is_locked: bool = False, family: Family | None = None) -> None:
    """Run `plan` on this rank, from its newest checkpoint if any.

    `is_locked`: the caller holds the folder. `family`: who started this rank; it stops when they are gone.

    Raises: MemtrainError of every kind; Interrupted when asked to stop, after saving.
    """
    transformers_logging.disable_progress_bar()
    with ExitStack() as stack:
        accelerator = make_accelerator(plan.settings)
        run, built = assemble(
            plan,
            ranks_of(accelerator, plan.settings),
            stack,
            resume=resume,
            is_locked=is_locked,
            family=family,
        )
        _run_preflight(run, built)
        train(run)
        finish(run, built, RunFolder(Path(plan.run_dir).absolute()))
        run.ranks.barrier()
        accelerator.end_training()


def assemble(
    plan: Plan,
    ranks: Ranks,
    stack: ExitStack,
    *,
    resume: bool = True,
    is_locked: bool = False,
    family: Family | None = None,
) -> tuple[Run, Built]:
    """The run of a plan on this rank, at its newest checkpoint if any; what it holds ends with `stack`.

    Raises: MemtrainError of every kind; Interrupted when asked to stop before the model was loaded.
    """
    started = time.time()
    check_same_plan_on_ranks(plan, ranks)
    # Absolute: a reward may change the current folder.
    folder = RunFolder(Path(plan.run_dir).absolute())
    if ranks.is_main and not is_locked:
        stack.enter_context(_take_folder(folder, plan, family))
    stop = stack.enter_context(StopRequest(family.is_gone if family is not None else None))
    position = TrainState()
    stack.enter_context(record_exit(folder, ranks, position))
    found, notes = _look_for_checkpoint(folder, plan, ranks, resume=resume)
    _stop_before_loading(ranks, stop, folder)
    built = build(plan, make_spread(plan.settings))
    step = _take_up(plan, found, built, position, ranks)
    sinks = stack.enter_context(open_sinks(plan, folder, ranks, position))
    _emit_start(sinks, plan, built, found, notes, position)
    _try_final(built, folder, sinks, position, is_main=ranks.is_main)
    recovery = _recovery(plan, built, position, sinks)
    watch = _watch(plan, built, sinks.emit, ranks, position)
    online = online_steps(plan, built, ranks, watch, sinks, position, found.checkpoint)
    stack.callback(lambda: online.generating.close() if online is not None else None)
    writer = open_writer(plan, built, ranks, watch, _noting(sinks, position))
    host_time = host_time_of(plan, sinks, position, ranks)
    step.source = online or _steps(plan, built, ranks, watch, sinks, position)
    step.ranks, step.device = ranks, local_device(plan.settings)
    if not recorded_nowhere(recovery.settings):
        capture_passes(step, built.scorer, plan.settings, _noting(sinks, position))
    step.ahead.is_on, step.before_last = plan.settings.device == "cuda", host_time.last_part
    run = Run(
        plan=plan,
        step=step,
        steps=step.source,
        evaluation=Evaluation(
            feed=built.eval,
            judge=online.evaluate if online is not None else None,
            sample=partial(sampled, writer) if writer is not None and plan.recipe.eval.samples else None,
            metrics=open_metrics(plan, writer, ranks),
        ),
        observers=Observers(sinks.emit, watch, host_time, step_watch(plan, sinks, ranks), started),
        saver=_open_saver(stack, plan, folder, built, ranks, sinks, online),
        recovery=recovery,
        ranks=ranks,
        is_asked_to_stop=_asked(stop, sinks, position),
        position=position,
    )
    return run, built


def _steps(
    plan: Plan, built: Built, ranks: Ranks, watch: MemoryWatch, sinks: EventSinks, position: TrainState
) -> StepSource:
    """The optimizer steps over rows that are there, or whose completions a model writes before each."""
    own = on_policy_steps(plan, built, ranks, watch, sinks, position)
    return own or Steps(built.train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle)


def _take_folder(folder: RunFolder, plan: Plan, family: Family | None) -> RunLock:
    """The right to write the run folder, whose plan is still this one.

    Raises: LaunchError when another process has it, or has had it meanwhile.
    """
    launcher = family.launcher if family is not None else None
    lock = folder.open_for_run() if launcher is None else folder.join_for_run(launcher)
    # Every rank is here: what lies there is of an earlier start.
    clear_faults(folder)
    if read_plan(folder.plan) != plan:
        lock.close()
        raise LaunchError(
            "plan.json was replaced while this run started",
            where=str(folder.plan),
            fix="run the training command again; one run folder is for one run",
        )
    return lock


def _noting(sinks: EventSinks, position: TrainState) -> Callable[[str], None]:
    """Tells a note at the step that the run is at."""
    return lambda text: sinks.emit(NoteEvent(step=position.step, text=text))


def _asked(stop: StopRequest, sinks: EventSinks, position: TrainState) -> Callable[[], bool]:
    """Whether this rank is to stop. That its launcher or its terminal is gone is told once."""
    told: set[str] = set()

    def asked() -> bool:
        hung_up = HUNG_UP.format(pid=os.getpid()) if is_hung_up() else ""
        for text in {GONE if stop.is_alone else "", hung_up} - told - {""}:
            told.add(text)
            sinks.emit(NoteEvent(step=position.step, text=text))
        return stop.asked

    return asked


def _stop_before_loading(ranks: Ranks, stop: StopRequest, folder: RunFolder) -> None:
    if ranks.any(stop.asked):
        raise Interrupted(
            "stopped before the model was loaded; earlier checkpoints are unchanged",
            where=str(folder.path),
            fix="run the same command again to resume from there",
        )


def _look_for_checkpoint(
    folder: RunFolder, plan: Plan, ranks: Ranks, *, resume: bool
) -> tuple[Found, list[str]]:
    """The checkpoint to go on from, and the notes on it. Raises: ResumeError."""
    if ranks.is_main:
        mend_checkpoints(folder)
        if not resume:
            remove_checkpoints(folder)
    ranks.barrier()
    found = newest_complete(folder)
    refuse_unread(found)
    return found, check_resumable(found.checkpoint.manifest.facts, plan) if found.checkpoint else []


def _take_up(plan: Plan, found: Found, built: Built, position: TrainState, ranks: Ranks) -> OptimizerStep:
    """Go on from the checkpoint that was found; how a step reaches the other ranks and the weights."""
    if found.checkpoint is not None:
        own = {"trained": built.trained, "ranks": ranks}
        restore(found.checkpoint, built.scorer, built.optimizer, position, built.follower, **own)
    return begin(built.parts, plan.recipe, plan.settings, scaled_by(position))


def _emit_start(
    sinks: EventSinks, plan: Plan, built: Built, found: Found, notes: list[str], position: TrainState
) -> None:
    """The fate of the rows, or the step of the resumed run, with notes for the reader."""
    if not position.step:
        sinks.emit(of_split(built.train.data_event("train"), plan.data.train))
        if built.eval is not None:
            sinks.emit(of_split(built.eval.data_event("held-out"), plan.data.eval))
        for note in plan.data.notes:
            sinks.emit(NoteEvent(step=position.step, text=f"data {note}", is_in_plan=True))
    notes_at_start = [f"skipped {one.path.name}: {one.reason}" for one in found.rejected] + notes
    if found.checkpoint is not None:
        notes_at_start.append(f"resumed at step {position.step}")
    if built.why_whole:
        notes_at_start.append(f"each process loaded the whole model before it was sharded: {built.why_whole}")
    if plan.settings.device == "cuda":
        notes_at_start.append(allocator_words(plan.settings.expandable_segments))
        if is_random(plan.recipe.model):
            notes_at_start.append(
                "random weights were drawn on the GPU: a CPU draws other numbers for the same seed"
            )
    for text in notes_at_start:
        sinks.emit(NoteEvent(step=position.step, text=text))


def of_split(event: DataEvent, split: PreparedSplit | None) -> DataEvent:
    """The event with the bad rows and the sources of a split that has a store of its own."""
    if split is None:
        return event
    sources = tuple((one.source, one.num_rows, one.num_tokens, one.num_loss_tokens) for one in split.sources)
    return replace(event, rows_skipped=split.num_skipped, sources=sources)


def _try_final(
    built: Built, folder: RunFolder, sinks: EventSinks, position: TrainState, *, is_main: bool
) -> None:
    """Save the model without its weights before a step, so that refusals come at the start."""
    for text in try_final(built.model, built.tokenizer, folder.path) if is_main else ():
        sinks.emit(NoteEvent(step=position.step, text=text))


def _run_preflight(run: Run, built: Built) -> None:
    """Make the dry run if the plan has one; refused where that needed more than the recipe's budget."""
    plan = run.plan
    if plan.settings.preflight and run.position.step < plan.settings.max_steps:
        found = preflight(run)
        refuse_over_budget(plan, run.recovery.settings, built.model, found.peak_bytes, found.load)


def _recovery(plan: Plan, built: Built, position: TrainState, sinks: EventSinks) -> Recovery:
    """Recovery from exhausted memory, with the limits found before the run was resumed."""

    def treat(settings: Settings) -> None:
        for model in built.models:
            apply_checkpointing_and_offload(model, settings)
        configure_loss(built.scorer, settings)
        if built.scorer.captured is not None and recorded_nowhere(settings):
            built.scorer.captured.is_on = False

    def explained(spent: Exhausted) -> MemtrainError:
        return post_mortem(spent, plan, recovery.settings, built.model, built.optimizer, step=position.step)

    recovery = Recovery(
        settings=plan.settings,
        position=position,
        treat=treat,
        emit=_noting(sinks, position),
        post_mortem=explained,
        has_dropout=has_dropout(built.model) or plan.recipe.optim.neftune_alpha is not None,
    )
    recovery.resume()
    return recovery


def _open_saver(
    stack: ExitStack,
    plan: Plan,
    folder: RunFolder,
    built: Built,
    ranks: Ranks,
    sinks: EventSinks,
    online: OnlineSteps | None,
) -> Saver:
    saver = Saver(plan, folder, built, ranks, sinks, online)
    stack.callback(saver.close)
    return saver


def _watch(
    plan: Plan, built: Built, emit: Callable[[Event], None], ranks: Ranks, position: TrainState
) -> MemoryWatch:
    def note(phase: str, allocated: int, reserved: int, rss: int, tokens: int = 0) -> None:
        at = {"step": position.step, "phase": phase, "tokens": tokens}
        emit(MemoryEvent(**at, allocated=allocated, reserved=reserved, rss=rss))

    device, of_run = local_device(plan.settings), [local_of(one) for one in built.held]
    # What waits on the host is in no GPU's memory.
    held = resident([one for one in of_run if one.device.type == device.type])
    state = resident(
        [t for held in built.optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
    )
    if isinstance(built.optimizer, ZeroOptimizer) and plan.settings.device == "cpu":
        # DeepSpeed's copies and buffers are there already, and it alone knows where.
        state = live_bytes() - held
    watch = MemoryWatch(
        device,
        held + state,
        note,
        is_on=plan.recipe.memory.measure_peaks,
        counting=counting_mode(in_shards=built.spread.is_sharded),
    )
    if watch.is_on and ranks.is_main:
        note("load", held, 0, psutil.Process().memory_info().rss)
    return watch


def main() -> int:
    """Entry point of a launched process: the plan's path, and what `cli/launch` adds. The exit code."""
    # A launcher stops all ranks when one fails: they must live to leave word, and to save.
    hold_signals()
    take_streams()
    go_on_without_readers()
    for_this_process_alone()
    words = ArgumentParser()
    words.add_argument("plan", type=Path)
    words.add_argument("--plan-digest", default="")
    words.add_argument("--no-resume", dest="resume", action="store_false")
    asked = words.parse_args()
    folder = RunFolder(asked.plan.parent)
    rank = int(os.environ.get("RANK", "0"))
    pulse = Pulse(folder, rank) if WATCHED in os.environ else None
    try:
        plan = read_plan(folder.plan, asked.plan_digest)
        if asked.resume and is_over(folder, plan):
            if not rank and OWNER not in os.environ:  # By hand: what a kill at the end left goes here too.
                folder.open_for_run().close()
            print(f"the run in {folder.path} is finished; its model is in {folder.final}")
            return 0
        if pulse is not None:
            pulse.start()
        with no_way_out():
            work(plan, resume=asked.resume, family=Family.of_this_process(os.environ))
    except Exception as error:
        return _report_fault(folder, rank, error)
    finally:
        if pulse is not None:
            pulse.stop()
        _leave_process_group()
    return 0


def _report_fault(folder: RunFolder, rank: int, error: Exception) -> int:
    """Report the error that ended this rank, where the launcher or the user will look; the exit code."""
    is_of_many = "RANK" in os.environ
    if is_of_many:
        note_fault(folder, rank, error)
    if LAUNCHED not in os.environ:
        text = error.text() if isinstance(error, MemtrainError) else printable(traceback.format_exc())
        print(f"rank {rank}: {text}" if is_of_many else text, file=sys.stderr)
    return error.exit_code if isinstance(error, MemtrainError) else EXIT_OUR_FAULT


def _leave_process_group() -> None:
    """A process group left open makes gloo abort at exit."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process without destructors: the process group's may wait for ever (engine.py)."""
    flush()
    end_at_once(code)


if __name__ == "__main__":
    leave(main())
