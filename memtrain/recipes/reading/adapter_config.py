"""An adapter's adapter_config.json: foreign text, whose values are checked before PEFT reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from memtrain.errors import Fault

ADAPTER_FILE = "adapter_config.json"

MOST_RANK = 2**16
"""Taste: far above the width of any projection."""

MOST_LETTERS = 1000
"""Of one pattern of names. Taste: Unsloth's longest has about 300."""

_REPEATED_REPEAT = re.compile(r"[+*}][?+]?\)(?:[+*]|\{\d*,)")
"""A group that repeats and holds a repetition at its end, which Python's `re` may try in 2 ** n ways."""


def faults_of(given: Mapping[str, Any], file: Path) -> list[Fault]:
    """The fault of each value in an adapter_config.json that no adapter has."""
    return [
        Fault(
            f"the adapter's config has {name}: {json.dumps(given[name], default=str)[:60]}",
            str(file),
            f"it must be {rule}; train or download the adapter again",
        )
        for name, (holds, rule) in RULES.items()
        if given.get(name) is not None and not holds(given[name])
    ]


def _is_place(value: object) -> bool:
    """A folder or hub id that no command line takes for an option, and no list for two names."""
    is_text = isinstance(value, str) and len(value) <= 4096 and value.isprintable()
    return is_text and not cast(str, value).startswith("-")


def _is_number(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(cast(float, value)) and least <= cast(float, value) <= most


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and _is_number(value, 1, MOST_RANK)


def _is_pattern(value: object) -> bool:
    """A name or a regular expression that is read in time."""
    if not isinstance(value, str) or len(value) > MOST_LETTERS or _REPEATED_REPEAT.search(value):
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in cast(list[object], value))


def _numbers_by_pattern(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        return isinstance(value, Mapping) and all(
            _is_pattern(name) and holds(one) for name, one in cast(Mapping[object, object], value).items()
        )

    return check


Rule = tuple[Callable[[object], bool], str]
"""(whether a value is one, what it must be)"""

_SWITCH: Rule = (lambda value: isinstance(value, bool), "true or false")
_WORD: Rule = (lambda value: isinstance(value, str) and value.isidentifier(), "a word")
_NAMES: Rule = (
    lambda value: _are_names(value) or _is_pattern(value),
    "a list of names, or one plain pattern",
)

RULES: Mapping[str, Rule] = {
    "peft_type": _WORD,
    "task_type": _WORD,
    "base_model_name_or_path": (_is_place, "a folder or a hub id"),
    "revision": (_is_place, "a branch, a tag or a commit"),
    "r": (_is_rank, f"a whole number from 1 to {MOST_RANK:,}"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "target_parameters": (_are_names, "a list of names"),
    "modules_to_save": (_are_names, "a list of names"),
    "layers_pattern": _NAMES,
    "rank_pattern": (_numbers_by_pattern(_is_rank), "ranks by the names of modules"),
    "alpha_pattern": (_numbers_by_pattern(_is_number), "numbers by the names of modules"),
    "use_dora": _SWITCH,
    "use_rslora": _SWITCH,
    "fan_in_fan_out": _SWITCH,
    "lora_bias": _SWITCH,
    "auto_mapping": (lambda value: isinstance(value, dict), "a mapping"),
}
"""Keys of a LoRA configuration with what their values must be; null leaves one out. Source: PEFT 0.21,
tuners/lora/config.py."""
