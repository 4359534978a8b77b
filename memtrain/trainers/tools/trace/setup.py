"""Parts of a step around the model, put together as a run puts them (see build.py and worker.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from peft import PeftModel
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.reference_model import section_of
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.build.balanced import balanced
from memtrain.trainers.distributed.context_parallel import shared
from memtrain.trainers.model.context_parallel.groups import make_context
from memtrain.trainers.model.heads.build import loss_form, scorer_of
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.heads.value_head import ValueScorer
from memtrain.trainers.model.loading.neftune import add_noise
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.optim.loss_scaling import summed_wide
from memtrain.trainers.optim.step import DistributedStep
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.protocols.method import Method, TracksPolicy
from memtrain.trainers.reference.reference import (
    EmaReference,
    FrozenReference,
    Precomputed,
    Reference,
    without_adapter,
)
from memtrain.trainers.tools.trace.fake_host import TracedHost
from memtrain.trainers.tools.trace.fake_ranks import engine_of_ranks, lay_frozen, lay_out
from memtrain.trainers.tools.trace.fake_zero import begin_playing_zero

Model = PreTrainedModel | PeftModel


@dataclass(frozen=True, slots=True)
class Stage:
    """Parts that a step needs."""

    scorer: Scorer | RewardScorer
    method: Method
    optimizer: Optimizer
    recipe: Recipe
    settings: Settings
    micros: Sequence[Any]
    engine: DistributedStep
    reference: Reference | None
    offloaders: tuple[Offloader, ...]
    parameters: list[nn.Parameter]
    """Parameters that this rank's optimizer steps."""

    @property
    def follower(self) -> TracksPolicy | None:
        """A reference that follows the weights."""
        return self.reference if isinstance(self.reference, TracksPolicy) else None


def build_step(
    model: Model,
    copy: Model | None,
    recipe: Recipe,
    settings: Settings,
    micros: Sequence[Any],
    *,
    own: Model | None = None,
    is_fake: bool,
) -> Stage:
    """Scorer, reference, method, optimizer and engine around `model`.

    `copy`: the same model a second time, without an adapter, where the settings hold a reference beside the
    policy. `own`: a value model beside it. `is_fake`: the tensors have no data, and those of a CUDA run's
    host are played by others.
    """
    plays_host = is_fake and settings.device == "cuda"
    offloaders: list[Offloader] = []
    for one in (model, own):
        if one is None:
            continue
        offloader = apply_checkpointing_and_offload(
            one, settings, TracedHost() if plays_host else None
        ).offloader
        offloaders += [] if offloader is None else [offloader]
        if recipe.optim.neftune_alpha is not None:
            add_noise(one, recipe.optim.neftune_alpha)
    scorer = scorer_of(model, METHODS[recipe.method].head, settings)
    if settings.value != "none":
        scorer = ValueScorer(model, own, **loss_form(settings))
    scorer.context = make_context(settings.context_parallel, by_heads=settings.context_by == "ulysses")
    trained = lay_out(scorer, settings)
    reference = reference_of(scorer, copy, recipe, settings)
    module = module_of(recipe)
    method = shared(module.method(recipe, reference), settings.context_parallel)
    method = balanced(method, scorer, settings)
    optimizer = build_optimizer(scorer, recipe.optim, settings, trained)
    return Stage(
        scorer=scorer,
        method=method,
        optimizer=optimizer,
        recipe=recipe,
        settings=settings,
        micros=micros,
        engine=_engine(optimizer, scorer, trained, recipe, settings),
        parameters=trained,
        reference=reference,
        offloaders=tuple(offloaders),
    )


def module_of(recipe: Recipe) -> ModuleType:
    """The module of a recipe's method."""
    return import_module(METHODS[recipe.method].trainer)


def reference_of(
    scorer: nn.Module, copy: Model | None, recipe: Recipe, settings: Settings
) -> Reference | None:
    """Counterpart of build_reference, with nothing loaded and nothing computed before."""
    kind = settings.reference
    if kind == "none":
        return None
    if kind == "precomputed":
        return Precomputed()
    if kind == "adapter_off":
        model: Any = scorer.model
        return without_adapter(scorer, model)
    assert copy is not None, "These settings hold a reference beside the policy."
    copy.requires_grad_(False).eval()
    stream_layers(copy, settings.slice_tokens)
    held = scorer_of(copy, "lm", settings).eval()
    cast(Any, held).context = cast(Any, scorer).context
    lay_frozen(held, settings)
    if kind == "copy":
        return FrozenReference(held)
    section = section_of(recipe)
    assert section is not None, "A method with a reference has a section for it."
    return EmaReference(held, scorer, every_steps=section.reference_sync_steps, mixup=section.reference_mixup)


def _engine(
    optimizer: Optimizer,
    scorer: nn.Module,
    trained: list[nn.Parameter],
    recipe: Recipe,
    settings: Settings,
) -> DistributedStep:
    if isinstance(optimizer, ZeroOptimizer):
        return begin_playing_zero(scorer, optimizer, settings, recipe.optim.max_grad_norm)
    if not settings.in_backward:
        engine = engine_of_ranks(scorer, trained, settings)
        return replace(engine, begin=summed_wide(engine)) if settings.dtype == "float16" else engine
    return InBackward(optimizer, trained).engine()
