"""The step of a run around a model, put together as the run puts it together (build/step.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memtrain.memory.plan.models_beside import teacher_settings
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.build.engine import begin
from memtrain.trainers.build.step import (
    AnyScorer,
    Model,
    OptimizerStep,
    assemble,
    make_scorer,
    prepare_model,
    share_rows,
)
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.optim.loss_scaling import summed_wide
from memtrain.trainers.protocols.method import Method
from memtrain.trainers.reference.build import frozen_scorer, make_reference
from memtrain.trainers.reference.reference import Reference
from memtrain.trainers.reference.teacher import make_teacher
from memtrain.trainers.tools.trace.fake_host import TracedHost
from memtrain.trainers.tools.trace.fake_ranks import layout_without_data
from memtrain.trainers.tools.trace.fake_zero import as_fake_zero_settings


@dataclass(frozen=True, slots=True)
class StepSetup:
    """Parts of a traced step."""

    scorer: AnyScorer
    step: OptimizerStep
    recipe: Recipe
    settings: Settings
    micro_batches: Sequence[Any]
    reference: Reference | None
    offloaders: tuple[Offloader, ...]

    @property
    def method(self) -> Method:
        """The method with its reference."""
        return self.step.method

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank."""
        return self.step.optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that this rank's optimizer steps."""
        return list(self.step.parameters)


def build_step(
    model: Model,
    copy: Model | None,
    recipe: Recipe,
    settings: Settings,
    micro_batches: Sequence[Any],
    *,
    own: Model | None = None,
    is_fake: bool,
) -> StepSetup:
    """Scorer, reference, method, optimizer and engine around `model`.

    `copy`: the same model a second time, without an adapter, where the settings hold a reference beside the
    policy. `own`: a value model beside it. `is_fake`: the tensors have no data, and those of a CUDA run's
    host are played by others.
    """
    plays_host = is_fake and settings.device == "cuda"
    models = [one for one in (model, own) if one is not None]
    moving = [prepare_model(one, recipe, settings, TracedHost() if plays_host else None) for one in models]
    scorer = make_scorer(model, own, recipe, settings)
    share_rows(scorer, settings)
    layout = layout_without_data(settings)
    layout.lay(scorer)
    trained = layout.trained(scorer)

    def held() -> nn.Module:
        assert copy is not None, "These settings hold a reference beside the policy."
        taught = recipe.taught
        own = settings if taught is None else teacher_settings(settings, taught.teacher_dtype)
        return frozen_scorer(copy, own, TracedHost() if plays_host else None)

    def laid() -> nn.Module:
        teacher = held()
        layout.lay_frozen(teacher)
        return teacher

    if settings.teacher == "none":
        reference = make_reference(
            scorer, recipe, settings, copy=held, precompute=lambda reference: None, lay=layout.lay_frozen
        )
    else:
        reference = make_teacher(scorer, settings, laid)
    parts = assemble(scorer, trained, reference, recipe, settings)
    with as_fake_zero_settings(settings, recipe.optim.max_grad_norm) as played:
        # Scales depend on data; the sums that they need are made all the same.
        step = begin(parts, recipe, played, lambda engine: replace(engine, begin=summed_wide(engine)))
    return StepSetup(
        scorer=scorer,
        step=step,
        recipe=recipe,
        settings=settings,
        micro_batches=micro_batches,
        reference=reference,
        offloaders=tuple(one for one in moving if one is not None),
    )
