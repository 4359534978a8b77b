"""The online loop: rollout, score, advantage, update, as steps that the training loop asks for.

The training loop is the same as for every method. It asks for the work of its next optimizer step; where that
step needs a new rollout, the rollout is made here, and the answers become the feed of the step. With
updates_per_rollout u and steps_per_rollout s, steps [w * u * s, (w + 1) * u * s) learn from rollout w: step j
of these from part j mod s.
"""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.prompt_groups import prompt_groups
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.evaluation import SET_MARK
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.build.balanced import own_method
from memtrain.trainers.build.components import Built, has_dropout
from memtrain.trainers.checkpoints.checkpoint import Checkpoint
from memtrain.trainers.checkpoints.state_io import load_state
from memtrain.trainers.losses.policy.registry import Norms
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.online.generation.backend import OwnSampler, open_generating, sampling_of
from memtrain.trainers.online.generation.completions_log import cut_after
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampling
from memtrain.trainers.online.generation.turns import TurnWriter, open_turns
from memtrain.trainers.online.rewards.functions import ENVIRONMENT, check_columns
from memtrain.trainers.online.rollout.advantages import AdvantageStep, rollout_facts, weighted_rewards
from memtrain.trainers.online.rollout.dynamic_sampling import Judged, with_signal
from memtrain.trainers.online.rollout.mismatch_guard import ROUNDING, MismatchAlarm
from memtrain.trainers.online.rollout.protocol import OnlineMethod, WeightsTokens
from memtrain.trainers.online.rollout.reward_scoring import RewardScoring, build_reward_scoring
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, Rollout, new_window, window_of
from memtrain.trainers.online.rollout.scoring_passes import Passes
from memtrain.trainers.protocols.events import REWARD, EvalEvent, Event, NoteEvent
from memtrain.trainers.protocols.feed import Steps, StepWork
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.run_folder.event_sinks import EventSinks
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import derive_seed, numpy_generator

Ints = NDArray[np.int64]
WATCHED_ROLLOUTS = 2
"""Rollouts whose memory is measured on a CPU, beside the first evaluation; on CUDA it costs nothing: all."""
NO_NORMS = Norms(num_answers=1, num_tokens=1, rollout_tokens=1, max_tokens=1)


@dataclass(slots=True)
class OnlineSteps:
    """The optimizer steps of a run that learns from its own completions."""

    plan: Plan
    built: Built
    ranks: Ranks
    watch: MemoryWatch
    emit: Callable[[Event], None]
    generating: Generating
    judging: RewardScoring
    prompts: PromptFeed
    held_out: PromptFeed | None
    position: TrainState
    feed: PolicyFeed = field(init=False)
    base: Steps = field(init=False)
    alarm: MismatchAlarm = field(init=False)
    turns: TurnWriter | None = None
    """Holds conversations with an environment; None where a completion is one turn."""
    num_watched: int = 0
    """Rollouts whose memory was measured."""

    def __post_init__(self) -> None:
        recipe, settings = self.plan.recipe, self.plan.settings
        groups = prompt_groups(recipe, is_shared=settings.shared_prompts)
        self.feed = self.method.answer_feed(self.prompts, settings, NO_NORMS, groups)
        assert settings.batch_size is not None, "A step is counted in completions."
        each = settings.model_copy(
            update={
                "batch_size": settings.batch_size // recipe.generation.num_generations,
                "group_by_length": False,
            }
        )
        self.base = Steps(self.prompts, each, recipe.train.seed, recipe.train.shuffle)
        # Dropout moves the trainer's log-probs where they are those of the update itself.
        is_blurred = has_dropout(self.built.model) and not self.method.section.needs.old
        self.alarm = MismatchAlarm(
            None if is_blurred else recipe.generation.max_logprob_gap,
            lambda text: self.emit(NoteEvent(step=self.position.step, text=text)),
            self.plan.run_dir,
            settings.sampler,
            None if is_blurred else ROUNDING[settings.dtype],
        )

    @property
    def method(self) -> OnlineMethod:
        """The method, as this loop sees it."""
        method = own_method(self.built.method)
        assert isinstance(method, OnlineMethod), "The registry calls it online."
        return method

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that all ranks together ask in a rollout."""
        each = self.plan.settings.batch_size or 1
        count = self.plan.recipe.generation.num_generations
        return max(1, each // count) * self.method.section.steps_per_rollout

    def work(self, step: int, *, rank: int, num_ranks: int) -> StepWork:
        """Work of `rank` in optimizer step number `step`; a rollout is made where the step needs a new one.

        Called by all ranks together.
        """
        self.alarm.heed(self.method, self.ranks)
        section = self.method.section
        number, place = divmod(step, section.steps_in_window)
        if self.feed.window is None or self.feed.window.number != number:
            self.feed.window = self._rollout(number, step)
            self.method.metrics = dict(self.feed.window.metrics)
        else:
            self.method.metrics = {}
        part = place % section.steps_per_rollout
        return self.work_of(self.feed.window, step, part, rank=rank, num_ranks=num_ranks)

    def kept(self) -> dict[str, Any]:
        """The rollout at hand, for a checkpoint."""
        return {} if self.feed.window is None else self.feed.window.state()

    def go_on(self, state: dict[str, Any], step: int) -> None:
        """Take up the rollout of a checkpoint of `step`."""
        cut_after(self.judging.path, step)
        if state:
            self.feed.window = window_of(state)
            if isinstance(self.method, WeightsTokens):
                self.method.go_on(self.feed.window.kept)

    def evaluate(self) -> EvalEvent:
        """Mean reward of one completion for each held-out prompt, and minus that as the loss; the same on
        every rank."""
        started = time.perf_counter()
        held_out = self.held_out
        assert held_out is not None, "There are held-out prompts."
        numbers = range(len(held_out.tokens))
        groups = [Group(held_out.ids(number), 1, self._seed("held-out", number)) for number in numbers]
        sampling = sampling_of(self.plan, self.built, is_evaluation=True)
        made = self._judged(held_out, list(numbers), groups, sampling)
        samples, metrics = made.samples, made.metrics
        reward_A = weighted_rewards(torch.from_numpy(made.reward_AF), self.judging.weight_F)
        total = reward_A.nanmean().item()
        lengths = [len(sample.token_ids) for group in samples for sample in group]
        by_set = {
            f"{name}{SET_MARK}{REWARD}": reward_A[first:end].nanmean().item()
            for name, first, end in zip(
                self.plan.recipe.data.eval_sets, held_out.epoch_ptr, held_out.epoch_ptr[1:], strict=False
            )
        }
        extra = {REWARD: total, **metrics, "completion_tokens": float(np.mean(lengths)), **by_set}
        return EvalEvent(
            step=self.position.step,
            loss=-total,
            tokens=sum(lengths),
            seconds=time.perf_counter() - started,
            extra=extra,
        )

    def _rollout(self, number: int, step: int) -> Rollout:
        """Write, judge and weigh the completions of one rollout."""
        section, recipe = self.method.section, self.plan.recipe
        first = number * section.steps_per_rollout
        drawn = [
            self.base.work(first + part, rank=0, num_ranks=1).sequences
            for part in range(section.steps_per_rollout)
        ]
        rows = [int(row) for part in drawn for row in part]
        parts = [part for part, of_part in enumerate(drawn) for _ in of_part]
        count = recipe.generation.num_generations
        sampling = sampling_of(self.plan, self.built)

        def ask(rows: list[int], places: list[int], attempt: int) -> Judged:
            names = [(place, attempt) if attempt else (place,) for place in places]
            groups = [
                Group(self.prompts.ids(row), count, self._seed("rollout", number, *name))
                for row, name in zip(rows, names, strict=True)
            ]
            return self._judged(self.prompts, rows, groups, sampling)

        made = ask(rows, list(range(len(rows))), 0)
        if section.resamples:
            order = numpy_generator(self._seed("resampled", number)).permutation(len(self.prompts.tokens))
            made = with_signal(
                made,
                ask,
                weight_F=self.judging.weight_F,
                group_size=count,
                most=section.resamples,
                order=order,
            )
            made.metrics |= self.judging.means(made.reward_AF)
        prompts = [self.prompts.ids(row) for row in made.rows]
        window = new_window(number, made.rows, parts, prompts, made.samples, len(self.judging.functions))
        window.reward_AF, window.metrics = made.reward_AF, made.metrics
        scored = time.perf_counter()
        weighing = AdvantageStep(self.method, self.feed, self.passes, self.judging.weight_F, count)
        with self._watched("log-probs"):
            weighing.weigh(window)
        reward_A = weighted_rewards(torch.from_numpy(window.reward_AF), self.judging.weight_F)
        window.metrics |= rollout_facts(window, reward_A, count) | {
            "generated_per_s": len(window.ids_N) / max(1e-9, made.seconds_generation),
            "seconds_generation": made.seconds_generation,
            "seconds_rewards": made.seconds_rewards,
            "seconds_passes": time.perf_counter() - scored,
        }
        self.num_watched += 1
        if self._is_shown(step):
            self.judging.show(window, step + 1, self.plan.recipe.generation.show)
        return window

    def _judged(
        self, feed: PromptFeed, rows: list[int], groups: Sequence[Group], sampling: Sampling
    ) -> Judged:
        """Completions of some rows with their rewards; called by all ranks together."""
        started = time.perf_counter()
        # Rewards of held-out completions wait until all are written.
        is_rollout = feed is self.prompts
        early, phase = (self.judging.early(), "generation") if is_rollout else (None, "evaluation")
        environments, more = None, {}

        def begin(number: int, samples: list[Sample]) -> None:
            if early is not None:
                self.judging.begin(early, feed, number, rows[number], samples)

        if self.turns is None:
            samples = self.written(groups, sampling, begin, phase=phase)
        else:
            with self._writing(phase):
                held = self.turns.write(groups, sampling, lambda at: self._given(feed, rows[at]))
            samples, environments, more = held.samples, held.environments, held.metrics
        generated = time.perf_counter()
        with self._watched("rewards"):
            reward_AF, metrics = self.judging.score(feed, rows, samples, early, environments)
        seconds = time.perf_counter() - generated
        return Judged(rows, samples, reward_AF, metrics | more, generated - started, seconds)

    def _given(self, feed: PromptFeed, row: int) -> dict[str, Any]:
        """Arguments for the `reset` of an environment, of a row."""
        return {**feed.columns(row), "prompt": self.judging.text(feed.ids(row))}

    def check_sampler(self) -> None:
        """Hold the run's own sampler against the model's own log-probs; engines do it with their weights.

        Called by all ranks together. Raises: LaunchError where the sampler gives others.
        """
        make, spread = self.generating.make, self.built.spread
        if isinstance(make, OwnSampler):
            laid = spread.whole if self.plan.settings.gather_weights else spread.streamed
            with laid(self.built.scorer):
                make.check(self.generating, self.prompts)

    def written(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        on_done: OnDone | None = None,
        *,
        phase: str = "generation",
    ) -> list[list[Sample]]:
        """The completions of some groups, on every rank; called by all of them together."""
        with self._writing(phase):
            return self.generating.all(groups, sampling, on_done)

    @contextmanager
    def _writing(self, phase: str) -> Iterator[None]:
        """Weights lie as completions are written inside."""
        spread = self.built.spread
        laid = spread.whole if self.plan.settings.gather_weights else spread.streamed
        with self._watched(phase), laid(self.built.scorer):
            yield

    def _watched(self, phase: str) -> AbstractContextManager[object]:
        # On a CPU every tensor is counted, which costs more than sampling does.
        is_first = self.num_watched < WATCHED_ROLLOUTS or phase not in self.watch.phases
        is_watched = self.plan.settings.device == "cuda" or is_first
        return self.watch.phase(phase) if is_watched else nullcontext()

    def _is_shown(self, step: int) -> bool:
        every = self.plan.recipe.log.every_steps
        return step == 0 or (step + 1) % every == 0 or self.method.section.steps_in_window > 1

    def passes(self) -> Passes:
        """Passes for log-probs and values before an update."""
        return Passes(
            model=self.built.scorer,
            reference=self.method.reference,
            settings=self.plan.settings,
            ranks=self.ranks,
            device=local_device(self.plan.settings),
            temperature=self.method.temperature,
        )

    def work_of(self, window: Rollout, step: int, part: int, *, rank: int, num_ranks: int) -> StepWork:
        """Work of `rank` on a part of a window."""
        settings = self.plan.settings
        answers = np.flatnonzero((window.part_A == part) & window.is_trained_A)
        kept = None
        if window.is_kept_N is not None:
            kept = float(window.is_kept_N[window.tokens_of(answers)].sum())
        norms = window.norms[part]
        self.feed.norms = Norms(
            num_answers=norms["answers"],
            num_tokens=norms["tokens"],
            rollout_tokens=norms["rollout_tokens"],
            max_tokens=self.plan.recipe.generation.max_tokens,
            kept_tokens=kept,
        )
        sequences = self.feed.sequences_of(answers)
        micro_batches = self.feed.deal(
            answers, micro_batch_size=settings.micro_batch_size, micro_tokens=settings.micro_tokens
        )
        rounds = -(-len(micro_batches) // num_ranks)
        micro_batches += [np.zeros(0, np.int64)] * (rounds * num_ranks - len(micro_batches))
        base = self.base.work(
            window.number * self.method.section.steps_per_rollout + part, rank=0, num_ranks=1
        )
        return StepWork(
            step=step,
            epoch=base.epoch,
            is_last_of_epoch=base.is_last_of_epoch and self._is_last_update(step),
            sequences=sequences,
            micro_batches=tuple(micro_batches[rank::num_ranks]),
            denominator=max(1.0, norms["tokens"]),
            num_tokens=int(self.feed.tokens[sequences].sum()),
            num_sequences=len(answers),
            num_loss_tokens=int(window.length_A[answers].sum()),
            passes=base.passes,
            of_epoch=base.of_epoch if self._is_last_update(step) else (0, 1),
        )

    def _is_last_update(self, step: int) -> bool:
        section = self.method.section
        return step % section.steps_in_window >= section.steps_in_window - section.steps_per_rollout

    def _seed(self, *names: int | str) -> int:
        return derive_seed(self.plan.recipe.train.seed, "completions", *names)


def online_steps(
    plan: Plan,
    built: Built,
    ranks: Ranks,
    watch: MemoryWatch,
    sinks: EventSinks,
    position: TrainState,
    checkpoint: Checkpoint | None,
) -> OnlineSteps | None:
    """The steps of a method that writes its completions, as a checkpoint left them; None for other methods.

    Raises: RecipeError when a reward function is not there, or needs what the rows do not have; LaunchError
    whenthe sampler does not give the model's own log-probs.
    """
    if not METHODS[plan.recipe.method].is_online:
        return None
    assert isinstance(built.train, PromptFeed), "Rows of this method are prompts."
    assert built.eval is None or isinstance(built.eval, PromptFeed), "Rows of this method are prompts."

    def note(text: str) -> None:
        sinks.emit(NoteEvent(step=position.step, text=text))

    generating = open_generating(plan, built, ranks, version=lambda: position.step, emit=note)
    judging = build_reward_scoring(plan, built, ranks, sinks.print_line)
    watch.resident_bytes += judging.held_bytes
    columns = list(built.train.columns(0))
    turns = open_turns(plan, built, ranks, generating, columns)
    own = [ENVIRONMENT] if turns is not None else []
    check_columns(dict(enumerate(judging.functions)), [*columns, *own])
    steps = OnlineSteps(
        plan, built, ranks, watch, sinks.emit, generating, judging, built.train, built.eval, position, turns
    )
    state = load_state(checkpoint.part("rollout")) if checkpoint is not None else {}
    steps.go_on(state, position.step)
    steps.check_sampler()
    return steps
