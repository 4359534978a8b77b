"""Every key of every tool's own schema has a rule, and every rule leads to a key that is there.

The keys were recorded by `benchmarks/record_tool_fields.py`, with their source and commit.
"""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from memtrain.recipes.importers.importing import TOOLS
from memtrain.recipes.importers.own_changes import changes_of
from memtrain.recipes.importers.script_calls import OWN_CODE
from memtrain.recipes.importers.tool import TrlKey
from memtrain.recipes.importers.unsloth import LOADING
from memtrain.recipes.trl.keys import KEYS as TRL_KEYS
from memtrain.recipes.trl.rules import RecipeKey
from memtrain.recipes.trl.writing import default_of

DATA = Path(__file__).parents[1] / "data"
OTHERS = [name for name in TOOLS if name != "trl"]

BESIDE_THE_SCHEMA = {
    "axolotl": {"model_type", "swanlab_*", "use_swanlab"},
    "llamafactory": {
        "num_train_epochs",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "predict_with_generate",
        "lora_modules_to_save",
    },
    "unsloth": {
        "from_pretrained.unsloth_vllm_standby",
        "from_pretrained.attn_implementation",
        "from_pretrained.torch_dtype",
        "get_peft_model.use_dora",
        "dataset_text_field",
        "load_dataset",
        "load_dataset.name",
        "load_dataset.split",
        "load_dataset.data_files",
        "script.defaults",
        "deepspeed",
        "fsdp",
        "fsdp_config",
        "fsdp_transformer_layer_cls_to_wrap",
        "vllm_device",
        "ref_model",
        "reward_model_name_or_path",
        "unsloth",
        "from_pretrained.bnb_4bit_quant_type",
        "from_pretrained.quantization_config",
        "get_peft_model.used",
        *(f"from_pretrained.{key}" for key in LOADING),
        *(f"trainer.{key}" for key in OWN_CODE),
    },
    "verl": {"actor_rollout_ref.actor.optim.lr_scheduler", "ray_init.*", "profiler*"},
}
"""Keys of earlier versions, of transformers, and of the calls beside the tool's own."""


def recorded(name: str) -> set[str]:
    fields = set(json.loads((DATA / f"{name}_fields.json").read_text())["fields"])
    return {key.partition(".")[2] for key in fields} if name == "verl" else fields


@pytest.mark.parametrize("name", OTHERS)
def test_every_key_of_the_schema_has_a_rule(name: str):
    assert [key for key in recorded(name) if TOOLS[name].rule(key) is None] == []


@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_is_of_a_key_that_the_tool_has(name: str):
    fields = recorded(name)
    stale = {key for key in TOOLS[name].keys if not any(fnmatchcase(field, key) for field in fields)}
    assert stale == BESIDE_THE_SCHEMA[name]


@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_leads_to_a_key_that_is_there(name: str):
    tool = TOOLS[name]
    assert [
        key for key, rule in tool.keys.items() if isinstance(rule, TrlKey) and rule.key not in TRL_KEYS
    ] == []
    assert [key for key in tool.defaults if key not in TRL_KEYS] == []
    for rule in tool.keys.values():
        if isinstance(rule, RecipeKey):
            default_of(rule.key)


@pytest.mark.parametrize("name", OTHERS)
def test_a_recording_says_where_it_is_from(name: str):
    made = json.loads((DATA / f"{name}_fields.json").read_text())
    assert len(made["source"].split()[-1]) == 40
    assert made["date"] > "2026"


WRITTEN = {
    "trl": ({"use_vllm": True}, {}),
    "axolotl": ({"eager_attention": True, "micro_batch_size": 4}, {"adapter": "lora"}),
    "llamafactory": (
        {"finetuning_type": "full"},
        {"finetuning_type": "lora", "disable_gradient_checkpointing": True},
    ),
    "unsloth": ({"unsloth": True, "from_pretrained.fast_inference": True}, {"unsloth": True}),
    "verl": ({}, {"data.micro_batch_size_per_gpu": 8}),
}
"""Configurations in which each change of a tool finds something to change."""


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_every_key_that_a_rescue_changes_is_of_the_tools_own_schema(name: str, method: str):
    """A change that the tool does not know would be read over, or end the run."""
    known = set(TRL_KEYS) | {"accelerate_config"} if name == "trl" else recorded(name) | {"deepspeed"}
    known |= set(TRL_KEYS) if TOOLS[name].takes_trl else set()
    known |= {"from_pretrained.unsloth_vllm_standby"} if name == "unsloth" else set()
    for config in WRITTEN[name]:
        for change in changes_of(name, method, 8):
            edited = change.edit(config)
            assert set(edited) <= known, edited
            for key in edited:
                rule = TOOLS[name].rule(key)
                assert rule is not None or (name == "trl" and key in TRL_KEYS), key


def test_a_script_has_the_changes_of_trl_with_its_own_keys():
    edits = [change.edit({}) for change in changes_of("unsloth", "dpo", 4, is_script=True)]
    keys = {key for edit in edits for key in edit}
    assert {"accelerate_config", "precompute_ref_log_probs", "activation_offloading"} <= keys
    assert {"get_peft_model.r", "from_pretrained.load_in_4bit", "gradient_checkpointing"} <= keys
    assert "use_peft" not in keys
