"""The training loop: steps, evaluation, checkpoints and events, the same for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import Diverged, Interrupted, MemtrainError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.training_step import TrainingStep
from memtrain.trainers.loop.oom.recover import Cursor, Exhausted, Part, Recovery
from memtrain.trainers.loop.saver import Saver
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.optim.loss_scaling import skipped_words
from memtrain.trainers.optim.step import set_rate
from memtrain.trainers.protocols.events import EvalEvent, Event, NoteEvent, StepEvent
from memtrain.trainers.protocols.feed import Feed, Ints, StepSource, StepWork, eval_micro_batches, eval_order
from memtrain.trainers.protocols.method import Loss, StepPreview, means_of
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.host_time import HostTime
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import seed_step


@dataclass(frozen=True, slots=True)
class Run:
    """State that the loop moves."""

    plan: Plan
    step: TrainingStep
    lr_at: Callable[[int], float]
    steps: StepSource
    eval_feed: Feed | None
    ranks: Ranks
    device: torch.device
    emit: Callable[[Event], None]
    """Takes events to the metrics, the terminal and the trackers, on the main rank."""
    watch: MemoryWatch
    host_time: HostTime
    """Looks at one step closely."""
    stepped: Callable[[int], None]
    """Called after each step with its number, the first of which is 1."""
    is_asked_to_stop: Callable[[], bool]
    saver: Saver
    recovery: Recovery
    """Recovery when memory runs out."""
    post_mortem: Callable[[Exhausted], MemtrainError]
    """Explains the end of a run, and the changes that would avoid it."""
    judge: Callable[[], float] | None = None
    """Measures on the held-out rows in place of the loss: lower is better."""
    position: TrainState = field(default_factory=TrainState)
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""


def train(run: Run) -> None:
    """Make the steps that are left; nothing is being saved any more when they are made.

    Raises: Interrupted when asked to stop, after saving; OutOfMemory when nothing helps, after saving the
    last whole step; Diverged when the loss is no number any more; LaunchError when the disk refuses.
    """
    try:
        _steps_left(run)
        run.saver.settle()
    except Exhausted as spent:
        if run.position.step:
            run.saver.save(run.position)
            run.saver.settle()
        raise run.post_mortem(spent) from None


def _steps_left(run: Run) -> None:
    if run.plan.recipe.eval.at_start and run.position.step == 0:
        evaluate(run)
    while run.position.step < run.plan.settings.max_steps:
        started = time.perf_counter()
        work = run.steps.work(run.position.step, rank=run.ranks.replica, num_ranks=run.ranks.num_replicas)
        # Only where completions are judged is something written for a step.
        one_step(run, work, 0.0 if run.judge is None else time.perf_counter() - started)
        run.position.step += 1
        run.position.eval_loss = None
        if run.eval_feed is not None and _is_due(run, work, run.plan.recipe.eval.every_steps):
            evaluate(run)
        is_stopped = _agreed_to_stop(run)
        if is_stopped or _is_due(run, work, run.plan.recipe.save.every_steps) or _is_best_to_keep(run):
            with run.watch.phase("saving"):
                run.saver.save(run.position)
        if is_stopped and run.position.step < run.plan.settings.max_steps:
            run.saver.settle()
            raise Interrupted(
                f"stopped after step {run.position.step} of {run.plan.settings.max_steps}, and saved",
                where=run.plan.run_dir,
                fix="run the same command again to resume from here",
            )


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
    lr = run.lr_at(work.step)
    set_rate(run.step.optimizer, lr)
    phase = "first step" if work.step == 0 else "steady step"
    with run.watch.phase(phase, tokens=work.num_tokens), run.host_time.step():
        sums = whole_gradients(run, work)
        norm = run.step.update(lr=lr, num_steps=work.step + 1)
        own_sums = _to_host(sums | {"grad_norm": norm / run.ranks.world})
    totals = run.ranks.sum(own_sums)
    _emit(run, work, totals, lr, time.perf_counter() - started, rollout_s)
    if run.position.skipped_steps > skipped:
        run.emit(NoteEvent(step=work.step + 1, text=skipped_words(run.position)))
    run.stepped(work.step + 1)
    if not (math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])):
        run.saver.settle()
        raise Diverged(
            f"the loss is {totals['loss']}, the gradient norm {totals['grad_norm']} at step {work.step + 1}",
            where=run.plan.run_dir,
            fix="lower optim.lr, raise optim.warmup_ratio, or set model.dtype: float32; "
            "the last checkpoint is from before",
        )


def whole_gradients(run: Run, work: StepWork) -> dict[str, Tensor]:
    """Gradients of a step, summed over the ranks; the sums of this rank, with `loss`.

    Raises: Exhausted, on every rank, when memory runs out whatever is done.
    """
    seed, feed = run.plan.recipe.train.seed, run.steps.feed

    def act(parts: list[Part], cursor: Cursor) -> dict[str, Tensor]:
        before_step(run, feed, work.sequences, [part.sequences for part in parts])

        def seed_part(index: int) -> None:
            part = parts[index]
            seed_step(seed, work.step, part.micro_batch * run.ranks.world + run.ranks.rank, part.number)

        return run.step.gradients(
            _on_device(run, parts, cursor),
            denominator=work.denominator,
            num_micro_batches=len(parts),
            want_stats=_is_logged(run, work.step),
            seed_micro_batch=seed_part,
        )

    return run.recovery.whole(
        feed,
        work.micro_batches,
        act,
        finish=run.step.engine.finish,
        clear=lambda: run.step.optimizer.zero_grad(set_to_none=True),
        ranks=run.ranks,
    )


def evaluate(run: Run) -> float:
    """The mean held-out loss by the method's own measure; every rank gets the same number."""
    assert run.eval_feed is not None, "There are no held-out rows."
    if run.judge is not None:
        return _noted(run, run.judge())
    feed, settings = run.eval_feed, run.plan.settings
    started = time.perf_counter()
    sums: dict[str, Tensor] = {}
    was_training = run.step.model.training
    run.step.model.eval()
    with run.watch.phase("evaluation"), torch.no_grad():
        micro_batches = eval_micro_batches(
            feed, settings, rank=run.ranks.replica, num_ranks=run.ranks.num_replicas
        )
        before_step(run, feed, eval_order(feed), micro_batches)
        for made in run.recovery.each(
            feed, micro_batches, lambda sequences: score(run, feed, sequences), ranks=run.ranks
        ):
            for name, value in {"loss": made.value, **made.sums}.items():
                sums[name] = sums[name] + value if name in sums else value
        totals = run.ranks.sum(_to_host(sums))
    run.step.model.train(was_training)
    count = float(feed.weights.sum())
    loss = totals.pop("loss") / count
    means = means_of(run.step.method, totals, count)
    _noted(run, loss)
    seconds = time.perf_counter() - started
    run.emit(
        EvalEvent(
            step=run.position.step,
            loss=loss,
            tokens=int(feed.loss_tokens.sum()),
            seconds=seconds,
            extra=means,
        )
    )
    return loss


def _noted(run: Run, loss: float) -> float:
    run.position.eval_loss = loss
    best = run.position.best_loss
    # The weights before the first step are not the run's to keep.
    if run.position.step and (best is None or loss < best):
        run.position.best_loss = loss
    return loss


def score(run: Run, feed: Feed, sequences: Ints) -> Loss:
    """The summed loss of some sequences, and their metrics."""
    micro_batch = feed.micro_batch(sequences).to(run.device)
    return run.step.method.loss(run.step.model, micro_batch, denominator=1.0, want_stats=True)


def before_step(
    run: Run, feed: Feed, sequences: Ints, micro_batches: Sequence[Ints], *, is_trial: bool = False
) -> None:
    """Let the method see the sequences of all ranks, and this rank's micro-batches, before their losses."""
    run.step.before_step(
        StepPreview(
            feed,
            sequences,
            micro_batches,
            run.device,
            run.ranks.world,
            num_sharing=run.ranks.num_sharing,
            is_trial=is_trial,
        )
    )


def _on_device(run: Run, parts: Sequence[Part], cursor: Cursor) -> Iterator[Any]:
    for number, part in enumerate(parts):
        cursor.at = number
        yield run.steps.feed.micro_batch(part.sequences).to(run.device)


def _is_due(run: Run, work: StepWork, every_steps: int | None) -> bool:
    """After every n-th step, or at the end of an epoch when no n is given; always after the last step."""
    done = work.step + 1
    if done == run.plan.settings.max_steps:
        return True
    return work.is_last_of_epoch if every_steps is None else done % every_steps == 0


def _is_best_to_keep(run: Run) -> bool:
    """Whether these weights were just found to be the best so far, of a run that keeps them."""
    found = run.position.eval_loss
    return run.plan.recipe.save.keep_best and found is not None and found == run.position.best_loss


def _is_logged(run: Run, step: int) -> bool:
    done = step + 1
    return done % run.plan.recipe.log.every_steps == 0 or done in (1, run.plan.settings.max_steps)


def _to_host(sums: dict[str, Tensor]) -> dict[str, float]:
    """The sums as numbers, in one transfer: the only host synchronisation of a step."""
    values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))


def _emit(
    run: Run, work: StepWork, totals: dict[str, float], lr: float, seconds: float, rollout_s: float
) -> None:
    peak = int(run.ranks.max({"peak": run.watch.peak_bytes})["peak"])
    sums = {name: value for name, value in totals.items() if name not in ("loss", "grad_norm")}
    run.emit(
        StepEvent(
            step=work.step + 1,
            loss=totals["loss"],
            lr=lr,
            grad_norm=totals["grad_norm"],
            tokens=work.num_tokens,
            loss_tokens=int(work.denominator) if work.num_loss_tokens is None else work.num_loss_tokens,
            seconds=seconds,
            rollout_s=rollout_s,
            peak_bytes=peak or None,
            epoch=work.epoch,
            sequences=work.num_sequences,
            extra=means_of(run.step.method, sums, work.denominator),
        )
    )
