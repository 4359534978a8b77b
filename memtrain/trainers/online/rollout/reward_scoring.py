"""Scoring of completions: the judges, their ranks, and the samples shown to a person."""

# A answers, F reward functions.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.build.components import Built
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.generation.completions_log import COMPLETIONS_FILE, as_text, show
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rewards.functions import ENVIRONMENT, Function, load_functions
from memtrain.trainers.online.rewards.interpreter_watch import watch_interpreter
from memtrain.trainers.online.rewards.models import RewardJudge, load_reward_model
from memtrain.trainers.online.rewards.reading import prompt_of_row
from memtrain.trainers.online.rewards.score import Answer, Early, score
from memtrain.trainers.online.rewards.surroundings import keep_surroundings, surrounded, tell_changes
from memtrain.trainers.online.rollout.rollout_batches import Rollout
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.weight_layout import local_of


@dataclass(frozen=True, slots=True)
class RewardScoring:
    """The rewards of a run. Functions are asked on the main rank, models on every rank for its share."""

    rewards: Rewards
    functions: tuple[Function, ...]
    """Every reward of the recipe in order, models among them."""
    models: dict[str, RewardJudge]
    """Reward models by their label."""
    tokenizer: PreTrainedTokenizerFast
    ranks: Ranks
    path: Path
    """File in which completions are shown."""
    print_line: Callable[[str], None]
    """Takes lines for the terminal and the log."""

    @property
    def weight_F(self) -> Tensor:  # noqa: N802
        """Factor of each verdict."""
        return torch.tensor([function.recipe.weight for function in self.functions], dtype=torch.float64)

    @property
    def runs_others_code(self) -> bool:
        """Whether functions or an environment of the recipe are called."""
        own = all(one.is_builtin for one in self.functions)
        return not own or self.rewards.environment is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's weights of all reward models."""
        held = [t for one in self.models.values() for t in (*one.scorer.parameters(), *one.scorer.buffers())]
        return sum(local_of(tensor).nbytes for tensor in held)

    def early(self) -> Early:
        """Takes the groups of one rollout as they are written."""
        return Early(self.functions, self.rewards)

    def begin(self, early: Early, feed: PromptFeed, number: int, row: int, samples: Sequence[Sample]) -> None:
        """Begin the reward calls of group `number`, completions of `row`; on the main rank alone."""
        if self.ranks.is_main and early.callers:
            early.begin(number, self._answers(feed, row, samples))

    def score(
        self,
        feed: PromptFeed,
        rows: Sequence[int],
        samples: Sequence[Sequence[Sample]],
        early: Early | None = None,
        environments: Sequence[Sequence[Any]] | None = None,
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """(rewards [A, F], their metrics), the same on every rank; called by all together.

        `early` has what was begun while the completions were written; `environments` the objects that
        answered them, on the main rank.
        """
        answers = [
            answer
            for number, (row, group) in enumerate(zip(rows, samples, strict=True))
            for answer in self._answers(feed, row, group, environments[number] if environments else None)
        ]
        known = {label: self._shared(model, answers) for label, model in self.models.items()}

        def ask() -> tuple[NDArray[np.float64], dict[str, float]]:
            count = len(samples[0]) if samples else 1
            made = score(answers, self.functions, self.rewards, group_size=count, known=known, early=early)
            if self.runs_others_code:
                tell_changes(self.print_line)
            return made.value_RF.numpy(), made.metrics

        return self.ranks.broadcast(ask() if self.ranks.is_main else (np.zeros((0, 0)), {}))

    def means(self, reward_AF: NDArray[np.float64]) -> dict[str, float]:
        """Mean verdict of each reward that gave any, by its name in the metrics."""
        return {
            f"rewards/{function.label}": float(np.nanmean(reward_AF[:, number]))
            for number, function in enumerate(self.functions)
            if not np.isnan(reward_AF[:, number]).all()
        }

    def show(self, window: Rollout, step: int, count: int) -> None:
        """Keep `count` completions of a rollout in completions.jsonl, and put one of them on the terminal."""
        if not (self.ranks.is_main and count):
            return
        numbers = np.linspace(0, window.num_answers - 1, min(count, window.num_answers)).astype(int)
        lines = [
            {
                "step": step,
                "prompt": self.text(window.prompt(answer).tolist()),
                "completion": self.text(window.context(answer)[0].tolist()),
                "rewards": {
                    function.label: _known(window.reward_AF[answer, index])
                    for index, function in enumerate(self.functions)
                },
                "advantage": float(window.advantage_A[answer]),
                "is_cut": bool(window.is_cut_A[answer]),
            }
            for answer in sorted(set(numbers.tolist()))
        ]
        show(self.path, lines)
        self.print_line(as_text(lines[0]))

    def _answers(
        self,
        feed: PromptFeed,
        row: int,
        samples: Sequence[Sample],
        environments: Sequence[Any] | None = None,
    ) -> list[Answer]:
        """The completions of one row with all that a reward may want to know."""
        ids, columns = feed.ids(row), feed.columns(row)
        prompt, asked = self.text(ids), feed.asked(row)
        return [
            Answer(
                prompt=prompt,
                completion=self._answer_text(sample),
                completion_ids=sample.token_ids,
                columns=columns if environments is None else {**columns, ENVIRONMENT: environments[number]},
                prompt_ids=ids,
                asked=None if asked is None else prompt_of_row(asked),
            )
            for number, sample in enumerate(samples)
        ]

    def _shared(self, model: RewardJudge, answers: Sequence[Answer]) -> list[float]:
        """The verdicts of a reward model, each rank's on its share."""
        rank, world = self.ranks.rank, self.ranks.world
        parts = self.ranks.gather(model.scores(answers[rank::world]))
        whole = [0.0] * len(answers)
        for number, part in enumerate(parts):
            whole[number::world] = part
        return whole

    def text(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _answer_text(self, sample: Sample) -> str:
        """Text for the rewards: the completion without special tokens."""
        ids = sample.context_ids or sample.token_ids
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def build_reward_scoring(
    plan: Plan, built: Built, ranks: Ranks, print_line: Callable[[str], None]
) -> RewardScoring:
    """The rewards of a plan, loaded.

    Raises: RecipeError when a function is not there; LaunchError when a model is no reward model.
    """
    rewards = plan.recipe.rewards
    assert rewards is not None, "A recipe of this method has rewards."
    keep_surroundings()
    with surrounded():
        functions = load_functions(rewards)
    model_type = str(base_model(built.model).config.model_type)
    models = {
        function.label: load_reward_model(
            function.recipe.model,
            plan.settings,
            model_type=model_type,
            lay=built.spread.lay_frozen,
            ranks=ranks,
        )
        for function in functions
        if function.recipe.model is not None
    }
    path = Path(plan.run_dir).absolute() / COMPLETIONS_FILE
    made = RewardScoring(rewards, functions, models, built.tokenizer, ranks, path, print_line)
    if made.runs_others_code and ranks.is_main:
        watch_interpreter(path.parent)
    keep_surroundings()
    return made


def _known(reward: float) -> float | None:
    return None if np.isnan(reward) else float(reward)
