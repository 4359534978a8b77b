"""Guess of the tool and the method of a file or a command line, by keys and words that only one has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from memtrain.errors import RecipeError

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
    "cpo": ("cpo_alpha",),
    "dpo": ("precompute_ref_log_probs", "ref_model_sync_steps", "rpo_alpha", "max_prompt_length", "beta"),
    "reward": ("center_rewards_coefficient",),
    "sft": ("assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length", "packing"),
}

READ = "TRL, Axolotl, LLaMA-Factory, Unsloth and verl"
"""Tools whose configurations are read."""

UNREAD: Mapping[str, str] = {
    "torchtune": r"torchtune|\btune run\b",
    "ms-swift": r"\b(swift|megatron) (sft|pt|rlhf)\b|\bswift[./]cli\b"
    r"|^(rlhf_type|train_type|tuner_type|swift)$",
    "OpenRLHF": r"openrlhf|^(micro_train_batch_size|micro_rollout_batch_size)$",
    "EasyR1": r"^worker\.(actor|rollout)\b",
    "LitGPT": r"\blitgpt\b",
    "LLaMA-Factory v1": r"^((dist|kernel|peft|quant|init)_config\.name|sample_backend)$",
    "open-instruct": r"open_instruct|^(dataset_mixer_list|with_tracking|use_slow_tokenizer)$",
    "slime": r"\bslime\b|^(hf_checkpoint|rollout_batch_size|n_samples_per_prompt)$",
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


_WORDS: Mapping[str, str] = {
    **{method: method for method in ("sft", "dpo", "kto", "reward", "grpo", "rloo", "orpo", "cpo")},
    **{"gkd": "distill", "distill": "distill", "rm": "reward", "simpo": "cpo", "gspo": "grpo", "mpo": "dpo"},
}
"""Words of scripts, commands and folders, and the method; `orpo` and `cpo` are losses of `dpo`."""

_NO_METHOD = ("ppo", "prm", "bco", "nash_md", "xpo", "gold", "tpo", "sdft", "sdpo", "ssd", "online_dpo")
UNTRANSLATED = (
    *_NO_METHOD,
    "minillm",
    "distillation",
    "gmpo",
    "a2po",
    "async_grpo",
    "iw_opd",
    "server_distillation",
)
"""Trainers of TRL whose configurations are not read."""


def guess_method(config: Mapping[str, Any], words: Sequence[str], name: str, folder: str = "") -> str:
    """The method of a configuration of TRL, which does not say it: by what the command runs, the folder that
    it lies in, the keys that one method alone has, and the file's name.

    Raises: RecipeError for a trainer that has no counterpart.
    """
    told = [found for word in words if (found := _named(PurePath(word).stem))]
    told += [_WORDS[folder.lower()]] if folder.lower() in _WORDS else []
    if told:
        return read_method(told[0], name)
    for method, signs in _METHOD_SIGNS.items():
        if any(config.get(sign) is not None for sign in signs):
            return method
    named = _named(PurePath(name).stem)
    # A name alone makes no distillation: datasets are distilled too.
    return read_method(named, name) if named not in ("", "distill", "distillation") else "sft"


def _named(stem: str) -> str:
    """The longest word of a method in a name, and the name itself where no configuration is read of it."""
    if "reward_modeling" in stem:
        return "reward"
    for word in sorted((*_WORDS, *UNTRANSLATED), key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", stem.lower().replace("-", "_")):
            return _WORDS.get(word, word)
    return ""


_BY_TRAINER: Mapping[str, str] = {
    **{word.replace("_", ""): _WORDS.get(word, word) for word in (*_WORDS, *UNTRANSLATED)},
    **dict.fromkeys(("unsloth", "transformers"), "sft"),
}


def method_of_trainer(kind: str) -> str | None:
    """The method of a trainer, by its name without `Trainer`, one that is not read too; None for others."""
    return _BY_TRAINER.get(kind.lower())


def read_method(method: str, name: str) -> str:
    """The method again.

    Raises: RecipeError for one of a trainer that has no counterpart.
    """
    if method in UNTRANSLATED:
        by_hand = " (memtrain init writes one)" if method in ("ppo", "online_dpo") else ""
        raise RecipeError(
            f"TRL's {method} is not read",
            name,
            f"write its recipe by hand{by_hand}, or give the method that is meant with --method",
        )
    return method
