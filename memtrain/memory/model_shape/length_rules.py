"""Dependence of a model on the length of its rows: one list, read from config.json, that every rule asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from memtrain.memory.model_shape.config_names import canonical

Depends = Literal["row", "place", "reach"]
"""row: every token of a row computes with other numbers once the row is longer. place: a token computes with
numbers of its place in its own row. reach: a token sees other keys than all before it."""


@dataclass(frozen=True, slots=True)
class LengthRule:
    """A property that changes where rows are longer than `tokens`."""

    kind: str
    """longrope, dynamic, temperature, window, chunk or top_keys."""
    tokens: int
    """Up to so many tokens nothing changes."""
    depends: Depends
    summary: str
    """The change, as a clause about the model."""


ROTARY = {
    "longrope": "LongRoPE rotates all tokens of a row by other angles where the row is longer than {n:,} "
    "tokens",
    "dynamic": "dynamic NTK rotates all tokens of a row by angles that depend on its length beyond {n:,} "
    "tokens",
}
"""Kinds of rotary positions that follow the length of a row; transformers takes the longest row of a batch,
and dynamic NTK the longest that it has met before."""

OLD_NAMES = {"su": "longrope"}

TOP_KEYS = ("index_topk", "keep_window_size")
"""Keys of a configuration that say how many keys a token picks of all before it."""

# Source: modeling_rope_utils.py, modeling_llama4.py (positions by torch.arange), modeling_doge.py and
# modeling_deepseek_v32.py of transformers 5.23. Held by tests/memory/model_shape/test_length_rules.py and
# the sweep
# tests/runs/test_causal_lms.py.


def length_rules(config: Mapping[str, Any]) -> tuple[LengthRule, ...]:
    """Rules of a `config.json` (or `config.to_dict()`) that depend on lengths."""
    text = config.get("text_config")
    known = canonical(cast(Mapping[str, Any], text) if isinstance(text, Mapping) else config)
    return tuple(dict.fromkeys([*_rotary(known), *_temperature(known), *_reach(known)]))


def reached(rules: Iterable[LengthRule], longest: int | None, *depends: Depends) -> LengthRule | None:
    """The first rule of such kinds that rows of `longest` tokens (None: of any length) come to."""
    found = (rule for rule in rules if rule.depends in depends)
    return next((rule for rule in found if longest is None or longest > rule.tokens), None)


PROBE_BESIDE = 9
"""Tokens of the short row that a probe lays beside a long one."""

PROBE_PAST = 4
"""Tokens by which a probe's long row goes past the length at which something changes, or stays below it."""


def probe_lengths(
    rules: Iterable[LengthRule], longest: int | None, together: int | None
) -> list[tuple[int, int]]:
    """Tokens of two rows that lie side by side, for each length at which rows of a run come to change.

    `longest`: tokens of the longest row; `together`: of rows that lie end to end; None: without bound. What
    a token reaches is not probed here: a pass that comes to it is refused.
    """
    found: list[tuple[int, int]] = []
    for rule in rules:
        past, below = rule.tokens + PROBE_PAST, max(1, rule.tokens - PROBE_PAST)
        if rule.depends == "reach":
            continue
        if longest is None or longest > rule.tokens:
            found.append((past, PROBE_BESIDE))
        elif rule.depends == "place" and (together is None or together > rule.tokens):
            found.append((below, PROBE_BESIDE))
    return list(dict.fromkeys(found))


def _rotary(config: Mapping[str, Any]) -> Iterator[LengthRule]:
    for section in _sections(config):
        kind = str(section.get("rope_type") or section.get("type") or "")
        kind = OLD_NAMES.get(kind, kind)
        if kind not in ROTARY:
            continue
        most = config.get("max_position_embeddings")
        if kind == "longrope":
            # A configuration's own number comes before that of its section: transformers writes it there.
            lengths = (config.get("original_max_position_embeddings"), section.get(ORIGINAL), most)
            most = next((one for one in lengths if one), None)
        tokens = int(most or 0)
        yield LengthRule(kind, tokens, "row", ROTARY[kind].format(n=tokens))


ORIGINAL = "original_max_position_embeddings"


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The sections that say how positions are turned: one, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name)
        if isinstance(section, Mapping):
            held = cast(Mapping[str, Any], section)
            yield held
            yield from (cast(Mapping[str, Any], one) for one in held.values() if isinstance(one, Mapping))


def _temperature(config: Mapping[str, Any]) -> Iterator[LengthRule]:
    """Llama 4 scales queries of layers without positions by their place, counted over all that lie before."""
    if config.get("model_type") not in TEMPERED or not config.get("attn_temperature_tuning", True):
        return
    tokens = int(config.get("floor_scale") or 8192)
    summary = f"queries beyond {tokens:,} tokens are scaled by their place in the row"
    # The first token that is scaled is the one at place `tokens - 1`.
    yield LengthRule("temperature", tokens - 1, "place", summary)


TEMPERED = ("llama4_text",)


def _reach(config: Mapping[str, Any]) -> Iterator[LengthRule]:
    kinds = layer_kinds(config)
    window, chunk = config.get("sliding_window"), config.get("attention_chunk_size")
    # Qwen2 and Qwen3 carry a window that is off unless this says so.
    is_windowed = config.get("use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    if window and is_windowed:
        yield LengthRule("window", int(window), "reach", f"attention slides over {int(window):,} tokens")
    if chunk and (not kinds or "chunked_attention" in kinds):
        summary = f"attention is cut into chunks of {int(chunk):,} tokens"
        yield LengthRule("chunk", int(chunk), "reach", summary)
    for name in TOP_KEYS:
        if config.get(name):
            tokens = int(config[name])
            yield LengthRule("top_keys", tokens, "reach", f"a token attends to {tokens:,} selected keys")


def layer_kinds(config: Mapping[str, Any]) -> set[str]:
    """The kinds of layers that a configuration lists; none where it has no list."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types") or ()
    return {str(kind) for kind in kinds} if isinstance(kinds, list | tuple) else set()  # pyright: ignore


PLAIN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe", "dense", "sparse"}
)
"""Kinds of layer, as configurations spell them, through which rows cannot see each other."""

STATE_KEYS = ("ssm_cfg", "mamba_d_state", "state_size", "linear_num_value_heads")
"""Keys of configurations whose models have layers with a state, where no list says so."""

STATE_TYPES = ("rwkv", "xlstm")
"""Model types of which every layer has a state, and no key says so."""


def own_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of layers that are not plain attention (`linear_attention`, `mamba`), or the keys or the
    model type that tell of them; empty where there are none."""
    told = {key for key in STATE_KEYS if config.get(key)}
    told.update(one for one in STATE_TYPES if one == config.get("model_type"))
    return tuple(sorted(layer_kinds(config) - PLAIN_LAYERS | told))
