"""The online loop: rollout, score, advantage, update, as steps that the training loop asks for.

The training loop is the same as for every method. It asks for the work of its next optimizer step; where that
step needs a new rollout, the rollout is made here, and the answers become the feed of the step. With
updates_per_rollout u and steps_per_rollout s, steps [w * u * s, (w + 1) * u * s) learn from rollout w: step j
of these from part j mod s.
"""

# A answers, N tokens of answers, F reward functions.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memtrain.memory.plan import Plan
from memtrain.recipes.registry import METHODS
from memtrain.trainers.advantages import groups_without_signal, weighted_rewards
from memtrain.trainers.build import Built
from memtrain.trainers.feed import Steps, StepWork
from memtrain.trainers.losses.policy import Norms
from memtrain.trainers.model.load import local_device
from memtrain.trainers.online_method import OnlineMethod
from memtrain.trainers.policy_feed import PolicyFeed
from memtrain.trainers.policy_passes import Passes
from memtrain.trainers.position import Position
from memtrain.trainers.prompt_feed import PromptFeed
from memtrain.trainers.rewards.functions import Function, check_columns, load_functions
from memtrain.trainers.rewards.score import Answer, score
from memtrain.trainers.rollout.backend import build_sampler, sampling_of
from memtrain.trainers.rollout.generating import Generating
from memtrain.trainers.rollout.protocol import Group, Sample, Sampling
from memtrain.trainers.rollout.shown import COMPLETIONS_FILE, cut_after, show
from memtrain.trainers.rollout.window import Window, new_window, window_of
from memtrain.trainers.run.checkpoint import Checkpoint
from memtrain.trainers.run.events import EvalEvent, Event, NoteEvent
from memtrain.trainers.run.ranks import Ranks
from memtrain.trainers.run.seed import derive_seed
from memtrain.trainers.run.state_io import load_state
from memtrain.trainers.run.watch import MemoryWatch

Ints = NDArray[np.int64]
WATCHED_ROLLOUTS = 2
"""Rollouts whose memory is measured on a CPU; on CUDA it costs nothing and all are."""
NO_NORMS = Norms(num_answers=1, num_tokens=1, rollout_tokens=1, max_tokens=1)


@dataclass(slots=True)
class OnlineSteps:
    """The optimizer steps of a run that learns from its own completions."""

    plan: Plan
    built: Built
    ranks: Ranks
    watch: MemoryWatch
    tell: Callable[[Event], None]
    generating: Generating
    prompts: PromptFeed
    held_out: PromptFeed | None
    position: Position
    feed: PolicyFeed = field(init=False)
    base: Steps = field(init=False)
    functions: tuple[Function, ...] = field(init=False)
    num_watched: int = 0
    """Rollouts whose memory was measured."""

    def __post_init__(self) -> None:
        recipe, settings = self.plan.recipe, self.plan.settings
        rewards = recipe.rewards
        assert rewards is not None, "A recipe of this method has rewards."
        self.functions = load_functions(rewards)
        check_columns(self.functions, list(self.prompts.columns(0)), "rewards.functions")
        self.feed = PolicyFeed(self.prompts, settings, NO_NORMS)
        assert settings.batch_rows is not None, "A step is said in completions."
        each = settings.model_copy(
            update={
                "batch_rows": settings.batch_rows // recipe.generation.completions,
                "group_by_length": False,
            }
        )
        self.base = Steps(self.prompts, each, recipe.train.seed, recipe.train.shuffle)

    @property
    def method(self) -> OnlineMethod:
        """The method, as this loop sees it."""
        assert isinstance(self.built.method, OnlineMethod), "The registry calls it online."
        return self.built.method

    @property
    def path(self) -> Path:
        """Where completions are shown."""
        return Path(self.plan.run_dir) / COMPLETIONS_FILE

    def work(self, step: int, *, rank: int, num_ranks: int) -> StepWork:
        """What `rank` does in optimizer step number `step`; a rollout is made where the step needs a new one.

        Called by all ranks together.
        """
        section = self.method.section
        number, place = divmod(step, section.steps_in_window)
        if self.feed.window is None or self.feed.window.number != number:
            self.feed.window = self._rollout(number, step)
            self.method.told = dict(self.feed.window.told)
        else:
            self.method.told = {}
        return self._of_part(self.feed.window, step, place % section.steps_per_rollout, rank, num_ranks)

    def kept(self) -> dict[str, Any]:
        """The rollout at hand, for a checkpoint."""
        return {} if self.feed.window is None else self.feed.window.state()

    def go_on(self, state: dict[str, Any], step: int) -> None:
        """Take up the rollout of a checkpoint of `step`."""
        cut_after(self.path, step)
        if state:
            self.feed.window = window_of(state)

    def evaluate(self) -> float:
        """Minus the mean reward of one completion for each held-out prompt, told; the same on every rank."""
        started = time.perf_counter()
        held_out = self.held_out
        assert held_out is not None, "There are held-out prompts."
        numbers = range(len(held_out.tokens))
        groups = [Group(held_out.ids(number), 1, self._seed("held-out", number)) for number in numbers]
        samples = self._written(groups, sampling_of(self.plan, self.built, is_evaluation=True))
        reward_AF, told = self._judged(held_out, list(numbers), samples)
        total = weighted_rewards(torch.from_numpy(reward_AF), self._weights()).nanmean().item()
        lengths = [len(sample.token_ids) for group in samples for sample in group]
        extra = {"reward": total, **told, "completion_tokens": float(np.mean(lengths))}
        self.tell(
            EvalEvent(
                step=self.position.step,
                loss=-total,
                tokens=sum(lengths),
                seconds=time.perf_counter() - started,
                extra=extra,
            )
        )
        return -total

    def _rollout(self, number: int, step: int) -> Window:
        """Write, judge and weigh the completions of one rollout."""
        section, recipe = self.method.section, self.plan.recipe
        first = number * section.steps_per_rollout
        drawn = [
            self.base.work(first + part, rank=0, num_ranks=1).sequences
            for part in range(section.steps_per_rollout)
        ]
        rows = [int(row) for part in drawn for row in part]
        parts = [part for part, of_part in enumerate(drawn) for _ in of_part]
        prompts = [self.prompts.ids(row) for row in rows]
        count = recipe.generation.completions
        groups = [
            Group(prompt, count, self._seed("rollout", number, place)) for place, prompt in enumerate(prompts)
        ]
        started = time.perf_counter()
        samples = self._written(groups, sampling_of(self.plan, self.built))
        generated = time.perf_counter()
        window = new_window(number, rows, parts, prompts, samples, len(self.functions))
        window.reward_AF, window.told = self._judged(self.prompts, rows, samples)
        judged = time.perf_counter()
        self._weigh(window)
        window.told |= self._facts(window) | {
            "generated_per_s": len(window.ids_N) / max(1e-9, generated - started),
            "seconds_generation": generated - started,
            "seconds_rewards": judged - generated,
            "seconds_passes": time.perf_counter() - judged,
        }
        self._show(window, step)
        return window

    def _written(self, groups: Sequence[Group], sampling: Sampling) -> list[list[Sample]]:
        # On a CPU every tensor is counted, which costs more than sampling does.
        is_watched = self.plan.settings.device == "cuda" or self.num_watched < WATCHED_ROLLOUTS
        self.num_watched += 1
        whole = self.built.spread.whole(self.built.scorer)
        with self.watch.phase("generation") if is_watched else nullcontext(), whole:
            return self.generating.all(groups, sampling)

    def _judged(
        self, feed: PromptFeed, rows: Sequence[int], samples: Sequence[Sequence[Sample]]
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """(rewards [A, F], what is told of them): the main rank asks the functions, once for all ranks."""

        def ask() -> tuple[NDArray[np.float64], dict[str, float]]:
            answers = [
                Answer(
                    self._text(feed.ids(row)), self._answer_text(sample), sample.token_ids, feed.columns(row)
                )
                for row, group in zip(rows, samples, strict=True)
                for sample in group
            ]
            assert self.plan.recipe.rewards is not None, "A recipe of this method has rewards."
            made = score(answers, self.functions, self.plan.recipe.rewards)
            return made.value_RF.numpy(), made.metrics

        return self.ranks.broadcast(ask() if self.ranks.is_main else (np.zeros((0, 0)), {}))

    def _weigh(self, window: Window) -> None:
        """Advantages, what is left out of the update, and the passes before it."""
        method, needs = self.method, self.method.needs
        learnable_A = ~window.is_cut_A if method.section.mask_truncated else np.ones_like(window.is_cut_A)
        window.is_learnt_A = learnable_A
        window.norms = self._norms(window, learnable_A)
        self.feed.window = window
        kl_A = None
        if needs.is_for_rewards:
            # Rewards are penalised for every answer: those that are not learnt are in the baseline too.
            window.is_learnt_A = np.ones_like(learnable_A)
            self._passes().fill(self.feed, needs)
            kl_A = _sums(window)
        reward_AF = torch.from_numpy(window.reward_AF)
        count = self.plan.recipe.generation.completions
        advantage_A = method.advantages(reward_AF, self._weights(), count, kl_A)
        window.advantage_A = advantage_A.float().numpy()
        window.is_learnt_A = learnable_A
        if needs.drops_silent:
            window.is_learnt_A = learnable_A & (window.advantage_A != 0)
        if not needs.is_for_rewards:
            self._passes().fill(self.feed, needs)

    def _passes(self) -> Passes:
        return Passes(
            model=self.built.scorer,
            reference=self.method.reference,
            settings=self.plan.settings,
            ranks=self.ranks,
            device=local_device(self.plan.settings),
            temperature=self.method.temperature,
        )

    def _norms(self, window: Window, learnable_A: NDArray[np.bool_]) -> list[dict[str, float]]:
        """What each part's loss is divided by, whatever is left out of the update."""
        num_parts = self.method.section.steps_per_rollout
        tokens_A = window.length_A * learnable_A
        return [
            {
                "answers": float((window.part_A == part).sum()),
                "tokens": float(tokens_A[window.part_A == part].sum()),
                "rollout_tokens": float(tokens_A.sum()) / num_parts,
            }
            for part in range(num_parts)
        ]

    def _of_part(self, window: Window, step: int, part: int, rank: int, num_ranks: int) -> StepWork:
        settings = self.plan.settings
        answers = np.flatnonzero((window.part_A == part) & window.is_learnt_A)
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
        micros = self.feed.deal(answers, micro_rows=settings.micro_rows, micro_tokens=settings.micro_tokens)
        rounds = -(-len(micros) // num_ranks)
        micros += [np.zeros(0, np.int64)] * (rounds * num_ranks - len(micros))
        base = self.base.work(
            window.number * self.method.section.steps_per_rollout + part, rank=0, num_ranks=1
        )
        return StepWork(
            step=step,
            epoch=base.epoch,
            is_last_of_epoch=base.is_last_of_epoch and self._is_last_update(step),
            sequences=answers,
            micros=tuple(micros[rank::num_ranks]),
            denominator=max(1.0, norms["tokens"]),
            num_tokens=int(self.feed.tokens[answers].sum()),
            num_sequences=len(answers),
            num_learnt=int(window.length_A[answers].sum()),
        )

    def _is_last_update(self, step: int) -> bool:
        section = self.method.section
        return step % section.steps_in_window >= section.steps_in_window - section.steps_per_rollout

    def _facts(self, window: Window) -> dict[str, float]:
        """What the metrics say of a rollout."""
        reward_A = weighted_rewards(torch.from_numpy(window.reward_AF), self._weights())
        known_A = reward_A[~reward_A.isnan()]
        count = self.plan.recipe.generation.completions
        lengths = window.length_A
        unique = int(np.diff(window.prompt_ptr).sum()) + int(lengths.sum())
        return {
            "reward": known_A.mean().item() if len(known_A) else float("nan"),
            "reward_std": known_A.std().item() if len(known_A) > 1 else 0.0,
            "groups_without_signal": groups_without_signal(reward_A, count).float().mean().item(),
            "completion_tokens": float(lengths.mean()),
            "completion_tokens_max": float(lengths.max()),
            "completions_cut": float(window.is_cut_A.mean()),
            "completions_learnt": float(window.is_learnt_A.mean()),
            "rollout_tokens": float(unique),
        }

    def _show(self, window: Window, step: int) -> None:
        generate, log = self.plan.recipe.generation, self.plan.recipe.log
        is_due = step == 0 or (step + 1) % log.every_steps == 0 or self.method.section.steps_in_window > 1
        if not (self.ranks.is_main and generate.show and is_due):
            return
        shown = np.linspace(0, window.num_answers - 1, min(generate.show, window.num_answers)).astype(int)
        lines = [
            {
                "step": step + 1,
                "prompt": self._text(window.prompt(answer).tolist()),
                "completion": self._text(window.answer(answer).tolist()),
                "rewards": {
                    function.label: _told(window.reward_AF[answer, index])
                    for index, function in enumerate(self.functions)
                },
                "advantage": float(window.advantage_A[answer]),
                "is_cut": bool(window.is_cut_A[answer]),
            }
            for answer in sorted(set(shown.tolist()))
        ]
        show(self.path, lines)

    def _weights(self) -> torch.Tensor:
        return torch.tensor([function.recipe.weight for function in self.functions], dtype=torch.float64)

    def _seed(self, *names: int | str) -> int:
        return derive_seed(self.plan.recipe.train.seed, "completions", *names)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.built.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _answer_text(self, sample: Sample) -> str:
        """What rewards read: the completion without special tokens."""
        return str(self.built.tokenizer.decode(list(sample.token_ids), skip_special_tokens=True))


def online_steps(
    plan: Plan,
    built: Built,
    ranks: Ranks,
    watch: MemoryWatch,
    tell: Callable[[Event], None],
    position: Position,
    checkpoint: Checkpoint | None,
) -> OnlineSteps | None:
    """The steps of a method that writes its completions, as a checkpoint left them; None for other methods.

    Raises: RecipeError when a reward function is not there, or needs what the rows do not have.
    """
    if not METHODS[plan.recipe.method].is_online:
        return None
    assert isinstance(built.train, PromptFeed), "Rows of this method are prompts."
    assert built.eval is None or isinstance(built.eval, PromptFeed), "Rows of this method are prompts."
    generating = Generating(
        make=lambda rows: build_sampler(plan, built, max_rows=rows),
        max_rows=plan.settings.rollout_rows,
        ranks=ranks,
        tell=lambda text: tell(NoteEvent(step=position.step, text=text)),
    )
    steps = OnlineSteps(plan, built, ranks, watch, tell, generating, built.train, built.eval, position)
    state = load_state(checkpoint.part("rollout")) if checkpoint is not None else {}
    steps.go_on(state, position.step)
    return steps


def _sums(window: Window) -> torch.Tensor:
    """Sum over each answer's tokens of log p_old - log p_reference [A]."""
    assert window.old_N is not None, "The pass was made."
    assert window.reference_N is not None, "The pass was made."
    difference_N = window.old_N.astype(np.float64) - window.reference_N
    return torch.from_numpy(np.add.reduceat(difference_N, window.answer_ptr[:-1]))


def _told(reward: float) -> float | None:
    return None if np.isnan(reward) else float(reward)
