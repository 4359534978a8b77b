"""Rewards of a trained reward model for the answers of a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.data.packing.step_order import micro_batches
from memtrain.trainers.data.store.prepare import kept_rows
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.model.attention.isolation_check import verify_isolation
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.layers_of_files import read_layers_when_called, without_data
from memtrain.trainers.model.loading.load import load_model, local_device
from memtrain.trainers.model.loading.sharded_init import Kept, NeedsWhole

SCORE = "score"
"""The name under which `METHOD_FORMATS` lists the formats to score: pairs, and single answers."""


def rewards_of(
    recipe: Recipe,
    settings: Settings,
    adapter: str | None = None,
    *,
    emit: Callable[[str], object] = lambda note: None,
) -> Iterator[dict[str, object]]:
    """A line for each row of `data.train`, in its order: where it is from, and a reward for each answer.

    `adapter`: folder or hub id of an adapter of a reward model, whose base is `recipe.model`. `emit` is given
    what of the data was not read or has no effect.
    Pairs give `chosen` and `rejected`, single answers `reward`. Rows that are left out (longer than
    `length.max_length` under `drop`) give no line.
    Raises: DataError for rows without answers; LaunchError when the model is no reward model.
    """
    tokenizer = tokenizer_of(recipe.model)
    made = kept_rows(recipe.data, recipe.data.train, SCORE, tokenizer, recipe.train.seed)
    for note in made.notes:
        emit(note)
    store = made.store
    rows = SplitRows(store, np.arange(store.num_rows), settings, _pad_id(tokenizer))
    feed = AnswerFeed(rows)
    scorer = _scorer(recipe, settings, len(tokenizer), adapter, emit)
    order = np.argsort(-feed.tokens, kind="stable")
    dealt = micro_batches(
        order,
        feed.tokens,
        num_ranks=1,
        micro_batch_size=settings.micro_batch_size,
        micro_tokens=settings.micro_tokens,
    )
    rewards_IK = np.full((feed.num_items, feed.sequences.num_answers), np.nan, np.float32)
    device = local_device(settings)
    with torch.no_grad():
        for sequences in dealt[0]:
            batch = feed.micro_batch(sequences).to(device)
            reward_A = scorer(batch.micro_batch.model_inputs(), batch.last_A)
            items = feed.items_of(sequences)
            rewards_IK[items] = reward_A.cpu().numpy().reshape(len(items), -1)
    names = ("reward",) if feed.sequences.num_answers == 1 else ("chosen", "rejected")
    for item in np.argsort(feed.sequences.row, kind="stable").tolist():
        row = int(feed.sequences.row[item])
        rewards = dict(zip(names, rewards_IK[item].tolist(), strict=True))
        yield {"row": store.origin(row), **rewards}


def write_rewards(
    recipe: Recipe,
    settings: Settings,
    output: Path,
    adapter: str | None = None,
    *,
    emit: Callable[[str], object] = lambda note: None,
) -> tuple[int, float | None]:
    """Write the rewards as JSON lines; (lines, share of pairs whose chosen answer has the higher reward)."""
    count, wins, is_pairs = 0, 0.0, False
    with output.open("w") as file:
        for line in rewards_of(recipe, settings, adapter, emit=emit):
            file.write(json.dumps(line) + "\n")
            count += 1
            chosen, rejected = line.get("chosen"), line.get("rejected")
            if isinstance(chosen, float) and isinstance(rejected, float):
                is_pairs = True
                wins += 1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0
    return count, wins / count if is_pairs else None


def _pad_id(tokenizer: PreTrainedTokenizerFast) -> int:
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else 0


def _scorer(
    recipe: Recipe, settings: Settings, vocab_size: int, adapter: str | None, emit: Callable[[str], object]
) -> RewardScorer:
    torch.set_num_threads(settings.threads)
    model, kept = _model(recipe, settings, vocab_size, adapter, emit)
    if kept is not None:
        read_layers_when_called(model, kept, local_device(settings))
    if settings.padding_free:
        backend = AttentionBackend(settings.attention)
        longest = settings.max_length
        verify_isolation(
            model, backend, shared_prompts=settings.shared_prompts, longest=longest, together=longest
        )
    return RewardScorer(model).eval()


def _model(
    recipe: Recipe, settings: Settings, vocab_size: int, adapter: str | None, emit: Callable[[str], object]
) -> tuple[PreTrainedModel | PeftModel, dict[str, Kept] | None]:
    """The model; without data, and where its numbers are, where its weights live elsewhere."""

    def loaded() -> PreTrainedModel:
        """The model without its adapter."""
        return load_model(
            recipe.model,
            settings,
            seed=recipe.train.seed,
            vocab_size=vocab_size,
            head="score",
            is_new=adapter is not None,
        )

    kept = None
    try:
        model, kept = without_data(loaded) if settings.weights_offload else (loaded(), None)
    except NeedsWhole as error:
        emit(f"is scored by a model that memory holds whole: {error}")
        model = loaded()
    return (model if adapter is None else load_adapter(model, adapter)), kept
