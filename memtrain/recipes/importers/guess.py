"""Guess of the tool and the method of a file or a command line, by keys and words that only one has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from memtrain.errors import RecipeError
from memtrain.recipes.trl.translate import IMPORTED

SIGNS: Mapping[str, tuple[str, ...]] = {
    "verl": (
        "actor_rollout_ref",
        "algorithm.adv_estimator",
        "model.partial_pretrain",
        "trainer.n_gpus_per_node",
    ),
    "axolotl": ("base_model", "sequence_len", "sample_packing", "micro_batch_size", "lora_target_linear"),
    "llamafactory": (
        "stage",
        "finetuning_type",
        "cutoff_len",
        "lora_target",
        "template",
        "dataset_dir",
        "pref_loss",
    ),
    "trl": ("model_name_or_path", "dataset_name", "per_device_train_batch_size", "use_peft", "reward_funcs"),
}
"""Keys by which each tool is known, the surest first."""

_PROGRAMS = {
    "verl": "verl",
    "llamafactory": "llamafactory",
    "train_bash": "llamafactory",
    "axolotl": "axolotl",
}
_METHOD_SIGNS = {
    "distill": ("teacher_model_name_or_path", "lmbda", "seq_kd"),
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "steps_per_generation"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("precompute_ref_log_probs", "ref_model_sync_steps", "rpo_alpha", "max_prompt_length", "beta"),
    "reward": ("center_rewards_coefficient",),
}


READ = "TRL, Axolotl, LLaMA-Factory, Unsloth and verl"
"""Tools whose configurations are read."""

UNREAD: Mapping[str, str] = {
    "torchtune": r"torchtune|\btune run\b",
    "ms-swift": r"\bswift (sft|pt|rlhf|megatron)\b|^(rlhf_type|train_type|tuner_type)$",
    "OpenRLHF": r"openrlhf|^(micro_train_batch_size|micro_rollout_batch_size)$",
    "EasyR1": r"^worker\.(actor|rollout)\b",
    "LitGPT": r"\blitgpt\b",
    "LLaMA-Factory v1": r"^((dist|kernel|peft|quant|init)_config\.name|sample_backend)$",
    "NeMo-RL": r"^policy\.(model_name|dtensor_cfg|train_micro_batch_size|train_global_batch_size)|nemo_rl",
    "prime-rl": r"\bprime[-_]rl\b|^(orchestrator|trainer\.model|inference)\.[a-z_.]+$",
    "torchtitan": r"torchtitan|^training\.local_batch_size$|^activation_checkpoint\.mode$",
    "xtuner": r"\bxtuner\b",
}
"""Trainers whose configurations are not read, by words or keys that only they have."""


def refuse_unread(config: Mapping[str, Any], words: Sequence[str], name: str) -> None:
    """Refuse a configuration of a trainer that is known and not read.

    Raises: RecipeError.
    """
    said = [" ".join(words), *config, *(one for one in config.values() if isinstance(one, str))]
    for title, sign in UNREAD.items():
        if any(re.search(sign, text) for text in said):
            raise RecipeError(
                f"{name} is a configuration of {title}, which memtrain cannot read (it reads {READ})",
                name,
                "write the same run with TRL's keys (model_name_or_path, max_length, "
                "per_device_train_batch_size, ...) into a file and add --tool trl; or write a recipe "
                "(memtrain init sft -o my.yaml), which memtrain plan and rescue take",
            )


def is_recipe(config: Mapping[str, Any]) -> bool:
    """Whether it is a recipe of memtrain."""
    return "extends" in config or ("method" in config and isinstance(config.get("model"), Mapping))


def guess_tool(config: Mapping[str, Any], words: Sequence[str], name: str) -> str:
    """The tool whose keys the most are.

    Raises: RecipeError when no key is known by.
    """
    refuse_unread(config, words, name)
    for word in words:
        found = next((tool for sign, tool in _PROGRAMS.items() if sign in word.lower()), None)
        if found is not None:
            return found
    scores = {
        tool: sum(any(key == sign or key.startswith(f"{sign}.") for key in config) for sign in signs)
        for tool, signs in SIGNS.items()
    }
    best = max(scores, key=lambda tool: scores[tool])
    if not scores[best]:
        raise RecipeError(
            f"no key of {name} shows which trainer it is for (memtrain reads {READ})",
            name,
            "give --tool trl, axolotl, llamafactory, unsloth or verl; or write a recipe (memtrain init)",
        )
    return best


def guess_method(config: Mapping[str, Any], words: Sequence[str], name: str) -> str:
    """The method of a configuration of TRL, which does not say it: by the command, else by its keys."""
    for word in words:
        stem = PurePath(word).stem.lower()
        for part in re.split(r"[^a-z]+", stem):
            if part in IMPORTED:
                return part
            if part == "gkd":
                return "distill"
        if "reward_modeling" in stem or stem == "rm":
            return "reward"
    stem = re.split(r"[^a-z]+", PurePath(name).stem.lower())
    for method in IMPORTED:
        if method in stem:
            return method
    for method, signs in _METHOD_SIGNS.items():
        if any(sign in config for sign in signs):
            return method
    return "sft"
