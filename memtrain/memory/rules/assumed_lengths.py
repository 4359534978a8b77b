"""The length profile of data that was not read: every sequence is as long as the recipe lets it be."""

from __future__ import annotations

from memtrain.errors import RecipeError
from memtrain.memory.estimate.pricing import CountSteps
from memtrain.memory.plan.length_profile import NUM_LONGEST, LengthProfile, LengthReport
from memtrain.memory.plan.prompt_groups import prompt_groups
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS

PROMPT = 512
"""Tokens of a prompt where neither rows nor keys say its length: what TRL and verl cut prompts to, long."""


def assumed_length(recipe: Recipe) -> int | None:
    """The longest row that the recipe lets be; of prompts that nothing cuts, one of 512 tokens with its
    completion."""
    if recipe.length.max_length is None and recipe.online is not None:
        return (recipe.length.max_prompt or PROMPT) + recipe.generation.max_tokens
    return recipe.length.max_length


def assumed_profile(asked: SourcedRecipe, *, shares_prompts: bool) -> LengthProfile:
    """Sequences of `assumed_length` tokens, many of them.

    Rows with answers: each answer is as long as may be, with a prompt of `length.max_prompt` tokens (none
    where that is not given: no real row is heavier).

    Raises: RecipeError where `length.max_length` sets no limit.
    """
    recipe = asked.recipe
    longest = assumed_length(recipe)
    if longest is None:
        raise RecipeError(
            "length.max_length is null, and the data is not read: the length of the rows is unknown",
            asked.place("length.max_length"),
            "set length.max_length, or plan with the data (without --without-data)",
        )
    tokens, answers = _tokens(recipe, longest, shares_prompts=shares_prompts)
    report = LengthReport(
        num_rows=NUM_LONGEST,
        num_tokens=NUM_LONGEST * tokens,
        num_loss_tokens=NUM_LONGEST * tokens,
        rows_cut=0,
        rows_dropped=0,
        rows_split=0,
        pieces=NUM_LONGEST,
        tokens_cut=0,
        tokens_dropped=0,
        tokens_idle=0,
        loss_tokens_cut=0,
        loss_tokens_dropped=0,
        num_sequences=NUM_LONGEST,
        fill=1.0,
    )
    return LengthProfile(
        report=report,
        total_tokens=NUM_LONGEST * tokens,
        longest=(tokens,) * NUM_LONGEST,
        longest_piece=longest,
        most_loss_tokens=(recipe.generation.max_tokens,) * NUM_LONGEST if recipe.online is not None else (),
        rows_per_sequence=answers,
        groups=None if recipe.online is None else prompt_groups(recipe, is_shared=shares_prompts),
        most_pieces=(answers + shares_prompts,) * NUM_LONGEST if METHODS[recipe.method].num_answers else (),
    )


def _tokens(recipe: Recipe, longest: int, *, shares_prompts: bool) -> tuple[int, int]:
    """(tokens of a sequence, answers in it)."""
    answers = METHODS[recipe.method].num_answers
    if not answers:
        return longest, 1
    prompt = min(recipe.length.max_prompt or 0, longest - 1)
    answer = min(longest - prompt, recipe.length.max_completion or longest)
    return (prompt if shares_prompts else answers * prompt) + answers * answer, answers


def assumed_counter(recipe: Recipe, profile: LengthProfile) -> CountSteps:
    """Steps over as many rows as the profile has: a number to plan with, not one to show."""

    def count(rows: int | None, tokens: int | None, epochs: float) -> int:
        per_step = rows if rows is not None else max(1, int((tokens or 1) / profile.mean_tokens))
        return max(1, int(epochs * profile.report.num_sequences / per_step))

    return count
