"""The settings of a pass that scores answers: nothing is trained, so nothing is searched for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.plan.row_form import RowForm
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.base_settings import loss_tile
from memtrain.memory.rules.batching import COMFORTABLE_TOKENS
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe, decide_attention, decide_dtype
from memtrain.memory.rules.precision import WITHOUT_COPIES
from memtrain.memory.rules.reference_model import decide_shared_prompts
from memtrain.memory.rules.weights_offload import is_asked, moved

ROWS_AT_ONCE = 8
"""Rows of a batch where rows are padded. Taste."""


def scoring_settings(asked: SourcedRecipe, hardware: Hardware, config: Mapping[str, object]) -> Settings:
    """Settings of one process that scores, with attention and precision as in training.

    Raises: RecipeError with every refusal.
    """
    ledger, recipe = DecisionLog(asked), asked.recipe
    dtype = decide_dtype(ledger, hardware)
    attention = decide_attention(ledger, hardware, dtype, config)
    is_flat = attention is not None and attention.can_pack and recipe.length.padding_free is not False
    growing = reached(length_rules(config), recipe.length.max_length, "row")
    shares = attention is not None and decide_shared_prompts(
        ledger, attention, padding_free=is_flat, growing=growing
    )
    ledger.raise_refusals()
    assert attention is not None, "A refusal was not noted."
    threads = recipe.cluster.threads
    settings = Settings.model_validate(
        {
            "device": hardware.device,
            "num_processes": 1,
            "threads": hardware.num_cores if threads == "auto" else threads,
            "dtype": dtype,
            "attention": str(attention.backend),
            "liger": False,
            "adapter": None,
            "quantize": "none",
            **asdict(recipe.row_limits),
            **RowForm(is_flat, growing is not None and not is_flat, shares).updates(),
            "pad_to_multiple_of": None,
            "group_by_length": False,
            "batch_size": ROWS_AT_ONCE,
            "batch_tokens": None,
            "micro_batch_size": 2**20 if is_flat else ROWS_AT_ONCE,
            "micro_tokens": COMFORTABLE_TOKENS[hardware.device] if is_flat else None,
            "max_steps": 1,
            "checkpoint_every": 0,
            "offload": "none",
            "loss": "chunked",
            "loss_tile_bytes": loss_tile(recipe),
            "optimizer": "sgd",
            **WITHOUT_COPIES,
            "expandable_segments": True,
        }
    )
    return moved(settings) if is_asked(asked) else settings
