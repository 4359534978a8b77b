"""The dry run: the heaviest batch, an evaluation and a save before the first step, undone to the bit.

Weights do not move: gradients, learning rate and decay are zero when the optimizer steps, and a checksum
says so. Optimizer states go again, random states come back. What memory that ran out has taught
(recover.py) stays: the dry run serves that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.plan.units import gib
from memtrain.trainers.checkpoints.state_io import save_state
from memtrain.trainers.loop.loop import Run, recovered
from memtrain.trainers.loop.oom.heaviest_batch import heaviest_micro_batch, step_of
from memtrain.trainers.loop.oom.preflight_online import made_up_rollout, next_rollout
from memtrain.trainers.loop.oom.recover import Exhausted
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.optim.step import set_rate, update
from memtrain.trainers.protocols.events import NoteEvent
from memtrain.trainers.protocols.feed import Ints, StepWork, eval_micro_batches, eval_orders, padded_tokens
from memtrain.trainers.run_folder.report.report import DRY_RUN
from memtrain.trainers.runtime.seed import random_state, restore_random_state

PIECE = 1 << 24
"""Numbers that are widened to 64 bits at a time: 128 MiB. Taste."""


@dataclass(frozen=True, slots=True)
class PreflightResult:
    """Result of a dry run."""

    peak_bytes: int
    """Highest peak of live tensors of any rank; 0 where nothing is measured."""
    load: int
    """Tokens of the heaviest micro-batch, padding included."""


def preflight(run: Run) -> PreflightResult:
    """Try the heaviest work of every phase of the remaining run. Called by all ranks together.

    Raises: OutOfMemory when it does not fit whatever is done; LaunchError when checkpoints cannot be written.
    """
    before = bits_of(run.step.parameters)
    with _undone(run), _heaviest(run) as heaviest:
        try:
            _steps(run, heaviest)
            _evaluation(run)
        except Exhausted as spent:
            raise run.recovery.post_mortem(spent) from None
        with run.observers.watch.phase(f"{DRY_RUN}saving"):
            try_save(run)
        tokens = padded_tokens(run.steps.feed, heaviest.sequences, run.plan.settings)
        peak = int(run.ranks.max({"peak": run.observers.watch.peak_bytes})["peak"])
    assert bits_of(run.step.parameters) == before, "A dry run moves no weight."
    predicted = run.plan.prediction.peak.num_bytes
    text = f"dry run of {heaviest.words}, {tokens:,} tokens"
    if run.observers.watch.is_on:
        text += f": peak {gib(peak)}, predicted {gib(predicted)}"
    run.observers.emit(NoteEvent(step=run.position.step, text=text))
    return PreflightResult(peak, tokens)


@dataclass(frozen=True, slots=True)
class Heaviest:
    """The micro-batch that is tried."""

    sequences: Ints
    has_more: bool
    """A step has several micro-batches: gradients are there when the next one begins."""
    words: str


@contextmanager
def _heaviest(run: Run) -> Iterator[Heaviest]:
    """The heaviest micro-batch; of a run that writes its completions one of made-up ones, gone after it."""
    settings, steps = run.plan.settings, run.steps
    if isinstance(steps, OnlineSteps):
        of_replica = (settings.batch_size or 1) / run.ranks.num_replicas
        words = "completions of full length for the longest prompts"
        with made_up_rollout(steps) as sequences:
            yield Heaviest(sequences, of_replica > len(sequences), words)
        return
    replicas = run.ranks.num_replicas
    sequences, is_real = heaviest_micro_batch(steps, settings, start=run.position.step, replicas=replicas)
    first = [run.steps.work(run.position.step, rank=rank, num_ranks=replicas) for rank in range(replicas)]
    words = "the heaviest micro-batch of the run" if is_real else "the longest rows together"
    yield Heaviest(sequences, any(len(work.micro_batches) > 1 for work in first), words)


def bits_of(parameters: Iterable[nn.Parameter]) -> list[int]:
    """A checksum of the bits of each parameter: their sum as integers, wrapped.

    Summed in pieces: torch makes a 64-bit copy of narrower integers before it sums them; of the embedding
    of an 8B model in bfloat16 that would be 4 GiB, outside of every phase.
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [_sum_of_bits(p.detach().view(integers[p.itemsize])) for p in parameters]
    return torch.stack([one.cpu() for one in sums]).tolist() if sums else []


def _sum_of_bits(integers: Tensor) -> Tensor:
    """The sum of all integers, wrapped to 64 bits, by PIECE numbers at a time."""
    if integers.numel() <= PIECE:
        return integers.sum(dtype=torch.int64)
    if not integers.is_contiguous():
        return torch.stack([_sum_of_bits(row) for row in integers]).sum()
    return torch.stack([part.sum(dtype=torch.int64) for part in integers.view(-1).split(PIECE)]).sum()


def try_save(run: Run) -> None:
    """Write the largest tensor of a checkpoint and remove it; make sure that the disk has room for them all.

    Raises: LaunchError.
    """
    if not run.ranks.is_main:
        return
    folder = Path(run.plan.run_dir)
    tensors = [*run.step.parameters, *_states(run)]
    needed = sum(tensor.nbytes for tensor in tensors) * (run.plan.recipe.save.keep + 1)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise LaunchError(
            f"checkpoints will need {gib(needed)} of disk (save.keep {run.plan.recipe.save.keep}, and one "
            f"more while it is written), and {gib(free)} are free",
            where=str(folder),
            fix="free some space, lower save.keep, or set run_dir to another disk",
        )
    with TemporaryDirectory(dir=folder, prefix=".rehearsal-") as place:
        save_state({"largest": max(tensors, key=lambda tensor: tensor.nbytes)}, Path(place) / "largest")


@contextmanager
def _undone(run: Run) -> Iterator[None]:
    """Random states, learning rates, optimizer states and figures restored at the end."""
    draws = random_state()
    rates = [
        {name: group[name] for name in ("lr", "weight_decay")} for group in run.step.optimizer.param_groups
    ]
    peak = run.observers.watch.peak_bytes
    is_fresh = not run.step.optimizer.state
    for group in run.step.optimizer.param_groups:
        group["weight_decay"] = 0.0
    try:
        with run.step.engine.dry_step(is_fresh):
            yield
    finally:
        run.step.optimizer.zero_grad(set_to_none=True)
        if is_fresh:
            run.step.optimizer.state.clear()
        for group, values in zip(run.step.optimizer.param_groups, rates, strict=True):
            group.update(values)
        run.observers.watch.peak_bytes = peak
        restore_random_state(draws)


def _steps(run: Run, heaviest: Heaviest) -> None:
    """A first step, which makes the states, and a second with them. A resumed run has its states."""
    work = step_of(
        run.steps.feed,
        heaviest.sequences,
        step=run.position.step,
        has_more=heaviest.has_more,
        replicas=run.ranks.num_replicas,
    )
    set_rate(run.step.optimizer, 0.0)
    if not run.step.optimizer.state:
        with run.observers.watch.phase(f"{DRY_RUN}first step"):
            _gradients(run, work)
            _step_nowhere(run)
    with run.observers.watch.phase(f"{DRY_RUN}steady step"):
        _gradients(run, work)
        run.step.optimizer.zero_grad(set_to_none=True)


def _gradients(run: Run, work: StepWork) -> None:
    """Gradients of a step that is tried, with the figures of one that is logged, which take memory too."""
    recovered(run, work, lambda parts: run.step.gradients(work, parts, want_stats=True, is_trial=True))


def _step_nowhere(run: Run) -> None:
    for parameter in run.step.parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
    update(
        run.step.optimizer,
        run.step.parameters,
        lr=0.0,
        max_grad_norm=run.plan.recipe.optim.max_grad_norm,
        engine=run.step.engine,
    )


def _evaluation(run: Run) -> None:
    if isinstance(run.steps, OnlineSteps):
        # What is held out is written and judged, as rollouts are.
        next_rollout(run.steps)
        return
    if run.evaluation.feed is None:
        return
    feed = run.evaluation.feed
    micro_batches = [
        micro_batch
        for order in eval_orders(feed)
        for micro_batch in eval_micro_batches(feed, run.plan.settings, order, rank=0, num_ranks=1)
    ]
    heaviest = max(micro_batches, key=lambda sequences: padded_tokens(feed, sequences, run.plan.settings))
    was_training = run.step.model.training
    run.step.model.eval()
    with run.observers.watch.phase(f"{DRY_RUN}evaluation"), torch.no_grad():
        run.step.preview(heaviest, [heaviest], feed=feed, is_trial=True)
        score = partial(run.step.score, feed)
        run.recovery.each(feed, [heaviest], score, ranks=run.ranks)
    run.step.model.train(was_training)


def _states(run: Run) -> list[Tensor]:
    held = run.step.optimizer.state_dict()["state"].values()
    return [value for state in held for value in state.values() if isinstance(value, Tensor)]
