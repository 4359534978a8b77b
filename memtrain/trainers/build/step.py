"""The optimizer step as one object, assembled once: for runs, measurements, and traces without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.build.balanced import balanced
from memtrain.trainers.build.expert_load import with_expert_load
from memtrain.trainers.distributed.context_parallel import shared
from memtrain.trainers.losses.head.linear import Count
from memtrain.trainers.model.context_parallel.groups import make_context
from memtrain.trainers.model.experts.router_replay import RouterReplay
from memtrain.trainers.model.heads.build import loss_form, scorer_of
from memtrain.trainers.model.heads.captured_passes import CapturedPasses, make_recorder
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.heads.value_head import ValueScorer
from memtrain.trainers.model.loading.neftune import add_noise
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import CopyEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.step import DistributedStep, set_rate, update
from memtrain.trainers.protocols.feed import Feed, Ints, StepSource, StepWork, padded_tokens
from memtrain.trainers.protocols.method import (
    Batch,
    BeforeStep,
    Loss,
    Method,
    SeesPasses,
    StepPreview,
    TracksPolicy,
)
from memtrain.trainers.reference.reference import Reference
from memtrain.trainers.runtime.oom_errors import attempt, free
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import seed_step

# Micro-batches made ahead: a thread lays out the next while the step works.


@dataclass(frozen=True, slots=True)
class _Making:
    """A micro-batch that the thread makes."""

    feed: Feed
    sequences: Ints
    batch: Future[Batch]


@dataclass(slots=True)
class BatchesAhead:
    """The next micro-batch, on a thread, in pinned memory, from which copies leave the host alone.

    A micro-batch is a function of its sequences, so that one which was made ahead is the same to the bit,
    and one that is not asked for after all is forgotten: nothing of this is saved, and a run that is killed
    loses nothing. A failure is not told from the thread: the micro-batch is made again where it is asked for.
    """

    is_on: bool
    """Whether any is made, which is worth it beside a GPU: on a CPU a thread takes its time from the step's
    own, and to wake it takes as long as to lay a micro-batch out (0.4 ms of 75)."""
    pins: bool = True
    after_step: Ints | None = None
    """Sequences of the micro-batch after the last one of a step, where they are known."""
    num_taken: int = 0
    """Micro-batches that were there when they were asked for, or on their way."""
    _next: _Making | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "batch"))
    """A single thread for the whole run: a new one is waited for, and has nothing in its caches."""

    def take(self, feed: Feed, sequences: Ints) -> Batch:
        """The micro-batch of these sequences, made ahead or made now."""
        found, self._next = self._next, None
        if found is not None:
            is_made = found.batch.exception() is None
            is_asked = found.feed is feed and np.array_equal(found.sequences, sequences)
            if is_asked and is_made and not _is_watched():
                self.num_taken += 1
                return found.batch.result()
        return feed.micro_batch(sequences)

    def begin(self, feed: Feed, sequences: Ints) -> None:
        """Begin to make the micro-batch that is likely to be asked for next."""
        if self.is_on and not _is_watched():
            self._next = _Making(feed, sequences, self._thread.submit(_made, feed, sequences, pins=self.pins))


def _made(feed: Feed, sequences: Ints, *, pins: bool) -> Batch:
    made = feed.micro_batch(sequences)
    return with_tensors(made, Tensor.pin_memory) if pins else made


def _is_watched() -> bool:
    """Whether this thread's operators are watched: a tensor of another thread would not be counted."""
    return _get_current_dispatch_mode() is not None


Model = PreTrainedModel | PeftModel
AnyScorer = Scorer | RewardScorer


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts of a step that fit each other; a checkpoint may still be restored into them."""

    scorer: AnyScorer
    method: Method
    optimizer: Optimizer
    trained: dict[str, nn.Parameter]
    """Parameters that this rank's optimizer steps, by name: whole weights, or its rows of them."""
    reference: Reference | None

    @property
    def follower(self) -> TracksPolicy | None:
        """A reference model that follows the policy."""
        return self.reference if isinstance(self.reference, TracksPolicy) else None


@dataclass(frozen=True, slots=True)
class Part:
    """Input of a forward and backward pass: a micro-batch, or a part of one."""

    sequences: Ints
    micro_batch: int
    """Number of the micro-batch among this rank's."""
    number: int = 0
    """Number of the part within it; 0 for a whole one."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Place at which memory ran out."""

    load: int
    """Tokens of the part, padding included."""
    is_single: bool
    """Whether the part was one sequence, which cannot be split."""


class RanOut(Exception):
    """Memory ran out in the passes of a step, on any rank; raised on all, with nothing left behind."""

    def __init__(self, failure: Failure) -> None:
        super().__init__("out of memory")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was, on the device."""

    sums: dict[str, Tensor]
    """Sums of this rank, `loss` among them."""
    norm: Tensor
    """Scalar, the norm of the gradients before clipping."""


@dataclass(slots=True)
class OptimizerStep:
    """The optimizer step of a rank: `run` makes one, from the sequences to the moved weights.

    Losses are divided by the denominator of the whole step, so their sum over micro-batches, parts of them
    and ranks is the mean of one large batch. No host synchronisation happens here.
    """

    model: nn.Module
    """The scorer, laid over the ranks."""
    method: Method
    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    """Parameters that the optimizer steps."""
    engine: DistributedStep = field(default_factory=DistributedStep)
    max_grad_norm: float | None = None
    follower: TracksPolicy | None = None
    source: StepSource | None = None
    """Source of the works; its feed makes the micro-batches of their sequences."""
    settings: Settings | None = None
    seed: int = 0
    lr_at: Callable[[int], float] = lambda step: 0.0
    """Learning rate of a step by its number, the first of which is 0."""
    ranks: Ranks = Ranks()
    device: torch.device = torch.device("cpu")
    ahead: BatchesAhead = field(default_factory=lambda: BatchesAhead(is_on=False))
    """Makes the next micro-batch while one is worked on."""
    captured: CapturedPasses | None = None
    """Recordings of the model's passes; None where each operator is started by the host."""
    before_last: Callable[[int], None] = lambda num_parts: None
    """Called before the last part of a step, with their number."""
    at: int = 0
    """Number of the part that the passes are at."""

    @property
    def feed(self) -> Feed:
        """Feed of the work at hand."""
        assert self.source is not None, "Sequences are some feed's."
        return self.source.feed

    def run(self, work: StepWork, parts: Sequence[Part], *, want_stats: bool) -> StepResult:
        """Make a step: gradients of its parts over all ranks, then the update. Called by all ranks together.

        Raises: RanOut, on every rank, before any weight has moved.
        """
        sums = self.gradients(work, parts, want_stats=want_stats)
        return StepResult(sums, self.update(work.step))

    def gradients(
        self, work: StepWork, parts: Sequence[Part], *, want_stats: bool, is_trial: bool = False
    ) -> dict[str, Tensor]:
        """Gradients of a step, summed over the ranks; the sums of this rank, with `loss`.

        `is_trial`: its sequences are put together to try the memory, and are no step's.

        Raises: RanOut, on every rank.
        """
        if not is_trial:
            set_rate(self.optimizer, self.lr_at(work.step))
        recovers = self.settings is not None and bool(self.settings.recovery)

        def act() -> dict[str, Tensor]:
            self.at = 0
            self.preview(work.sequences, [part.sequences for part in parts], is_trial=is_trial)
            return self.passes(
                self._micro_batches(work, parts),
                denominator=work.denominator,
                num_micro_batches=len(parts),
                want_stats=want_stats,
            )

        sums, is_whole = attempt(act, is_on=recovers)
        failure = None
        if not is_whole and self.captured is not None and self.captured.made_room():
            self.optimizer.zero_grad(set_to_none=True)
            free()
            return self.gradients(work, parts, want_stats=want_stats, is_trial=is_trial)
        if not is_whole:
            free()
            failure = self._failure(parts[self.at].sequences)
        self.engine.finish()
        if recovers and (worst := self._worst(failure)) is not None:
            self.optimizer.zero_grad(set_to_none=True)
            if self.captured is not None:
                self.captured.release()
            free()
            raise RanOut(worst)
        assert sums is not None, "A pass that broke off was raised."
        return sums

    def passes(
        self, micro_batches: Iterable[Any], *, denominator: Count, num_micro_batches: int, want_stats: bool
    ) -> dict[str, Tensor]:
        """Forward and backward passes of this rank; its sums, with `loss`. `engine.finish` makes gradients
        whole."""
        totals: dict[str, Tensor] = {}
        self.engine.begin(self.model, num_micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == num_micro_batches - 1
            sums = self.forward_backward(micro_batch, denominator, want_stats=want_stats, is_last=is_last)
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals

    def forward_backward(
        self, micro_batch: Any, denominator: Count, *, want_stats: bool, is_last: bool
    ) -> dict[str, Tensor]:
        """Forward, loss and backward of a micro-batch; its sums, with `loss`, detached.

        The graph is gone with this function: some operators hold tensors that no backward pass frees (8-bit
        products their inputs), and the next micro-batch makes its own.
        """
        loss = self.method.loss(self.model, micro_batch, denominator=denominator, want_stats=want_stats)
        with self.engine.last_pass() if is_last else nullcontext():
            self.engine.backward(loss.value)
        show(self.method, loss)
        if self.captured is not None:
            self.captured.record_new()
        return {"loss": loss.value.detach(), **loss.sums}

    def update(self, step: int) -> Tensor:
        """Step the weights and what follows them; the norm before clipping."""
        norm = update(
            self.optimizer,
            self.parameters,
            lr=self.lr_at(step),
            max_grad_norm=self.max_grad_norm,
            engine=self.engine,
        )
        if self.follower is not None:
            self.follower.stepped(step + 1)
        return norm

    def preview(
        self,
        sequences: Ints,
        micro_batches: Sequence[Ints],
        *,
        feed: Feed | None = None,
        is_trial: bool = False,
    ) -> None:
        """Show a method whose losses depend on all of them the sequences of all ranks, and this rank's
        micro-batches; `feed`: of other rows than the step's."""
        if isinstance(self.method, BeforeStep):
            ahead = StepPreview(
                feed or self.feed,
                sequences,
                micro_batches,
                self.device,
                self.ranks.world,
                num_sharing=self.ranks.num_sharing,
                is_trial=is_trial,
            )
            self.method.before_step(self.model, ahead)

    def score(self, feed: Feed, sequences: Ints) -> Loss:
        """The summed loss of some held-out sequences, and their metrics."""
        micro_batch = feed.micro_batch(sequences).to(self.device)
        return self.method.loss(self.model, micro_batch, denominator=1.0, want_stats=True)

    def _micro_batches(self, work: StepWork, parts: Sequence[Part]) -> Iterator[Any]:
        """The parts on the device, each with its random numbers."""
        feed = self.feed
        coming = [*(part.sequences for part in parts[1:]), self.ahead.after_step]
        for number, (part, following) in enumerate(zip(parts, coming, strict=True)):
            self.at = number
            micro_batch = self.ahead.take(feed, part.sequences)
            if following is not None:
                self.ahead.begin(feed, following)
            micro_batch = micro_batch.to(self.device)
            if number == len(parts) - 1:
                self.before_last(len(parts))
            index = part.micro_batch * self.ranks.world + self.ranks.rank
            seed_step(self.seed, work.step, index, part.number)
            yield micro_batch

    def _failure(self, sequences: Ints) -> Failure:
        assert self.settings is not None, "Only a run with settings recovers."
        return Failure(padded_tokens(self.feed, sequences, self.settings), is_single=len(sequences) < 2)

    def _worst(self, failure: Failure | None) -> Failure | None:
        """The worst failure of all ranks: the lightest load that ran out, a single sequence if any was."""
        if self.ranks.world == 1:
            return failure
        worst = self.ranks.max(
            {
                "failed": float(failure is not None),
                "lightness": -float(failure.load) if failure is not None else float("-inf"),
                "single": float(failure is not None and failure.is_single),
            }
        )
        if not worst["failed"]:
            return None
        return Failure(int(-worst["lightness"]), is_single=worst["single"] > 0)


def whole(micro_batches: Iterable[Ints]) -> list[Part]:
    """Each micro-batch as one part."""
    return [Part(sequences, index) for index, sequences in enumerate(micro_batches)]


def prepare_model(
    model: Model, recipe: Recipe, settings: Settings, copies: CopyEngine | None = None
) -> Offloader | None:
    """Checkpointing, offloading and noise, as the plan says; the mover of activations, where there is one.

    `copies`: how it copies, if not as the device does.
    """
    offloader = apply_checkpointing_and_offload(model, settings, copies).offloader
    if recipe.optim.neftune_alpha is not None:
        add_noise(model, recipe.optim.neftune_alpha)
    return offloader


def make_scorer(model: Model, own: Model | None, recipe: Recipe, settings: Settings) -> AnyScorer:
    """The scorer of a method around its model; `own`: a value model beside it."""
    if settings.value != "none":
        made: AnyScorer = ValueScorer(model, own, **loss_form(settings))
    else:
        made = scorer_of(model, METHODS[recipe.method].head, settings)
    if settings.router_replay and isinstance(made, Scorer):
        made.replay = RouterReplay(model)
    return made


def capture_passes(
    step: OptimizerStep, scorer: AnyScorer, settings: Settings, emit: Callable[[str], None]
) -> None:
    """Let the training passes of a step be recorded and replayed, where the plan says so."""
    if settings.step_graphs:
        step.captured = scorer.captured = CapturedPasses(
            make=partial(make_recorder, settings.device),
            emit=emit,
            is_deterministic=settings.deterministic or settings.device == "cpu",
            repeats_positions=settings.positions_by_row,
        )
        begin = step.engine.begin
        # One dtype of gradients in every step: recordings accumulate in them.
        step.engine = replace(step.engine, begin=lambda model, count: begin(model, max(2, count)))


def share_rows(scorer: AnyScorer, settings: Settings) -> None:
    """Let the ranks that hold each row together answer together."""
    scorer.context = make_context(settings.context_parallel, by_heads=settings.context_by == "ulysses")


def assemble(
    scorer: AnyScorer,
    trained: dict[str, nn.Parameter],
    reference: Reference | None,
    recipe: Recipe,
    settings: Settings,
) -> StepParts:
    """The method with its optimizer around a scorer that lies over the ranks."""
    module = import_module(METHODS[recipe.method].trainer)
    weights = list(trained.values())
    optimizer = build_optimizer(scorer, recipe.optim, settings, weights, seed=recipe.train.seed)
    method = shared(module.method(recipe, reference), settings.context_parallel)
    is_sliced = settings.context_parallel > 1
    method = with_expert_load(balanced(method, scorer, settings), scorer, is_sliced=is_sliced)
    return StepParts(scorer, method, optimizer, trained, reference)


def show(method: Any, loss: Loss) -> None:
    """Show a method, within others or not, what it wants to see of a pass."""
    while not isinstance(method, SeesPasses) and hasattr(method, "inner"):
        method = method.inner
    if loss.seen and isinstance(method, SeesPasses):
        method.saw(*loss.seen)
