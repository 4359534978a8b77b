"""The reference of a run, as the plan says: loaded, switched, or asked once and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.data.store.cache import cache_dir
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.model.heads.build import scorer_of
from memtrain.trainers.model.kernels.apply import apply_kernels
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.liger import apply_liger
from memtrain.trainers.model.loading.load import load_model, local_device
from memtrain.trainers.model.loading.sharded_load import made_in_parts
from memtrain.trainers.model.offload.copy_engines import CopyEngine
from memtrain.trainers.model.offload.weights import weights_on_host
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.protocols.feed import Feed, Steps, eval_orders
from memtrain.trainers.reference.precompute import Floats, Question, asked_once
from memtrain.trainers.reference.reference import (
    EmaReference,
    FrozenReference,
    Precomputed,
    Reference,
    at_its_start,
    without_adapter,
)
from memtrain.trainers.runtime.ranks import current_ranks


def build_reference(
    plan: Plan,
    scorer: nn.Module,
    method: ModuleType,
    train: Feed,
    held_out: Feed | None,
    lay: Callable[[nn.Module], None] = lambda scorer: None,
) -> Reference | None:
    """Reference that the policy is compared with; None for methods and losses without a reference.

    Called before a checkpoint is restored: the policy's weights are the reference's then. With
    `precomputed`, all ranks compute together, and the feeds hold the numbers afterwards. `lay` lays the
    weights of a copy over the ranks.
    """
    return make_reference(
        scorer,
        plan.recipe,
        plan.settings,
        copy=lambda: _copy(plan, scorer),
        precompute=lambda reference: _precompute(plan, reference, method, train, held_out),
        lay=lay,
    )


def make_reference(
    scorer: nn.Module,
    recipe: Recipe,
    settings: Settings,
    *,
    copy: Callable[[], nn.Module],
    precompute: Callable[[FrozenReference], None],
    lay: Callable[[nn.Module], None],
) -> Reference | None:
    """The reference that the settings name, from a frozen `copy` or the policy at rest.

    `precompute` asks the policy at rest for every answer, where no reference is there afterwards.
    """
    kind = settings.reference
    if kind == "none":
        return None
    if kind == "adapter_off":
        return _policy_at_rest(scorer)
    if kind == "adapter_start":
        return at_its_start(scorer)
    if kind == "precomputed":
        precompute(FrozenReference(scorer) if _continued(settings) else _policy_at_rest(scorer))
        return Precomputed()
    held = copy()
    cast(Any, held).context = cast(Any, scorer).context
    lay(held)
    if kind == "copy":
        return FrozenReference(held)
    section = recipe.near_reference
    assert section is not None, "A method with a reference has a section for it."
    return EmaReference(held, scorer, every_steps=section.reference_sync_steps, mixup=section.reference_mixup)


def frozen_scorer(
    model: PreTrainedModel | PeftModel, settings: Settings, copies: CopyEngine | None = None
) -> nn.Module:
    """A scorer of tokens around a model that is only asked; `copies`: how its weights come from the host."""
    model.requires_grad_(False)
    weights = weights_on_host(model, settings.model_copy(update={"adapter": None}), copies)
    stream_layers(model, settings.slice_tokens, weights=weights)
    return scorer_of(model.requires_grad_(False).eval(), "lm", settings).eval()


def _continued(settings: Settings) -> str | None:
    """Folder of the adapter that the run goes on from."""
    return settings.adapter.path if settings.adapter is not None else None


def _policy_at_rest(scorer: nn.Module) -> FrozenReference:
    """The policy without its adapter, where it has one."""
    model = cast(Any, scorer).model
    return without_adapter(scorer, model) if isinstance(model, PeftModel) else FrozenReference(scorer)


def _copy(plan: Plan, scorer: nn.Module) -> nn.Module:
    """The model's weights a second time, frozen: without an adapter, or with the one that is continued."""
    recipe, settings = plan.recipe, plan.settings
    rows = cast(Any, scorer).model.get_input_embeddings().num_embeddings
    # Added tokens have their rows behind the tokenizer's own; other models need only enough of them.
    count = len(tokenizer_of(recipe.model)) if recipe.model.add_tokens else rows

    def made() -> nn.Module:
        model = load_model(recipe.model, settings, seed=recipe.train.seed, vocab_size=count)
        apply_liger(model, settings)
        apply_kernels(model, settings)
        start = _continued(settings)
        return frozen_scorer(load_adapter(model, start) if start else model, settings)

    # Of the policy's own weights, an adapter that needs whole ones or DeepSpeed asks otherwise.
    in_parts = settings.model_copy(update={"loads_shards": shards_weights(settings)})
    return made_in_parts(in_parts, made)[0]


def _precompute(
    plan: Plan, reference: FrozenReference, method: ModuleType, train: Feed, held_out: Feed | None
) -> None:
    """Ask the reference for every answer of the steps to come, and of the held-out rows."""

    def answered(question: Question) -> Floats:
        kept_by = question.made_of | {"asked": method.changes_answers(plan.recipe)}
        return asked_once(
            replace(question, made_of=kept_by),
            reference,
            method.ask(plan.recipe),
            settings=plan.settings,
            ranks=current_ranks(plan.settings.context_parallel),
            device=local_device(plan.settings),
            folder=cache_dir(plan.recipe.data.cache_dir),
        )

    steps = Steps(train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle)
    coming = [steps.work(step, rank=0, num_ranks=1).sequences for step in range(plan.settings.max_steps)]
    method.precompute(cast(AnswerFeed, train), coming, answered)
    if held_out is not None:
        method.precompute(cast(AnswerFeed, held_out), eval_orders(held_out), answered)
