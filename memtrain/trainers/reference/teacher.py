"""The teacher of a run as planned: a frozen model beside the student, or the student itself at rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from peft import PeftModel
from torch import nn

from memtrain.memory.plan.models_beside import teacher_settings
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.taught_batches import TaughtFeed
from memtrain.trainers.data.store.top_k import TopKFile
from memtrain.trainers.data.tokenize.teacher_vocabulary import teacher_model
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.attention.isolation_check import verify_causal, verify_isolation
from memtrain.trainers.model.attention.padding_check import verify_padding
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer, verify_head
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.loading.sharded_load import made_in_parts
from memtrain.trainers.protocols.feed import Feed
from memtrain.trainers.reference.build import frozen_scorer
from memtrain.trainers.reference.reference import FrozenReference, without_adapter

SEED = 1
"""Added to the run's seed where a teacher's weights are drawn: a student with the same weights would learn
nothing."""


def build_teacher(
    plan: Plan,
    scorer: nn.Module,
    longest: int,
    *,
    lay: Callable[[nn.Module], None] = lambda scorer: None,
) -> FrozenReference | None:
    """The teacher that the loss asks; None where its likeliest tokens come with the rows.

    `lay` lays the weights of a model of its own over the ranks.

    Raises: LaunchError when it cannot be loaded, or trusted with rows that lie as these do.
    """
    recipe, settings = plan.recipe, plan.settings

    def held() -> nn.Module:
        own = teacher_settings(settings, teacher_model(recipe).dtype)
        return scorer_of_teacher(recipe, own, longest, lay=lay)

    return make_teacher(scorer, settings, held)


def make_teacher(
    scorer: nn.Module, settings: Settings, held: Callable[[], nn.Module]
) -> FrozenReference | None:
    """The teacher that the settings name; `held`: the scorer of a model of its own."""
    if settings.teacher == "adapter_off":
        return without_adapter(scorer, cast(PeftModel, cast(Any, scorer).model))
    return FrozenReference(held()) if settings.teacher == "model" else None


def give_likely(recipe: Recipe, *feeds: Feed | None) -> None:
    """Give the feeds the file of a teacher's likeliest tokens, where the recipe names one.

    Raises: DataError where it lacks a piece of their rows.
    """
    section = recipe.taught
    if section is None or section.top_k_file is None:
        return
    file = TopKFile(Path(section.top_k_file).expanduser())
    for feed in feeds:
        if feed is not None:
            taught = cast(TaughtFeed, feed)
            taught.likely = file
            taught.check_file()


def scorer_of_teacher(
    recipe: Recipe,
    own: Settings,
    longest: int,
    *,
    lay: Callable[[nn.Module], None] = lambda scorer: None,
) -> nn.Module:
    """The frozen scorer of the recipe's teacher under settings of its own, checked as the student is.

    Raises: LaunchError when it cannot be loaded, or trusted with rows that lie as these do.
    """
    section = teacher_model(recipe)
    # Its tokenizer is the student's: make_plan compared them.
    count = len(tokenizer_of(section))
    scorer, _ = made_in_parts(
        own,
        lambda: frozen_scorer(load_model(section, own, seed=recipe.train.seed + SEED, vocab_size=count), own),
    )
    lay(scorer)
    _verify(scorer, own, longest)
    return scorer


def _verify(scorer: nn.Module, settings: Settings, longest: int) -> None:
    model = cast(Scorer, scorer).model
    is_stock = settings.attention == "transformers"
    if is_stock:
        verify_causal(model)
    with attention_switched(base_model(model), "eager"):
        if not is_stock:
            verify_causal(model)
        verify_head(cast(Scorer, scorer))
    if settings.padding_free or not is_stock:
        together = settings.micro_tokens or settings.micro_batch_size * longest
        backend = AttentionBackend(settings.attention)
        verify_isolation(model, backend, shared_prompts=False, longest=longest, together=together)
    else:
        verify_padding(model, longest=longest, by_row=settings.positions_by_row)
