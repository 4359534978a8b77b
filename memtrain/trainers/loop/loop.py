"""The training loop: steps, evaluation, checkpoints and events, the same for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from memtrain.errors import Diverged, Interrupted
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.units import count_of
from memtrain.recipes.sections.evaluation import LOSS, SET_MARK
from memtrain.trainers.build.step import OptimizerStep, Part, RanOut
from memtrain.trainers.loop.early_stopping import is_spent, note_evaluation
from memtrain.trainers.loop.observers import HostTime
from memtrain.trainers.loop.oom.recover import Exhausted, Recovery
from memtrain.trainers.loop.saver import Saver
from memtrain.trainers.memory_meter.phase_watch import WATCHED_AHEAD, WATCHED_STEPS, MemoryWatch, StepWeight
from memtrain.trainers.optim.loss_scaling import skipped_words
from memtrain.trainers.protocols.events import EvalEvent, Event, NoteEvent, SampleEvent, StepEvent
from memtrain.trainers.protocols.feed import (
    Feed,
    Ints,
    Steps,
    StepSource,
    StepWork,
    eval_micro_batches,
    eval_orders,
    padded_tokens,
)
from memtrain.trainers.protocols.method import ReportsEvents, means_of
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.ranks import Ranks

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured beside the steps."""

    feed: Feed | None
    """Held-out rows."""
    judge: Callable[[], EvalEvent] | None = None
    """Measures on the held-out rows in place of the loss."""
    sample: Callable[[int], SampleEvent] | None = None
    """Completions of fixed prompts after a step, which move nothing."""
    metrics: Callable[[], dict[str, float]] | None = None
    """Metrics of completions of held-out prompts, beside the loss."""


@dataclass(frozen=True, slots=True)
class Observers:
    """Who looks at a run and moves nothing."""

    emit: Callable[[Event], None]
    """Takes events to the metrics, the terminal and the trackers, on the main rank."""
    watch: MemoryWatch
    host_time: HostTime
    """Looks at one step closely."""
    stepped: Callable[[int, int], None]
    """Called after each step with its number, the first of which is 1, and its tokens."""
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Run:
    """State that the loop moves."""

    plan: Plan
    step: OptimizerStep
    steps: StepSource
    evaluation: Evaluation
    observers: Observers
    saver: Saver
    recovery: Recovery
    """Recovery when memory runs out."""
    ranks: Ranks
    is_asked_to_stop: Callable[[], bool]
    position: TrainState


def train(run: Run) -> None:
    """Make the steps that are left; nothing is being saved any more when they are made.

    Raises: Interrupted when asked to stop, after saving; OutOfMemory when nothing helps, after saving the
    last whole step; Diverged when the loss is no number any more; LaunchError when the disk refuses.
    """
    try:
        _steps_left(run)
        run.saver.settle()
        if run.step.captured is not None and run.step.captured.num_passes:
            run.observers.emit(NoteEvent(step=run.position.step, text=run.step.captured.words()))
    except Exhausted as spent:
        if run.position.step:
            run.saver.save(run.position)
            run.saver.settle()
        raise run.recovery.post_mortem(spent) from None


def _steps_left(run: Run) -> None:
    held, saves = run.plan.recipe.eval, run.plan.recipe.save
    if held.at_start and run.position.step == 0:
        evaluate(run)
    samples, sample = held.samples, run.evaluation.sample
    if sample is not None and samples is not None and samples.at_start and run.position.step == 0:
        run.observers.emit(sample(0))
    coming: StepWork | None = None
    while not is_over(run):
        work, coming = next_step(run, coming)
        if run.evaluation.feed is not None and _is_due(run, work, held.every_steps, held.per_epoch):
            evaluate(run)
        if (
            sample is not None
            and samples is not None
            and (_is_due(run, work, samples.every_steps) or is_over(run))
        ):
            run.observers.emit(sample(run.position.step))
        is_stopped, is_last = _agreed_to_stop(run), is_over(run)
        if (
            is_stopped
            or is_last
            or _is_due(run, work, saves.every_steps, saves.per_epoch)
            or _is_best_to_keep(run)
        ):
            _emit_events(run)
            with run.observers.watch.phase("saving"):
                run.saver.save(run.position)
        if is_stopped and not is_last:
            run.saver.settle()
            raise Interrupted(
                f"stopped after step {run.position.step} of {run.plan.settings.max_steps}, and saved",
                where=run.plan.run_dir,
                fix="run the same command again to resume from here",
            )


def next_step(run: Run, coming: StepWork | None = None) -> tuple[StepWork, StepWork | None]:
    """Make the step that the run is at; its work, and that of the step after it where it is known.

    `coming`: its work, where it is known.
    """
    started = time.perf_counter()
    work = coming or _work(run, run.position.step)
    after = _work_after(run, work)
    # Only where rows are not there is something written for a step.
    one_step(run, work, 0.0 if isinstance(run.steps, Steps) else time.perf_counter() - started)
    run.position.step += 1
    run.position.eval_loss = None
    return work, after


def _emit_events(run: Run) -> None:
    """Write what the method has gathered: before a checkpoint, behind which a resumed run gathers anew."""
    if isinstance(run.step.method, ReportsEvents):
        for event in run.step.method.events(run.position.step):
            run.observers.emit(event)


def _work(run: Run, step: int) -> StepWork:
    return run.steps.work(step, rank=run.ranks.replica, num_ranks=run.ranks.num_replicas)


def _work_after(run: Run, work: StepWork) -> StepWork | None:
    """Work of the next step, whose first micro-batch is made during this one; None where none is, or it is
    not known yet."""
    run.step.ahead.after_step = None
    is_known = isinstance(run.steps, Steps) and work.step + 1 < run.plan.settings.max_steps
    if not (run.step.ahead.is_on and is_known):
        return None
    coming = _work(run, work.step + 1)
    first = run.recovery.divide(run.steps.feed, coming.micro_batches[:1])
    run.step.ahead.after_step = first[0].sequences if first else None
    return coming


def _most_coming(run: Run, work: StepWork) -> int:
    """Most tokens of a step that comes soon, as far as is known: a heavier one is measured in its place."""
    end = min(work.step + 1 + WATCHED_AHEAD, run.plan.settings.max_steps)
    if not isinstance(run.steps, Steps) or work.is_last_of_epoch or work.step + 1 >= end:
        return 0
    return run.steps.most_tokens(work.step + 1, end)


def is_over(run: Run) -> bool:
    """Whether no step is left: all are made, or the held-out rows show no gain any more."""
    return run.position.step >= run.plan.settings.max_steps or is_spent(run.position, run.plan.recipe)


def _agreed_to_stop(run: Run) -> bool:
    """Whether any rank was asked to stop. What is being saved goes on where every rank has done its part."""
    agreed = run.ranks.max({"stop": float(run.is_asked_to_stop()), "writing": float(run.saver.is_at_work)})
    if not agreed["writing"]:
        run.saver.advance()
    return agreed["stop"] > 0


def one_step(run: Run, work: StepWork, rollout_s: float = 0.0) -> None:
    """Forward, backward and update of one optimizer step, and its line in the metrics.

    `rollout_s`: wall time of the rollout that was made for it.
    """
    started = time.perf_counter()
    skipped = run.position.skipped_steps
    phase = "first step" if work.step == 0 else "steady step"
    weight = StepWeight(work.num_tokens, lambda: _most_coming(run, work), lambda: _largest(run, work))
    with run.observers.watch.phase(phase, weight), run.observers.host_time.step():
        want_stats = _is_logged(run, work.step)
        made = recovered(run, work, lambda parts: run.step.run(work, parts, want_stats=want_stats))
        own_sums = _to_host(made.sums | {"grad_norm": made.norm / run.ranks.world})
    totals = run.ranks.sum(own_sums)
    _emit(run, work, totals, time.perf_counter() - started, rollout_s)
    if run.position.skipped_steps > skipped:
        run.observers.emit(NoteEvent(step=work.step + 1, text=skipped_words(run.position)))
    run.observers.stepped(work.step + 1, work.num_tokens)
    if not (math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])):
        run.saver.settle()
        raise Diverged(
            f"the loss is {totals['loss']}, the gradient norm {totals['grad_norm']} at step {work.step + 1}",
            where=run.plan.run_dir,
            fix="lower optim.lr, raise optim.warmup_ratio, or set model.dtype: float32; "
            "the last checkpoint is from before",
        )
    _watch(run, work, totals["loss"])


def _watch(run: Run, work: StepWork, loss: float) -> None:
    """Count steps of a high loss in a row. Raises: Diverged when they are as many as the recipe bears."""
    watchdog, position = run.plan.recipe.train.loss_watchdog, run.position
    if watchdog is None:
        return
    position.high_steps = position.high_steps + 1 if loss > watchdog.threshold else 0
    if position.high_steps < watchdog.patience:
        return
    run.saver.settle()
    raise Diverged(
        f"the loss was above {watchdog.threshold:g} for {count_of(watchdog.patience, 'step')} in a row, "
        f"{loss:.4f} at step {work.step + 1} (train.loss_watchdog)",
        where=run.plan.run_dir,
        fix="lower optim.lr, raise optim.warmup_ratio, or raise train.loss_watchdog.threshold; the last "
        "checkpoint is from before",
    )


def _largest(run: Run, work: StepWork) -> int:
    """Tokens of the step's largest micro-batch."""
    settings, feed = run.plan.settings, run.steps.feed
    return max((padded_tokens(feed, one, settings) for one in work.micro_batches), default=0)


def recovered(run: Run, work: StepWork, act: Callable[[list[Part]], Made]) -> Made:
    """Result of `act` for the parts of a step, however often memory runs out on any rank.

    Raises: Exhausted, on every rank, when memory runs out whatever is done.
    """
    feed, micro_batches = run.steps.feed, work.micro_batches
    parts = run.recovery.divide(feed, micro_batches)
    while True:
        try:
            return act(parts)
        except RanOut as broken:
            failure = broken.failure
        parts = run.recovery.smaller(feed, micro_batches, failure)


def evaluate(run: Run) -> EvalEvent:
    """Measure the held-out rows, and tell; every rank gets the same numbers."""
    event = _measured(run) if run.evaluation.judge is None else run.evaluation.judge()
    note_evaluation(run.position, event, run.plan.recipe)
    run.observers.emit(event)
    return event


def _measured(run: Run) -> EvalEvent:
    """The mean held-out loss by the method's own measure, of all rows and of each evaluation set."""
    assert run.evaluation.feed is not None, "There are held-out rows."
    feed, method = run.evaluation.feed, run.step.method
    started = time.perf_counter()
    was_training = run.step.model.training
    run.step.model.eval()
    with run.observers.watch.phase("evaluation"), torch.no_grad():
        parts = [run.ranks.sum(_to_host(_sums(run, feed, order))) for order in eval_orders(feed)]
    run.step.model.train(was_training)
    counts = [float(feed.weights[order].sum()) for order in eval_orders(feed)]
    extra: dict[str, float] = {}
    for name, sums, count in zip(run.plan.recipe.data.eval_sets, parts, counts, strict=False):
        of_set = {LOSS: sums[LOSS] / count} | means_of(method, _without_loss(sums), count)
        extra |= {f"{name}{SET_MARK}{metric}": value for metric, value in of_set.items()}
    totals = {name: sum(sums[name] for sums in parts) for name in parts[0]}
    extra |= run.evaluation.metrics() if run.evaluation.metrics is not None else {}
    return EvalEvent(
        step=run.position.step,
        loss=totals[LOSS] / sum(counts),
        tokens=int(feed.loss_tokens.sum()),
        seconds=time.perf_counter() - started,
        extra=means_of(method, _without_loss(totals), sum(counts)) | extra,
    )


def _sums(run: Run, feed: Feed, sequences: Ints) -> dict[str, Tensor]:
    """Loss and metrics of this rank's share of some sequences."""
    sums: dict[str, Tensor] = {}
    micro_batches = eval_micro_batches(
        feed, run.plan.settings, sequences, rank=run.ranks.replica, num_ranks=run.ranks.num_replicas
    )
    run.step.preview(sequences, micro_batches, feed=feed)
    for made in run.recovery.each(feed, micro_batches, partial(run.step.score, feed), ranks=run.ranks):
        for name, value in {LOSS: made.value, **made.sums}.items():
            sums[name] = sums[name] + value if name in sums else value
    return sums


def _without_loss(sums: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in sums.items() if name != LOSS}


def _is_due(run: Run, work: StepWork, every_steps: int | None, per_epoch: int | None = None) -> bool:
    """After every n-th step, or n times an epoch, or at its end when no n is given; always after the last
    step."""
    done = work.step + 1
    if done == run.plan.settings.max_steps:
        return True
    if per_epoch is not None:
        return is_part(*work.of_epoch, per_epoch)
    return work.is_last_of_epoch if every_steps is None else done % every_steps == 0


def is_part(done: int, of: int, parts: int) -> bool:
    """Whether one of `parts` equal parts of an epoch of `of` steps ends with its step `done`."""
    return done > 0 and done * parts // of > (done - 1) * parts // of


def _is_best_to_keep(run: Run) -> bool:
    """Whether these weights were just found to be the best so far, of a run that keeps them."""
    found = run.position.eval_loss
    return run.plan.recipe.keeps_best and found is not None and found == run.position.best_loss


def _is_logged(run: Run, step: int) -> bool:
    """Whether a step has its figures; the first ones have, whose memory is measured: figures take some."""
    done = step + 1
    is_due = done % run.plan.recipe.log.every_steps == 0 or done == run.plan.settings.max_steps
    return is_due or done <= WATCHED_STEPS


def _to_host(sums: dict[str, Tensor]) -> dict[str, float]:
    """The sums as numbers, in one transfer: the only host synchronisation of a step."""
    values = torch.cat([value.detach().double().reshape(-1) for value in sums.values()]).tolist()
    return dict(zip(_names(sums), values, strict=True))


def _names(sums: dict[str, Tensor]) -> Iterator[str]:
    """Of a vector a name for each number."""
    for name, value in sums.items():
        yield from [name] if value.dim() == 0 else (f"{name}/{number}" for number in range(len(value)))


def _emit(run: Run, work: StepWork, totals: dict[str, float], seconds: float, rollout_s: float) -> None:
    peak = int(run.ranks.max({"peak": run.observers.watch.peak_bytes})["peak"])
    sums = {name: value for name, value in totals.items() if name not in ("loss", "grad_norm")}
    run.observers.emit(
        StepEvent(
            step=work.step + 1,
            loss=totals["loss"],
            lr=run.step.lr_at(work.step),
            grad_norm=totals["grad_norm"],
            tokens=work.num_tokens,
            loss_tokens=int(work.denominator) if work.num_loss_tokens is None else work.num_loss_tokens,
            seconds=seconds,
            rollout_s=rollout_s,
            peak_bytes=peak or None,
            epoch=work.passes,
            sequences=work.num_sequences,
            extra=means_of(run.step.method, sums, work.denominator),
        )
    )
