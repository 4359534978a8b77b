"""Keys and values under their previous names -> today's, with a note of every place that has a previous one.

A recipe, an override, and a recipe that was saved with a run may use either name. A key stays in its section.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as ReadOnly
from dataclasses import replace
from typing import cast

from memtrain.recipes.reading.yaml_tree import (
    Entry,
    Faults,
    Items,
    Leaf,
    Mapping,
    Node,
    Path,
    Place,
    Renaming,
    dotted,
)
from memtrain.recipes.registry import METHODS, spelled_method

_CORRECTING = ("grpo", "rloo", "ppo")

PREVIOUS_KEYS: dict[str, str] = {
    "train.batch_rows": "batch_size",
    "train.micro_rows": "micro_batch_size",
    "generate.completions": "num_generations",
    "generate.mismatch_limit": "max_logprob_gap",
    "length.documents_see_each_other": "cross_document_attention",
    "data.held_out": "eval_fraction",
    **{f"{method}.mismatch": "importance_correction" for method in _CORRECTING},
    **{f"{method}.mismatch_low": "importance_correction_min" for method in _CORRECTING},
    **{f"{method}.mismatch_high": "importance_correction_max" for method in _CORRECTING},
    **{f"{method}.normalise_advantages": "normalize_advantages" for method in ("rloo", "ppo")},
    "grpo.cispo_highest": "cispo_max_weight",
    "grpo.top_entropy": "top_entropy_fraction",
    "online_dpo.least_margin": "min_reward_gap",
    "memory.watch": "measure_peaks",
    "memory.rehearse": "preflight",
    "memory.recover": "oom_recovery",
    "memory.loss_tile": "loss_chunk_size",
    "cluster.context_parallel_by": "context_parallel_mode",
    "cluster.offload": "cpu_offload",
    "save.allow_changed": "allow_changed_keys",
    "save.background": "async_save",
}
"""The previous dotted key, and its name in the same section today."""

PREVIOUS_VALUES: dict[str, dict[str, str]] = {
    "model.attention": {
        "cpu": "torch_cpu",
        "cuda": "torch_varlen",
        "dense": "masked",
        "stock": "transformers",
    },
    "grpo.combine_rewards": {
        "sum_then_normalise": "sum_then_normalize",
        "normalise_then_sum": "normalize_then_sum",
    },
    "cluster.context_parallel_mode": {"keys": "all_gather", "heads": "ulysses"},
}
"""By today's dotted key: the previous word, and today's."""

HOLD_KEYS = ("save.allow_changed_keys",)
"""Keys whose values are keys of a recipe."""

_REFERENCE = re.compile(r"(?<!\\)\$\{\s*(?:oc\.select:\s*)?(\.*)([\w-]+(?:\.[\w-]+|\[[\w-]+\])*)")


def renewed_path(path: Path) -> Path:
    """A path with every previous key in it replaced."""
    made: Path = ()
    for part in path:
        above = _names(made)
        new = PREVIOUS_KEYS.get(f"{above}.{part}" if above else str(part))
        made = (*made, part if new is None else new)
    return made


def renewed_key(key: str) -> str:
    """A dotted key under its name of today."""
    return dotted(renewed_path(tuple(key.split("."))))


def renewed(node: Node, faults: Faults, path: Path = (), *, is_final: bool = False) -> Node:
    """The node at `path` with today's names; each previous one is noted in `faults.renamed`.

    A key that is written under both names is a fault with both places. `is_final`: every `${...}` is replaced
    already, and what looks like one is text.
    """
    if isinstance(node, Mapping):
        return _renewed_mapping(node, faults, path, is_final=is_final)
    if isinstance(node, Items):
        items = [renewed(item, faults, (*path, at), is_final=is_final) for at, item in enumerate(node.items)]
        return Items(tuple(items), node.place)
    if not isinstance(node.value, str):
        return node
    key = _names(path)
    text = node.value if is_final else _renewed_references(node, faults, path)
    new = _renewed_value(text, key)
    if new != text:
        faults.renamed.append(Renaming(node.place, text, new, f"{key}: {text}", new))
    if path == ("method",) and (spelled := spelled_method(new)) in METHODS:
        new = spelled
    return node if new == node.value else replace(node, value=new)


def renewed_json(value: object, path: Path = ()) -> object:
    """A recipe that was saved as bare values, with today's names."""
    if isinstance(value, dict):
        section = cast(ReadOnly[str, object], value)
        made: dict[str, object] = {}
        for key, held in section.items():
            inner = renewed_path((*path, key))
            made[str(inner[-1])] = renewed_json(held, inner)
        return made
    if isinstance(value, list):
        return [renewed_json(item, path) for item in cast(list[object], value)]
    return _renewed_value(value, _names(path)) if isinstance(value, str) else value


def renewed_override(path: Path, value: Node, place: Place, faults: Faults) -> tuple[Path, Node]:
    """The path and the value of an override, with today's names."""
    new = renewed_path(path)
    if new != path:
        faults.renamed.append(Renaming(place, dotted(path), dotted(new), dotted(path), dotted(new)))
    return new, renewed(value, faults, new)


def _renewed_mapping(node: Mapping, faults: Faults, path: Path, *, is_final: bool) -> Mapping:
    entries: dict[str, Entry] = {}
    for key, entry in node.entries.items():
        inner = renewed_path((*path, key))
        new = str(inner[-1])
        if new != key and new in node.entries:
            where = node.entries[new].place
            what = f"{dotted((*path, key))} is the previous name of {dotted(inner)}, written at {where}"
            faults.add(what, entry.place, f"keep {new}, and remove {key}")
            continue
        if new != key:
            faults.renamed.append(Renaming(entry.place, key, new, dotted((*path, key)), dotted(inner)))
        entries[new] = Entry(entry.place, renewed(entry.node, faults, inner, is_final=is_final))
    return Mapping(entries, node.place)


def _renewed_references(leaf: Leaf, faults: Faults, path: Path) -> str:
    """The text of a leaf, with today's names in its `${...}`."""
    text = str(leaf.value)
    if "${" not in text:
        return text

    def renamed(match: re.Match[str]) -> str:
        dots, written = match[1], match[2]
        base = path[: max(len(path) - len(dots), 0)] if dots else ()
        own = tuple(written.replace("[", ".").replace("]", "").split("."))
        new = renewed_path((*base, *own))
        if new == (*base, *own):
            return match[0]
        name = dotted(new[len(base) :])
        faults.renamed.append(
            Renaming(leaf.place, f"{dots}{written}", f"{dots}{name}", dotted((*base, *own)), dotted(new))
        )
        return f"{match[0][: match.start(1) - match.start()]}{dots}{name}"

    return _REFERENCE.sub(renamed, text)


def _renewed_value(text: str, key: str) -> str:
    if key in HOLD_KEYS:
        return renewed_key(text)
    return PREVIOUS_VALUES.get(key, {}).get(text, text)


def _names(path: Path) -> str:
    """The keys of a path, without the places in lists."""
    return ".".join(part for part in path if isinstance(part, str))
