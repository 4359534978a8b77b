"""The calls of a training script as keys: those that load, adapt and train the model, and other models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.python_script import Call, Computed, calls_of
from memtrain.recipes.importers.script_arguments import MISSING
from memtrain.recipes.peers.table import table

LOAD, ADAPT, DATASET = "from_pretrained", "get_peft_model", "load_dataset"
"""Calls whose arguments are keys of these sections."""

OWN_DEFAULTS = "script.defaults"
"""Key of the names of a script's own arguments that no command gives."""

CONFIGS = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "GKDConfig": "distill",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
}
"""Configurations of TRL, and their method; `TrainingArguments` goes with the trainer beside it."""

TRAINERS = {name.replace("Config", "Trainer"): method for name, method in CONFIGS.items()}
ARGUMENTS = ("TrainingArguments", "UnslothTrainingArguments")
"""Configurations of any method."""

OTHER_BITS = (
    "AqlmConfig",
    "AwqConfig",
    "EetqConfig",
    "FineGrainedFP8Config",
    "GPTQConfig",
    "HqqConfig",
    "TorchAoConfig",
)
"""Quantizations that are not bitsandbytes'."""

_ROUNDINGS = ("BitsAndBytesConfig", *OTHER_BITS)
"""Configurations that a model is loaded with, where it is given them."""

_ANSWERS_ONLY = re.compile(
    r"^[^#\n]*\b(train_on_responses_only|DataCollatorForCompletionOnlyLM)\s*\(", re.MULTILINE
)
"""Calls that leave all but the assistant's turns out of the loss: Unsloth's, and one of TRL before 0.20."""
OWN_CODE = (
    "callbacks",
    "compute_loss_func",
    "compute_metrics",
    "data_collator",
    "environment_factory",
    "formatting_func",
    "optimizers",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)
"""Arguments of a trainer that are code of the script."""

_OF_TRAINERS = {*table("trl").rows, "max_seq_length"} - {"reward_funcs"}
"""Arguments of a trainer that are keys of its configuration; earlier trainers had many."""

_GIVEN = {
    "args",
    "eval_dataset",
    "model",
    "peft_config",
    "processing_class",
    "ref_model",
    "reward_model",
    "reward_processing_classes",
    "teacher_model",
    "tokenizer",
    "train_dataset",
}
"""Arguments of a trainer that are read by their own calls, or are rows."""

_PAIRED = ("DPOTrainer", "KTOTrainer")
"""Trainers whose second argument is the reference."""

_STANDBY = re.compile(r"""^[^#\n]*UNSLOTH_VLLM_STANDBY["']?\]?\s*(?:=|,)\s*["']?1""", re.M)
"""The variable that lets Unsloth's vLLM sleep."""


def script_config(
    text: str, name: str, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str, bool]:
    """(arguments as dotted keys, method, whether Unsloth is used) of a script. `given`: what a command gives
    of the script's own arguments.

    Raises: RecipeError when it is no Python, or calls no trainer.
    """
    calls, own = calls_of(text, name, given)
    defaults = [
        name for name, one in own.arguments.items() if one is not MISSING and name not in (given or {})
    ]
    config: dict[str, Any] = {OWN_DEFAULTS: defaults} if defaults else {}
    method = _method(calls, name)
    roles = dict(_roles(calls))
    references: list[Call] = []
    judges: set[str] = set()
    loads = any(call.name == LOAD for call in calls)
    for call in calls:
        role = roles.get(call.result, "") if call.result else ""
        if call.name == LOAD and role == "teacher":
            config |= _teacher(call)
        elif call.name == LOAD and role == "reference":
            references.append(call)
        elif call.name == LOAD and (
            role == "reward" or ("Classification" in call.owner and method != "reward")
        ):
            judges.add(call.result)
            config |= {} if _path(call) is None else {"reward_model_name_or_path": _path(call)}
        elif not (call.is_unread and call.name in _ROUNDINGS and loads):
            config |= _arguments(call)
    if set(re.findall(r"\w+", str(config.get("trainer.reward_funcs", "-")))) <= judges and judges:
        config.pop("trainer.reward_funcs", None)
    for call in references:
        path = _path(call)
        config["ref_model"] = "the same" if path in (None, config.get(f"{LOAD}.model_name")) else path
    if _ANSWERS_ONLY.search(text):
        config["assistant_only_loss"] = True
    if _STANDBY.search(text):
        config[f"{LOAD}.unsloth_vllm_standby"] = True
    return config, method, any("Fast" in call.owner for call in calls)


def _method(calls: Sequence[Call], name: str) -> str:
    found = [CONFIGS.get(call.name, TRAINERS.get(call.name, "")) for call in calls]
    method = next((one for one in reversed(found) if one), "")
    if not method and not any(call.name in ARGUMENTS for call in calls):
        raise RecipeError(
            f"{name} calls no trainer that is known ({', '.join(sorted(TRAINERS))})",
            name,
            "name the script that makes the trainer's configuration",
        )
    return method or "sft"


def _roles(calls: Sequence[Call]) -> Iterator[tuple[str, str]]:
    """(variable, role) of the models that a trainer is given beside its own."""
    for call in calls:
        if call.name not in TRAINERS:
            # Earlier scripts give a teacher to a trainer of their own.
            yield from _named(call.arguments.get("teacher_model"), "teacher")
            continue
        given = call.arguments
        reference = given.get("ref_model")
        if reference is None and call.name in _PAIRED and len(call.positional) > 1:
            reference = call.positional[1]
        yield from _named(given.get("teacher_model"), "teacher")
        yield from _named(reference, "reference")
        for key in ("reward_funcs", "reward_model"):
            yield from _named(given.get(key), "reward")


def _named(value: Any, role: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Computed):
        yield from ((word, role) for word in re.findall(r"\w+", value))


def _path(call: Call) -> Any:
    return call.positional[0] if call.positional else call.arguments.get("pretrained_model_name_or_path")


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call that says something of a run, as keys."""
    given = {key: value for key, value in call.arguments.items() if value is not None}
    if call.name == LOAD and re.search(r"Model|For(CausalLM|SequenceClassification)\b", call.owner):
        if call.positional:
            given.setdefault("model_name", call.positional[0])
        if "pretrained_model_name_or_path" in given:
            given["model_name"] = given.pop("pretrained_model_name_or_path")
        kept = {key: value for key, value in given.items() if key != "quantization_config"}
        return {f"{LOAD}.{key}": value for key, value in kept.items() if key != "torch_dtype"} | {
            f"{LOAD}.dtype": value for key, value in kept.items() if key == "torch_dtype"
        }
    if call.name == "BitsAndBytesConfig":
        read = ("load_in_", "bnb_4bit_quant_type")
        return {f"{LOAD}.{key}": value for key, value in given.items() if key.startswith(read)}
    if call.name in OTHER_BITS:
        return {f"{LOAD}.quantization_config": call.name}
    if call.name in (ADAPT, "LoraConfig"):
        kept = {key: value for key, value in given.items() if key not in ("task_type", "inference_mode")}
        return {f"{ADAPT}.{key}": value for key, value in kept.items()} | {f"{ADAPT}.used": True}
    if call.name in CONFIGS or call.name in ARGUMENTS:
        return given
    if call.name in TRAINERS or call.name == "UnslothTrainer":
        return _of_trainer(call, given)
    if call.name == "train" and "resume_from_checkpoint" in given:
        return {"resume_from_checkpoint": given["resume_from_checkpoint"]}
    if call.name == DATASET and call.positional:
        words = {f"{DATASET}.{key}": given[key] for key in ("name", "split", "data_files") if key in given}
        return {DATASET: call.positional[0]} | words
    return {}


def _of_trainer(call: Call, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer: keys of its configuration, models by name, and code of the script."""
    taken = {key: value for key, value in given.items() if key in _OF_TRAINERS}
    taken |= {
        f"trainer.{key}": one for key, one in given.items() if key not in _OF_TRAINERS and key not in _GIVEN
    }
    model = given.get("model") or next(iter(call.positional), None)
    if isinstance(model, str) and not isinstance(model, Computed):
        # A trainer of TRL loads a model that is given by its name.
        taken[f"{LOAD}.model_name"] = model
    if isinstance(given.get("teacher_model"), str) and not isinstance(given["teacher_model"], Computed):
        taken["teacher_model_name_or_path"] = given["teacher_model"]
    reward = given.get("reward_funcs")
    if isinstance(reward, str) and not isinstance(reward, Computed) and "/" in reward:
        del taken["trainer.reward_funcs"]
        taken["reward_model_name_or_path"] = reward
    return taken


def _teacher(call: Call) -> dict[str, Any]:
    """The teacher's path and arguments; it is loaded by a call like the student's."""
    more = {key: value for key, value in call.arguments.items() if value is not None}
    path = call.positional[0] if call.positional else more.pop("pretrained_model_name_or_path", None)
    more.pop("device_map", None)
    found: dict[str, Any] = {} if path is None else {"teacher_model_name_or_path": path}
    return found | ({"teacher_model_init_kwargs": cast(Any, more)} if more else {})
