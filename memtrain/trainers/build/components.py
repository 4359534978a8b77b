"""Components that every rank builds from the plan: tokenizer, model, scorer, optimizer and feeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from memtrain.errors import LaunchError
from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.plan import Plan, PreparedData
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.batches.collate import nothing
from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.build.step import (
    AnyScorer,
    StepParts,
    assemble,
    make_scorer,
    prepare_model,
    share_rows,
)
from memtrain.trainers.data.packing.by_method import held_out_of
from memtrain.trainers.data.sources.splits import choose_rows, epochs_of
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.losses.head.tiles import HALF, sums_half_in_fp32
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.attention.isolation_check import verify_causal, verify_isolation, verify_slices
from memtrain.trainers.model.attention.padding_check import verify_padding
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer, verify_head
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.heads.value_head import ValueScorer
from memtrain.trainers.model.kernels.apply import apply_kernels
from memtrain.trainers.model.loading.adapters import add_adapter, check_new_tokens_learn, continue_adapter
from memtrain.trainers.model.loading.compiled_layers import compile_layers
from memtrain.trainers.model.loading.liger import apply_liger
from memtrain.trainers.model.loading.load import load_model, local_device
from memtrain.trainers.model.loading.save import stop_at
from memtrain.trainers.model.loading.sharded_load import is_empty, made_in_parts
from memtrain.trainers.model.streamed.check import verify_streamed
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.protocols.feed import Feed
from memtrain.trainers.protocols.method import Method, TracksPolicy
from memtrain.trainers.reference.build import build_reference
from memtrain.trainers.reference.reference import EmaReference, FrozenReference
from memtrain.trainers.reference.teacher import build_teacher, give_likely
from memtrain.trainers.runtime.seed import seed_everything
from memtrain.trainers.runtime.weight_layout import WeightLayout

AnyFeed = TypeVar("AnyFeed", bound=Feed)


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of a run on one rank."""

    tokenizer: PreTrainedTokenizerFast
    parts: StepParts
    train: Feed
    eval: Feed | None
    spread: WeightLayout = field(default_factory=WeightLayout)
    """Layout of the weights over the ranks."""
    why_whole: str = ""
    """Reason why each rank loaded the whole model, where the plan had it read its part alone."""

    @property
    def scorer(self) -> AnyScorer:
        """The model with its head."""
        return self.parts.scorer

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank."""
        return self.parts.optimizer

    @property
    def method(self) -> Method:
        """The method with its reference."""
        return self.parts.method

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank's optimizer steps, by name: whole weights, or its rows of them."""
        return self.parts.trained

    @property
    def follower(self) -> TracksPolicy | None:
        """A reference model that follows the policy."""
        return self.parts.follower

    @property
    def reference(self) -> nn.Module | None:
        """A reference model that is asked while the run goes on: a copy, or the policy itself."""
        held = self.parts.reference
        return held.scorer if isinstance(held, FrozenReference | EmaReference) else None

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """The model itself, with its adapter."""
        return self.scorer.model

    @property
    def models(self) -> list[PreTrainedModel | PeftModel]:
        """Every model that is trained: the policy, and a value model of its own."""
        own = self.scorer.own if isinstance(self.scorer, ValueScorer) else None
        return [self.model] if own is None else [self.model, own]

    @property
    def weights(self) -> list[Tensor]:
        """All held weights: the model's, and a reference's."""
        held = [self.scorer] if self.reference is None else [self.scorer, self.reference]
        return [tensor for module in held for tensor in (*module.parameters(), *module.buffers())]

    @property
    def held(self) -> list[Tensor]:
        """All that is held before the first step: the weights, and what is kept of trained ones' float32
        numbers beside them."""
        beside = self.optimizer.held() if isinstance(self.optimizer, MasterWeights) else []
        return [*self.weights, *beside]


def build(plan: Plan, spread: WeightLayout | None = None) -> Built:
    """Build everything, and check on the real model that rows stay apart and that the head is understood.

    `spread` lays the weights over the ranks; without it each is whole here.

    Raises: LaunchError when the model cannot be loaded, adapted, or trusted with these settings.
    """
    recipe, settings = plan.recipe, plan.settings
    _verify_sums(settings)
    tokenizer = tokenizer_of(recipe.model)
    scorer, why_whole = made_in_parts(settings, lambda: build_scorer(plan, vocab_size=len(tokenizer)))
    model = scorer.model
    pad_id = cast(int | None, tokenizer.pad_token_id)
    spread, was_empty = spread or WeightLayout(), is_empty(model)
    if was_empty:
        # Its weights are read when they are cut, and it is checked with them.
        spread.lay(scorer)
        _first_pass(scorer, settings, pad_id if pad_id is not None else 0)
    _verify_scores(scorer, settings)
    _verify_rows(model, plan)
    if settings.slice_tokens:
        verify_streamed(model, AttentionBackend(settings.attention))
    share_rows(scorer, settings)
    if scorer.context is not None:
        verify_slices(model, AttentionBackend(settings.attention), scorer.context)
    if not was_empty:
        spread.lay(scorer)
    trained = spread.trained(scorer)
    module = import_module(METHODS[recipe.method].trainer)
    train, held_out = build_feeds(plan, module.feed, pad_id if pad_id is not None else 0)
    _first_pass(scorer, settings, pad_id if pad_id is not None else 0)
    if settings.teacher == "none":
        reference = build_reference(plan, scorer, module, train, held_out, lay=spread.lay_frozen)
    else:
        reference = build_teacher(plan, scorer, longest_row(plan), lay=_laid_and_passed(plan, spread, pad_id))
        give_likely(recipe, train, held_out)
    parts = assemble(scorer, trained, reference, recipe, settings)
    built = Built(tokenizer, parts, train, held_out, spread, why_whole)
    if settings.compiled:
        # After the checks: each of their passes would be compiled for itself.
        for trained_model in built.models:
            compile_layers(trained_model)
    return built


def _verify_sums(settings: Settings) -> None:
    """Make sure that the GPU's own kernel adds half-precision products in float32.

    The head and its plan hold no float32 copies there. Raises: LaunchError where it does not.
    """
    dtype = getattr(torch, settings.dtype)
    if settings.device != "cuda" or dtype not in HALF or sums_half_in_fp32(local_device(settings), dtype):
        return
    with_half = " with bfloat16" if settings.dtype == "bfloat16" else ""
    raise LaunchError(
        f"this torch does not accumulate {settings.dtype} matrix products in float32 on this GPU, and the "
        "planned loss needs that",
        "model.dtype",
        f"install torch 2.10 or newer for a GPU{with_half}, or set model.dtype: float32",
    )


def _verify_rows(model: PreTrainedModel | PeftModel, plan: Plan) -> None:
    """Check at every relevant length that packed or padded rows compute as they do alone."""
    settings, longest = plan.settings, longest_row(plan)
    if settings.padding_free or settings.context_parallel > 1 or settings.attention != "transformers":
        verify_isolation(
            model,
            AttentionBackend(settings.attention),
            shared_prompts=settings.shared_prompts,
            longest=longest,
            together=settings.micro_tokens or settings.micro_batch_size * longest,
        )
    else:
        verify_padding(model, longest=longest, by_row=settings.positions_by_row)


def longest_row(plan: Plan) -> int:
    """Most tokens of a row of a run: of its data, and of prompts with their completions."""
    recipe, settings = plan.recipe, plan.settings
    splits = [split for split in (plan.data.train, plan.data.eval) if split is not None]
    most = max(split.longest_tokens for split in splits)
    if settings.max_length is not None:
        most = settings.max_length if settings.packing != "none" else min(most, settings.max_length)
    if recipe.taught is not None and recipe.writes_completions:
        return min(
            most + recipe.generation.max_tokens, settings.max_length or most + recipe.generation.max_tokens
        )
    return most + recipe.generation.max_tokens if recipe.online is not None else most


def _laid_and_passed(plan: Plan, spread: WeightLayout, pad_id: int | None) -> Callable[[nn.Module], None]:
    """Lays a teacher over the ranks, and makes its first pass through the scorer itself."""

    def lay(scorer: nn.Module) -> None:
        spread.lay_frozen(scorer)
        _first_pass(cast(Scorer, scorer), plan.settings, pad_id if pad_id is not None else 0)

    return lay


def _first_pass(scorer: AnyScorer, settings: Settings, pad_id: int) -> None:
    """Make an empty pass through the scorer itself, with all ranks: FSDP2 takes the module of the first pass
    for the outermost one, and completions are written by a module inside."""
    if not is_sharded(settings):
        return
    multiple = settings.pad_to_multiple_of
    micro_batch = nothing(pad_id=pad_id, is_flat=settings.padding_free, multiple=multiple)
    micro_batch = micro_batch.to(local_device(settings))
    with torch.no_grad():
        if isinstance(scorer, Scorer):
            scorer(micro_batch.model_inputs(), micro_batch.scored_index, LogprobRequest(micro_batch.targets))
        else:
            scorer(micro_batch.model_inputs(), micro_batch.scored_index)


def build_scorer(plan: Plan, *, vocab_size: int) -> AnyScorer:
    """Scorer of tokens, or of answers, with the model of a plan."""
    model = build_model(plan, vocab_size=vocab_size)
    return make_scorer(model, _own_value(plan, model), plan.recipe, plan.settings)


def _verify_scores(scorer: AnyScorer, settings: Settings) -> None:
    """The model is causal, and is scored as by its own logits."""
    model, is_stock = scorer.model, settings.attention == "transformers"
    if is_stock:
        verify_causal(model)
    with attention_switched(base_model(model), "eager"):
        if not is_stock:
            verify_causal(model)
        if not isinstance(scorer, RewardScorer):
            verify_head(scorer)


def _own_value(plan: Plan, model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel | None:
    """A value model of its own, which begins as the policy does; None where the policy's trunk is shared."""
    if plan.settings.value != "own":
        return None
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "A causal LM looks its tokens up in an embedding."
    added = plan.recipe.model.add_tokens
    count = len(tokenizer_of(plan.recipe.model)) if added else embedding.num_embeddings
    return build_model(plan, vocab_size=count, head="score")


def build_model(plan: Plan, *, vocab_size: int, head: str | None = None) -> PreTrainedModel | PeftModel:
    """The model with its kernels, adapter, checkpointing, offloading and noise, as the plan says.

    It ends in the method's head, or in `head`.
    """
    recipe, settings = plan.recipe, plan.settings
    head = head or METHODS[recipe.method].head
    seed_everything(recipe.train.seed, "model")
    model: PreTrainedModel | PeftModel = load_model(
        recipe.model,
        settings,
        seed=recipe.train.seed,
        vocab_size=vocab_size,
        head=head,
    )
    if plan.data.turn_end is not None:
        stop_at(model, plan.data.turn_end.token_id)
    apply_liger(model, settings)
    apply_kernels(model, settings)
    if settings.adapter is not None:
        model = add_adapter(model, settings.adapter, quantize=settings.quantize, head=head)
        if settings.adapter.path is not None:
            continue_adapter(model, Path(settings.adapter.path))
        if recipe.model.add_tokens:
            check_new_tokens_learn(model)
    prepare_model(model, recipe, settings)
    return model


def has_dropout(model: nn.Module) -> bool:
    """Whether anything is dropped in training."""
    config = base_model(model).config
    return bool(getattr(config, "attention_dropout", 0)) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
    )


def build_feeds(plan: Plan, make_feed: Callable[[SplitRows], Feed], pad_id: int) -> tuple[Feed, Feed | None]:
    """(training rows, held-out rows or None) as feeds of the method."""
    return feeds_of(plan.recipe, plan.data, plan.settings, make_feed, pad_id)


def feeds_of(
    recipe: Recipe,
    data: PreparedData,
    settings: Settings,
    make_feed: Callable[[SplitRows], AnyFeed],
    pad_id: int,
) -> tuple[AnyFeed, AnyFeed | None]:
    """The same of data laid out under some settings."""
    store = TokenStore.open(data.train.folder)
    chosen = choose_rows(recipe.data, store, recipe.train.seed, epochs_of(recipe.train))
    num_generations = 1 if recipe.online is None else recipe.generation.num_generations
    split = SplitRows(store, chosen.train, settings, pad_id, chosen.later, num_generations)
    train = make_feed(split)
    held = held_out_of(recipe, data, store, chosen)
    if held is None:
        return train, None
    first, *others = held.sets
    return train, make_feed(replace(split, store=held.store, rows=first, later=tuple(others), are_sets=True))
