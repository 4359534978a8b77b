"""Every key of every tool's own schema has a row, and every row leads to a key that is there.

The keys were recorded by `benchmarks/record_tool_fields.py`, with their source and commit.
"""

import inspect
import json
from pathlib import Path

import pytest

from memtrain.recipes.importers.guess import UNREAD
from memtrain.recipes.importers.importing import TOOLS
from memtrain.recipes.importers.own_changes import changes_of
from memtrain.recipes.peers.savings import KINDS
from memtrain.recipes.peers.table import tables
from memtrain.recipes.trl import groups
from memtrain.recipes.trl.distillation import distillation
from memtrain.recipes.trl.page import tools_table
from memtrain.recipes.trl.writing import default_of

DATA = Path(__file__).parents[1] / "data"
TRL = TOOLS["trl"].table
OTHERS = [name for name in TOOLS if name != "trl"]


def recorded(name: str) -> set[str]:
    fields = set(json.loads((DATA / f"{name}_fields.json").read_text())["fields"])
    return {key.partition(".")[2] for key in fields} if name == "verl" else fields


@pytest.mark.parametrize("name", OTHERS)
def test_every_key_of_the_schema_has_a_row(name: str):
    assert [key for key in recorded(name) if TOOLS[name].row(key) is None] == []


def test_every_row_leads_to_a_key_that_is_there():
    for one in tables():
        for key, row in one.rows.items():
            if row.to and "{" not in row.to:
                default_of(row.to)
            assert not row.trl or row.trl in TRL.rows, key
            assert one.name != "trl" or not row.trl, key
        assert set(one.assumed) <= set(TRL.rows)


def test_every_group_is_a_function_that_reads_it():
    """`with` names a function of the tool's module, or of TRL's groups."""
    for name, tool in TOOLS.items():
        there = set(vars(inspect.getmodule(tool.read)))
        if name == "trl":
            there = {one.__name__ for one in (*groups.ALL, distillation)} | {"engine"}
        named = {row.group for row in tool.table.rows.values()} - {""}
        assert {one for one in named if one not in there and f"_{one}" not in there} == set(), name


def test_every_change_that_saves_memory_is_of_a_known_kind():
    kinds = {saving.change for one in tables() for row in one.rows.values() for saving in row.saves}
    assert kinds | {"segments"} == set(KINDS)


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
    known = set(TRL.rows) if TOOLS[name].takes_trl else recorded(name) | {"deepspeed"}
    known |= recorded(name) if name != "trl" else set()
    known |= {"from_pretrained.unsloth_vllm_standby"} if name == "unsloth" else set()
    for config in WRITTEN[name]:
        for change in changes_of(name, method, 8):
            edited = change.edit(config)
            assert set(edited) <= known, edited
            for key in edited:
                assert TOOLS[name].row(key) is not None, key


def test_a_script_has_the_changes_of_trl_with_its_own_keys():
    edits = [change.edit({}) for change in changes_of("unsloth", "dpo", 4, is_script=True)]
    keys = {key for edit in edits for key in edit}
    assert {"accelerate_config", "precompute_ref_log_probs", "activation_offloading"} <= keys
    assert {"get_peft_model.r", "from_pretrained.load_in_4bit", "use_liger_kernel"} <= keys
    assert "use_peft" not in keys


def test_the_page_has_the_tools_as_their_tables_say_and_names_those_that_are_not_read():
    page = (Path(__file__).parents[3] / "docs" / "importing.md").read_text()
    assert tools_table() in page
    assert [title for title in UNREAD if title not in page] == []
