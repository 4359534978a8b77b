"""Completions that share a prompt: most tokens of a micro-batch that computes the prompt once."""

from __future__ import annotations

from collections.abc import Sequence

from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.base import Section


class PromptGroups(Section):
    """The completions of a prompt, which stand next to each other in a step."""

    written: int
    """Completions that are written for a prompt."""
    learned: int
    """Completions of them that a step learns from: all, or a pair."""
    own_tokens: int
    """Most tokens of a completion beside its prompt."""
    is_shared: bool
    """The prompt is computed once for the completions of a micro-batch."""

    def most_rows(self, written: int) -> int:
        """Completions that are learned from, of so many written ones."""
        return -(-written // self.written) * self.learned

    def most_prompts(self, rows: int) -> int:
        """Prompts of `rows` completions next to each other, in a step that is dealt out from its first one.

        A micro-batch begins with a group unless groups are divided, which they are where neither number
        divides the other.
        """
        if rows % self.learned == 0 or self.learned % rows == 0:
            return max(1, rows // self.learned)
        return 1 + -(-(rows - 1) // self.learned)

    def most_tokens(self, prompts: Sequence[int], rows: int) -> int:
        """A bound on the tokens of `rows` completions next to each other whose prompt is shared.

        `prompts`: tokens of the longest prompts, longest first; those beyond are taken to be like the last.
        """
        count = self.most_prompts(rows)
        taken = prompts[:count]
        return sum(taken) + (count - len(taken)) * taken[-1] + rows * self.own_tokens


def prompt_groups(recipe: Recipe, *, is_shared: bool) -> PromptGroups:
    """The groups of a method that writes completions."""
    written = recipe.generation.num_generations
    return PromptGroups(
        written=written,
        learned=2 if METHODS[recipe.method].in_pairs else written,
        own_tokens=recipe.generation.max_tokens,
        is_shared=is_shared,
    )
