"""The training step, assembled once: for runs, for measurements, and for traces without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.build.balanced import balanced
from memtrain.trainers.build.expert_load import with_expert_load
from memtrain.trainers.distributed.context_parallel import shared
from memtrain.trainers.model.context_parallel.groups import make_context
from memtrain.trainers.model.experts.router_replay import RouterReplay
from memtrain.trainers.model.heads.build import loss_form, scorer_of
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.heads.value_head import ValueScorer
from memtrain.trainers.model.loading.neftune import add_noise
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import CopyEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.step import DistributedStep, forward_backward, update
from memtrain.trainers.protocols.method import BeforeStep, Method, StepPreview, TracksPolicy
from memtrain.trainers.reference.reference import Reference

Model = PreTrainedModel | PeftModel
AnyScorer = Scorer | RewardScorer


@dataclass(frozen=True, slots=True)
class StepParts:
    """Parts of a step that fit each other; a checkpoint may still be restored into them."""

    scorer: AnyScorer
    method: Method
    optimizer: Optimizer
    trained: dict[str, nn.Parameter]
    """Parameters that this rank's optimizer steps, by name: whole weights, or its rows of them."""
    reference: Reference | None

    @property
    def follower(self) -> TracksPolicy | None:
        """A reference model that follows the policy."""
        return self.reference if isinstance(self.reference, TracksPolicy) else None


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Optimizer step of a rank: its gradients, then the update and what follows the weights."""

    model: nn.Module
    """The scorer, laid over the ranks."""
    method: Method
    optimizer: Optimizer
    parameters: list[nn.Parameter]
    """Parameters that the optimizer steps."""
    engine: DistributedStep
    max_grad_norm: float | None
    follower: TracksPolicy | None = None

    def before_step(self, ahead: StepPreview) -> None:
        """Show the coming sequences to a method whose losses depend on all of them."""
        if isinstance(self.method, BeforeStep):
            self.method.before_step(self.model, ahead)

    def gradients(
        self,
        micro_batches: Iterable[Any],
        *,
        denominator: float,
        num_micro_batches: int,
        want_stats: bool,
        seed_micro_batch: Callable[[int], None] = lambda index: None,
    ) -> dict[str, Tensor]:
        """Gradients of this rank's micro-batches; its sums, with `loss`. `engine.finish` makes them whole."""
        return forward_backward(
            self.model,
            self.method,
            micro_batches,
            denominator=denominator,
            engine=self.engine,
            num_micro_batches=num_micro_batches,
            want_stats=want_stats,
            seed_micro_batch=seed_micro_batch,
        )

    def update(self, *, lr: float, num_steps: int) -> Tensor:
        """Step the weights and what follows them; the norm before clipping. `num_steps`: with this one."""
        norm = update(
            self.optimizer, self.parameters, lr=lr, max_grad_norm=self.max_grad_norm, engine=self.engine
        )
        if self.follower is not None:
            self.follower.stepped(num_steps)
        return norm


def prepare_model(
    model: Model, recipe: Recipe, settings: Settings, copies: CopyEngine | None = None
) -> Offloader | None:
    """Checkpointing, offloading and noise, as the plan says; the mover of activations, where there is one.

    `copies`: how it copies, if not as the device does.
    """
    offloader = apply_checkpointing_and_offload(model, settings, copies).offloader
    if recipe.optim.neftune_alpha is not None:
        add_noise(model, recipe.optim.neftune_alpha)
    return offloader


def make_scorer(model: Model, own: Model | None, recipe: Recipe, settings: Settings) -> AnyScorer:
    """The scorer of a method around its model; `own`: a value model beside it."""
    if settings.value != "none":
        made: AnyScorer = ValueScorer(model, own, **loss_form(settings))
    else:
        made = scorer_of(model, METHODS[recipe.method].head, settings)
    if settings.router_replay and isinstance(made, Scorer):
        made.replay = RouterReplay(model)
    return made


def share_rows(scorer: AnyScorer, settings: Settings) -> None:
    """Let the ranks that hold each row together answer together."""
    scorer.context = make_context(settings.context_parallel, by_heads=settings.context_by == "ulysses")


def assemble(
    scorer: AnyScorer,
    trained: dict[str, nn.Parameter],
    reference: Reference | None,
    recipe: Recipe,
    settings: Settings,
) -> StepParts:
    """The method with its optimizer around a scorer that lies over the ranks."""
    module = import_module(METHODS[recipe.method].trainer)
    weights = list(trained.values())
    optimizer = build_optimizer(scorer, recipe.optim, settings, weights, seed=recipe.train.seed)
    method = shared(module.method(recipe, reference), settings.context_parallel)
    is_sliced = settings.context_parallel > 1
    method = with_expert_load(balanced(method, scorer, settings), scorer, is_sliced=is_sliced)
    return StepParts(scorer, method, optimizer, trained, reference)
