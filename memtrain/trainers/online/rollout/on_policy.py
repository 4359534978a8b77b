"""Steps on the student's own completions, as a share of all steps: the teacher judges every token of them.

Source: Agarwal et al. 2024 (GKD), arXiv:2306.13649, algorithm 1: with probability lambda a step learns from
completions that the student writes for the prompts of its rows, else from the rows themselves. Gradients do
not pass through the sampling.

A step's completions depend on the weights, the seed and the step's number alone: nothing of them is kept in a
checkpoint, and a run that resumes writes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.collate import Piece
from memtrain.trainers.batches.taught_batches import TaughtBatch, TaughtFeed, batch_of_pieces
from memtrain.trainers.build.components import Built
from memtrain.trainers.data.packing.step_order import micro_batches
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.online.generation.backend import OwnSampler, open_generating, sampling_of
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.protocol import Group, Sample
from memtrain.trainers.protocols.events import DataEvent, NoteEvent
from memtrain.trainers.protocols.feed import Steps, StepWork
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import derive_seed

Ints = NDArray[np.int64]
WATCHED = 2
"""Rollouts whose memory is measured on a CPU; on CUDA it costs nothing and all are."""


@dataclass(slots=True)
class WrittenFeed:
    """Prompts with the completions that the student wrote for one step."""

    pieces: list[Piece]
    settings: Settings
    pad_id: int
    rows: TaughtFeed
    """The rows that the prompts are of."""
    tokens: Ints = field(init=False)
    weights: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = np.array([len(piece) for piece in self.pieces], np.int64)
        self.weights = np.array([int(piece.loss_mask[1:].sum()) for piece in self.pieces], np.int64)

    @property
    def epoch_ptr(self) -> Ints:
        """Borders of the only epoch."""
        return np.array([0, len(self.pieces)])

    @property
    def loss_tokens(self) -> Ints:
        """Tokens of each completion."""
        return self.weights

    def micro_batch(self, sequences: Ints) -> TaughtBatch:
        """The prompts with their completions, end to end or one padded row each."""
        pieces = [self.pieces[one] for one in sequences.tolist()]
        return batch_of_pieces(pieces, self.settings, self.pad_id, is_written=True)

    def sample_prompt(self):
        """See the rows."""
        return self.rows.sample_prompt()

    def data_event(self, split: str) -> DataEvent:
        """See the rows."""
        return self.rows.data_event(split)


class Prompts:
    """The prompts of rows, as the sampler's check reads them."""

    def __init__(self, feed: TaughtFeed) -> None:
        self.feed = feed
        self.tokens = np.array([len(self.ids(one)) for one in range(len(feed.tokens))], np.int64)

    def ids(self, sequence: int) -> tuple[int, ...]:
        """Tokens before the first loss token; the first token, where that is trained on."""
        piece = self.feed.piece_of(sequence)
        return tuple(piece.ids[: max(1, int(piece.loss_mask.argmax()))].tolist())


@dataclass(slots=True)
class OnPolicySteps:
    """The optimizer steps of a distillation of which a share is on the student's own completions."""

    plan: Plan
    built: Built
    base: Steps
    generating: Generating
    watch: MemoryWatch
    prompts: Prompts
    fraction: float
    current: WrittenFeed | None = None
    """The completions of the step at hand; None where it learns from the rows."""
    num_watched: int = 0

    @property
    def feed(self) -> TaughtFeed | WrittenFeed:
        """Feed whose numbers the step's sequences are."""
        return self.current or self.prompts.feed

    def work(self, step: int, *, rank: int, num_ranks: int) -> StepWork:
        """Work of `rank` in optimizer step number `step`; completions are written where it learns from them.

        Called by all ranks together.
        """
        self.current = None
        work = self.base.work(step, rank=rank, num_ranks=num_ranks)
        if not self.is_own(step):
            return work
        prompts = [self.prompts.ids(one) for one in work.sequences.tolist()]
        made = self._written(step, prompts)
        settings = self.plan.settings
        pieces = [_piece(prompt, one, settings.max_length) for prompt, one in zip(prompts, made, strict=True)]
        self.current = feed = WrittenFeed(pieces, settings, self.prompts.feed.pad_id, self.prompts.feed)
        sequences = np.arange(len(pieces))
        dealt = micro_batches(
            sequences,
            feed.tokens,
            num_ranks=num_ranks,
            micro_batch_size=settings.micro_batch_size,
            micro_tokens=settings.micro_tokens,
        )
        count = int(feed.weights.sum())
        return replace(
            work,
            sequences=sequences,
            micro_batches=tuple(dealt[rank]),
            denominator=max(1.0, float(count)),
            num_tokens=int(feed.tokens.sum()),
            num_loss_tokens=count,
            num_sequences=len(pieces),
        )

    def is_own(self, step: int) -> bool:
        """Whether a step learns from the student's completions: a draw of the seed and the step's number."""
        seed = derive_seed(self.plan.recipe.train.seed, "on policy", step)
        return bool(np.random.default_rng(seed).random() < self.fraction)

    def check_sampler(self) -> None:
        """Hold the sampler against the model's own log-probs; called by all ranks together.

        Raises: LaunchError where the sampler gives others.
        """
        make = self.generating.make
        assert isinstance(make, OwnSampler), "The trained module writes."
        make.check(self.generating, self.prompts)

    def _written(self, step: int, prompts: Sequence[tuple[int, ...]]) -> list[Sample]:
        seed = self.plan.recipe.train.seed
        groups = [
            Group(prompt, 1, derive_seed(seed, "completions", "rollout", step, place))
            for place, prompt in enumerate(prompts)
        ]
        with self._watched():
            samples = self.generating.all(groups, sampling_of(self.plan, self.built))
        self.num_watched += 1
        return [one for (one,) in samples]

    def _watched(self) -> AbstractContextManager[object]:
        is_watched = self.plan.settings.device == "cuda" or self.num_watched < WATCHED
        return self.watch.phase("generation") if is_watched else nullcontext()


def _piece(prompt: tuple[int, ...], sample: Sample, max_length: int | None) -> Piece:
    """A prompt with its completion, which is trained on; cut where the rows are cut."""
    ids = np.array((*prompt, *sample.token_ids), np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return Piece(ids[:max_length], mask[:max_length])


def on_policy_steps(
    plan: Plan,
    built: Built,
    ranks: Ranks,
    watch: MemoryWatch,
    sinks: EventSinks,
    position: TrainState,
) -> OnPolicySteps | None:
    """The steps of a distillation that learns from own completions too; None for all other runs.

    Raises: LaunchError when the sampler does not give the model's own log-probs.
    """
    section = plan.recipe.taught
    if section is None or not section.on_policy_fraction:
        return None
    assert isinstance(built.train, TaughtFeed), "Rows of this method have a teacher."

    def note(text: str) -> None:
        sinks.emit(NoteEvent(step=position.step, text=text))

    generating = open_generating(plan, built, ranks, version=lambda: position.step, emit=note)
    base = Steps(built.train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle)
    prompts = Prompts(built.train)
    steps = OnPolicySteps(plan, built, base, generating, watch, prompts, section.on_policy_fraction)
    steps.check_sampler()
    return steps
