"""A smaller model and smaller steps of the same kinds, under the settings of the large ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.length_rules import ORIGINAL, length_rules
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.registry import METHODS

FEWEST_LAYERS = 2
MOST_HEADS = 4
HEAD_DIM = 16
WIDTHS = 2
"""Widths of the hidden size that a feed-forward layer keeps."""
MOST_EXPERTS = 4
SEQUENCES = 6
"""Sequences of a step."""
SHORTEST = 192
"""Tokens that a shrunk row keeps, and more where rows are longer on average than half of that."""
MOST_NEW_TOKENS = 32
TILE_ROWS = 4
"""Rows of logits in a tile of the loss, so that a small step has many."""
# All of these are taste: a step takes seconds on a CPU, and every strategy still has something to do.

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "no_rope_layers", "mlp_layer_types")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "moe_k", "num_experts_per_token")
FEED_FORWARD = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim")


def shrunk_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with few layers, one of each kind at least, and small widths."""
    if isinstance(config.get("text_config"), Mapping):
        return {**config, "text_config": shrunk_config(config["text_config"])}
    if "hidden_size" not in config or "num_hidden_layers" not in config:
        raise RecipeError(
            f"a {config.get('model_type')} cannot be shrunk: its configuration uses other names",
            "--shrink",
            "verify the recipe without it",
        )
    made = dict(config)
    layers = int(made["num_hidden_layers"])
    kept = _layers_kept(made, layers)
    made["num_hidden_layers"] = len(kept)
    for key in LAYER_LISTS:
        kinds = made.get(key)
        if isinstance(kinds, list) and len(kinds) == layers:
            made[key] = [kinds[at] for at in kept]
    if "first_k_dense_replace" in made and len(kept) > 1:
        made["first_k_dense_replace"] = min(int(made["first_k_dense_replace"]), len(kept) - 1)
    _narrow(made)
    for keys, most in ((EXPERTS, MOST_EXPERTS), (EXPERTS_USED, MOST_EXPERTS // 2)):
        for key in keys:
            if made.get(key):
                made[key] = min(int(made[key]), most)
    # These say how the weights on the hub are stored.
    return {key: value for key, value in made.items() if key not in ("quantization_config", "architectures")}


def shrunk(plan: Plan, config: Mapping[str, Any], folder: Path) -> tuple[Plan, list[str]]:
    """(the plan for a shrunk model with random weights and for short rows, notes for the reader).

    The settings are those planned for the model as it is; tiles are smaller, so that a small step has
    several. The new configuration is written into `folder`.
    """
    mean = plan.data.train.num_tokens // max(1, plan.data.train.num_rows)
    before = plan.settings.max_length or plan.data.train.longest_tokens
    longest = min(plan.settings.max_length or 2**31, max(SHORTEST, 2 * mean))
    small = _nearer(shrunk_config(config), before, longest)
    vocab_size = int(_text(small)["vocab_size"])
    file = folder / "config.json"
    file.write_text(json.dumps(small))
    recipe, settings = plan.recipe, plan.settings
    notes = [f"shrunk to {_text(small)['num_hidden_layers']} layers of width {_text(small)['hidden_size']}"]
    if settings.quantize != "none":
        notes.append("random weights are not quantized; to verify quantization, omit --shrink")
    length = recipe.length.model_copy(update={"max_length": longest})
    model = recipe.model.model_copy(
        update={
            "path": None,
            "config": str(file),
            "tokenizer": recipe.model.tokenizer or recipe.model.path,
            "quantize": "none",
        }
    )
    changed: dict[str, Any] = {"model": model, "length": length}
    if METHODS[recipe.method].is_online:
        most = min(recipe.generation.max_tokens, MOST_NEW_TOKENS)
        changed["generate"] = recipe.generation.model_copy(update={"max_tokens": most})
    settings = settings.model_copy(
        update={
            "max_length": longest,
            "quantize": "none",
            "loss_tile_bytes": min(settings.loss_tile_bytes, TILE_ROWS * 4 * vocab_size),
            **_smaller_step(plan, longest),
        }
    )
    made = plan.model_copy(update={"recipe": recipe.model_copy(update=changed), "settings": settings})
    return made, notes


def _nearer(config: dict[str, Any], before: int, longest: int) -> dict[str, Any]:
    """The configuration with changes at some length of a row moved into the shorter rows, where
    rows of `before` tokens came to it; the angles of fewer and narrower heads."""
    if isinstance(config.get("text_config"), Mapping):
        return {**config, "text_config": _nearer(dict(config["text_config"]), before, longest)}
    made = dict(config)
    near = max(2, longest // 2)
    kinds = {rule.kind for rule in length_rules(config) if before > rule.tokens}
    changed = {"longrope": ORIGINAL, "dynamic": "max_position_embeddings", "temperature": "floor_scale"}
    made |= {key: near for kind, key in changed.items() if kind in kinds}
    for name in ("rope_parameters", "rope_scaling"):
        section = made.get(name)
        if isinstance(section, Mapping):
            made[name] = _narrow_angles(dict(section), made, near if "longrope" in kinds else None)
    return made


def _narrow_angles(section: dict[str, Any], config: Mapping[str, Any], near: int | None) -> dict[str, Any]:
    """LongRoPE factors, as many as heads now have angles, and the length at which they change."""
    heads = int(config.get("num_attention_heads") or 1)
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    share = section.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    for key in ("short_factor", "long_factor"):
        if isinstance(section.get(key), list):
            section[key] = section[key][: int(width * share) // 2]
    if near is not None and ORIGINAL in section:
        section[ORIGINAL] = near
    return section


def _smaller_step(plan: Plan, longest: int) -> dict[str, Any]:
    """The step in fewer rows; an accumulated step stays accumulated."""
    settings, recipe = plan.settings, plan.recipe
    group = recipe.generation.num_generations if METHODS[recipe.method].is_online else 1
    made: dict[str, Any] = {}
    rows = SEQUENCES if group == 1 else 2 * group
    if settings.batch_size is not None:
        rows = made["batch_size"] = min(settings.batch_size, rows)
        is_cut = settings.micro_batch_size < settings.batch_size
        made["micro_batch_size"] = min(settings.micro_batch_size, max(1, rows // 2)) if is_cut else rows
    else:
        made["batch_tokens"] = min(settings.batch_tokens or longest, rows * longest)
        made["micro_batch_size"] = min(settings.micro_batch_size, max(1, rows // 2))
    if settings.micro_tokens is not None:
        made["micro_tokens"] = min(settings.micro_tokens, 2 * longest)
    return made


def _layers_kept(config: Mapping[str, Any], layers: int) -> list[int]:
    """The first layer of each kind, and as many of the first ones as make a model of several layers."""
    kept = set(range(min(FEWEST_LAYERS, layers)))
    for key in LAYER_LISTS:
        kinds = config.get(key)
        if isinstance(kinds, list) and len(kinds) == layers:
            kept |= {kinds.index(kind) for kind in set(kinds)}
    return sorted(kept)


def _narrow(config: dict[str, Any]) -> None:
    """Small widths, where they are larger: query heads stay multiples of key heads."""
    heads = int(config.get("num_attention_heads") or 0)
    width = int(config["hidden_size"])
    if not heads or width <= MOST_HEADS * HEAD_DIM:
        return
    key_heads = int(config.get("num_key_value_heads") or heads)
    group = max(1, heads // max(1, key_heads))
    few_keys = max(1, min(key_heads, MOST_HEADS // group or 1))
    config["num_attention_heads"] = few_keys * group
    if "num_key_value_heads" in config and config["num_key_value_heads"] is not None:
        config["num_key_value_heads"] = few_keys
    head_dim = config.get("head_dim") or width // heads
    config["hidden_size"] = few_keys * group * HEAD_DIM
    if config.get("head_dim"):
        config["head_dim"] = min(int(head_dim), HEAD_DIM)
    for key in FEED_FORWARD:
        if isinstance(config.get(key), int):
            config[key] = min(config[key], WIDTHS * config["hidden_size"])


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
