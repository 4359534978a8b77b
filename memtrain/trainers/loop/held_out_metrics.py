"""Metrics of `eval.metrics`: what the model writes for prompts of held-out rows, read by functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.evaluation import SET_MARK, Metrics
from memtrain.trainers.data.store.held_out_prompts import COLUMNS, HeldOutPrompt, held_out_prompts
from memtrain.trainers.loop.sampling import Writer
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.functions import Function, check_columns, load_functions
from memtrain.trainers.online.rewards.interpreter_watch import watch_interpreter
from memtrain.trainers.online.rewards.score import score
from memtrain.trainers.runtime.ranks import Ranks

OF_REWARDS = "rewards/"
"""Before the name of a function's mean in the metrics of `score`."""


@dataclass(frozen=True, slots=True)
class HeldOutMetrics:
    """Functions, and the held-out prompts that they are asked about. Called by all ranks together."""

    asked: Metrics
    functions: tuple[Function, ...]
    sets: tuple[tuple[HeldOutPrompt, ...], ...]
    names: tuple[str, ...]
    """Names of the evaluation sets; none where they have none."""
    writer: Writer
    ranks: Ranks

    def measure(self) -> dict[str, float]:
        """Mean of each function over all prompts, and over those of each set; the same on every rank.

        Raises: DataError when a function fails, unless the recipe says otherwise.
        """
        prompts = [prompt for of_set in self.sets for prompt in of_set]
        written = self.writer.write(
            [prompt.ids for prompt in prompts],
            max_tokens=self.asked.max_tokens,
            temperature=self.asked.temperature,
            name="metrics",
        )
        answers = [
            self._answer(prompt, self.writer.text(sample), sample.token_ids)
            for prompt, sample in zip(prompts, written, strict=True)
        ]

        def ask() -> dict[str, float]:
            means = self._means(answers)
            first = 0
            for name, of_set in zip(self.names, self.sets, strict=False):
                part = self._means(answers[first : first + len(of_set)])
                means |= {f"{name}{SET_MARK}{metric}": value for metric, value in part.items()}
                first += len(of_set)
            return means

        return self.ranks.broadcast(ask() if self.ranks.is_main else {})

    def _means(self, answers: Sequence[Answer]) -> dict[str, float]:
        made = score(answers, self.functions, self.asked)
        return {name.removeprefix(OF_REWARDS): value for name, value in made.metrics.items()}

    def _answer(self, prompt: HeldOutPrompt, completion: str, ids: tuple[int, ...]) -> Answer:
        tokenizer = self.writer.built.tokenizer
        reference = str(tokenizer.decode(list(prompt.answer_ids), skip_special_tokens=True))
        return Answer(
            prompt=str(tokenizer.decode(list(prompt.ids), skip_special_tokens=False)),
            completion=completion,
            completion_ids=ids,
            columns=dict.fromkeys(COLUMNS, reference),
            prompt_ids=prompt.ids,
        )


def open_metrics(plan: Plan, writer: Writer | None, ranks: Ranks) -> Callable[[], dict[str, float]] | None:
    """Measures the metrics of a recipe; None where it asks for none.

    Raises: RecipeError when a function is not there, or takes what it is not given.
    """
    asked = plan.recipe.eval.metrics
    if asked is None:
        return None
    assert writer is not None, "Whoever asks for metrics has completions written."
    functions = load_functions(asked)
    check_columns(dict(enumerate(functions)), COLUMNS, asked)
    if ranks.is_main and not all(one.is_builtin for one in functions):
        watch_interpreter(Path(plan.run_dir).absolute())
    prompts = held_out_prompts(plan.recipe, plan.data)
    return HeldOutMetrics(asked, functions, prompts, plan.recipe.data.eval_sets, writer, ranks).measure
