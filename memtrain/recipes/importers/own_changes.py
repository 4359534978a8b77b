"""Changes that save memory in a tool's own configuration, also in a plain script of TRL's trainers."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.recipes.peers.savings import Config, OwnChange, changes_in
from memtrain.recipes.peers.table import table


def changes_of(tool: str, method: str, processes: int, *, is_script: bool = False) -> list[OwnChange]:
    """The changes that a tool has for a method, exact ones first. `is_script`: a script of TRL's trainers,
    read by Unsloth's table but without Unsloth."""
    if not is_script:
        return changes_in(table(tool), method, processes)
    changes = changes_in(table("trl"), method, processes)
    at = next(number for number, one in enumerate(changes) if one.kind == "adapter")
    lora, qlora = (one.learns for one in changes if one.kind == "adapter")
    others = [one for one in changes if one.kind != "adapter"]
    own = [OwnChange("adapter", _adapted, lora), OwnChange("adapter", _rounded, qlora)]
    return [*others[:at], *own, *others[at:]]


def _adapted(config: Config) -> Mapping[str, object]:
    """An adapter by the keys of a script's calls."""
    has_one = any(key.startswith("get_peft_model.") for key in config)
    return {} if has_one else {"get_peft_model.r": 16, "get_peft_model.target_modules": "all-linear"}


def _rounded(config: Config) -> Mapping[str, object]:
    key = "from_pretrained.load_in_4bit"
    return {} if config.get(key) is True else {**_adapted(config), key: True}
