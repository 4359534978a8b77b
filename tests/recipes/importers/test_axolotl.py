"""Axolotl's configurations become recipes that train what Axolotl 0.19.0 trains, or say what they do not."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from memtrain.errors import RecipeError
from memtrain.recipes.importers.importing import TOOLS, Foreign, Imported, import_config, read_foreign
from memtrain.recipes.recipe import Recipe

ROWS = "datasets: [{path: org/rows, type: chat_template}]\n"
ADAPTER = "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"


def made(folder: Path, text: str, rows: str = ROWS) -> tuple[Recipe, Imported]:
    file = folder / "run.yml"
    file.write_text(f"base_model: a/b\nlearning_rate: 1e-5\nmicro_batch_size: 2\n{rows}{text}")
    found = import_config(read_foreign(str(file), "axolotl"))
    assert found.faults == []
    return found.whole(), found


def at(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"length.truncation": "drop", "length.max_length": 512, "optim.warmup_ratio": 0.03}),
        ("", {"optim.schedule": "cosine", "train.seed": 42, "save.keep": 4, "train.epochs": 1}),
        ("max_steps: 1000\n", {"optim.warmup_steps": 30, "train.max_steps": 1000}),
        ("max_steps: 40\n", {"optim.warmup_steps": 2}),
        ("max_steps: 9000\n", {"optim.warmup_steps": 100}),
        ("warmup_steps: 5\n", {"optim.warmup_steps": 5}),
        ("warmup_ratio: 0.1\n", {"optim.warmup_ratio": 0.1}),
        ("sequence_len: 4_096\n", {"length.max_length": 4096}),
        ("excess_length_strategy: truncate\n", {"length.truncation": "keep_start"}),
        ("excess_length_strategy: raise\n", {"length.truncation": "drop"}),
        ("sample_packing: true\n", {"length.packing": "bfd", "length.truncation": "drop"}),
        ("batch_size: 8\n", {"train.batch_size": 8}),
        ("curriculum_sampling: true\n", {"train.shuffle": False}),
        ("shuffle_merged_datasets: false\n", {"train.shuffle": True}),
        ("train_on_inputs: true\n", {"data.assistant_only_loss": False}),
        ("train_on_inputs: false\n", {"data.assistant_only_loss": True, "data.completion_only_loss": None}),
        ("bf16: true\n", {"model.dtype": "bfloat16"}),
        ("fp16: true\n", {"model.dtype": "float16"}),
        ("bf16: false\n", {"model.dtype": "float32"}),
        ("optimizer: adamw_torch_8bit\n", {"optim.kind": "adamw_8bit"}),
        ("liger_use_token_scaling: true\n", {"sft.loss": "dft"}),
        ("val_set_size: 0.1\neval_steps: 20\n", {"eval.every_steps": 20, "eval.at_start": True}),
        (
            "val_set_size: 0.1\nevals_per_epoch: 4\nsaves_per_epoch: 2\n",
            {"eval.per_epoch": 4, "save.per_epoch": 2, "eval.at_start": True},
        ),
        ("saves_per_epoch: 1\nevals_per_epoch: 4\n", {"save.per_epoch": None, "eval.per_epoch": None}),
        ("val_set_size: 0.1\nnum_epochs: 2\neval_steps: 0.05\n", {"eval.per_epoch": 10}),
        ("val_set_size: 0.1\n", {"data.eval_fraction": 0.1, "eval.at_start": False}),
        ("context_parallel_size: 2\ndp_shard_size: 2\n", {"cluster.processes": 4, "train.batch_size": 4}),
        ("use_ray: true\nray_num_workers: 4\n", {"cluster.processes": 4, "train.batch_size": 8}),
        ("fsdp_config: {fsdp_activation_checkpointing: true}\n", {"memory.activation_checkpointing": "on"}),
        ("activation_offloading: true\n", {"memory.activation_offloading": "on"}),
        ("chat_template: llama3\n", {"model.chat_template": "llama3"}),
        ("model_revision: abc\n", {"model.revision": "abc"}),
        ("attn_implementation: xformers\n", {"model.attention": "auto"}),
        ("rl: orpo\n", {"dpo.parts": {"sft": 1.0, "orpo": 0.1}, "length.truncation": "drop"}),
        ("rl: orpo\norpo_alpha: 0.3\n", {"dpo.parts": {"sft": 1.0, "orpo": 0.3}}),
        ("rl: orpo\nrl_beta: 0.2\norpo_alpha: 0.3\n", {"dpo.parts": {"sft": 1.0, "orpo": 0.2}}),
        ("rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 0.7\n", {"dpo.parts": {"simpo": 1.0, "sft": 1.0}}),
        ("rl: simpo\ncpo_alpha: 0.5\nrl_beta: 2.0\n", {"dpo.parts": {"simpo": 1, "sft": 0.5}, "dpo.beta": 2}),
        ("rl: simpo\ncpo_alpha: 0\n", {"dpo.parts": {"simpo": 1.0}}),
        ("rl: ipo\nrl_beta: 0.4\n", {"dpo.loss": ("ipo",), "dpo.beta": 0.4}),
        (
            "rl: dpo\ndpo_loss_type: [sigmoid, sft]\ndpo_loss_weights: [1.0, 0.2]\n",
            {"dpo.parts": {"sigmoid": 1.0, "sft": 0.2}},
        ),
        ("reward_model: true\n", {"method": "reward", "length.truncation": "keep_start"}),
    ],
)  # fmt: skip
def test_keys_and_defaults_are_axolotls(tmp_path: Path, text: str, expected: dict[str, Any]):
    recipe, _ = made(tmp_path, text)
    assert {key: at(recipe, key) for key in expected} == expected


def test_an_adapter_that_names_no_rank_has_pefts(tmp_path: Path):
    recipe, _ = made(tmp_path, "adapter: lora\nlora_target_linear: true\n")
    assert recipe.model.adapter is not None
    assert (recipe.model.adapter.r, recipe.model.adapter.alpha, recipe.model.adapter.dropout) == (8, 8, 0)


def test_an_adapter_that_is_trained_on_has_its_own_shape(tmp_path: Path):
    own = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(own))
    recipe, _ = made(tmp_path, f"{ADAPTER}lora_model_dir: {tmp_path}\n")
    assert recipe.model.adapter is not None
    assert (recipe.model.adapter.r, recipe.model.adapter.target_modules) == (4, ("q_proj",))
    _, found = made(tmp_path, f"{ADAPTER}lora_model_dir: {tmp_path}/elsewhere\n")
    assert any("model.adapter.path" in line for line in found.notes)


def test_grpo_is_of_the_trl_that_axolotl_pins(tmp_path: Path):
    asked = (
        "trl: {beta: 0.001, use_vllm: true, reward_funcs: [mine.score, org/judge], reward_weights: [1, 2]}\n"
    )
    recipe, found = made(
        tmp_path, f"rl: grpo\n{asked}vllm: {{gpu_memory_utilization: 0.85}}\nsequence_len: 700\n"
    )
    assert recipe.online is not None
    assert at(recipe, "grpo.unbiased_kl") is False
    assert recipe.length.max_length is None
    assert recipe.generation.max_tokens == 256
    assert recipe.generation.vllm is not None
    assert recipe.generation.vllm.memory_share == 0.3
    assert "{model: {path: org/judge}, weight: 2}" in found.text
    gdpo, _ = made(tmp_path, "rl: gdpo\ntrl: {reward_funcs: [mine.score]}\n")
    assert (gdpo.method, at(gdpo, "grpo.combine_rewards")) == ("grpo", "normalize_then_sum")


CHATS = "path: org/rows, type: chat_template"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            f"{CHATS}, field_messages: dialog, field_tools: calls",
            {"columns": {"messages": "dialog", "tools": "calls"}},
        ),
        (f"{CHATS}, revision: abc, name: en", {"revision": "abc", "name": "en"}),
        (f"{CHATS}, split: validation", {"split": "validation"}),
        (f"{CHATS}, split: 'train[:500]'", {"limit": 500}),
        ("path: org/rows, type: completion, field: body", {"format": "text", "columns": {"text": "body"}}),
        ("path: json, data_files: a.jsonl, type: completion", {"source": "a.jsonl", "format": "text"}),
        ("path: ./rows.jsonl, split: train, revision: abc, type: chat_template", {"source": "./rows.jsonl"}),
    ],
)  # fmt: skip
def test_keys_of_a_dataset_are_carried(tmp_path: Path, entry: str, expected: dict[str, Any]):
    _, found = made(tmp_path, "", f"datasets: [{{{entry}}}]\n")
    source = yaml.safe_load(found.text)["data"]["train"][0]
    assert {key: source[key] for key in expected} == expected
    assert not any("datasets" in line and "not carried" in line for line in found.notes)
    if "./" in entry:
        assert set(source) == {"source", "format"}


def test_every_file_and_name_of_a_dataset_is_a_source(tmp_path: Path):
    files = "{path: json, data_files: [a.jsonl, b.jsonl], type: chat_template}"
    rows = f"datasets: [{files}, {{path: o/r, name: [x, y]}}]\n"
    _, found = made(tmp_path, "", rows)
    sources = yaml.safe_load(found.text)["data"]["train"]
    assert [(one["source"], one.get("name")) for one in sources] == [
        ("a.jsonl", None), ("b.jsonl", None), ("o/r", "x"), ("o/r", "y"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("message_property_mappings", "{role: speaker, content: words}"),
        ("message_field_role", "speaker"),
        ("roles", "{assistant: [bard]}"),
        ("roles_to_train", "[user]"),
        ("roles_to_train", "[]"),
        ("train_on_eos", "all"),
        ("train_on_eot", "none"),
        ("drop_system_message", "true"),
        ("split_thinking", "true"),
        ("field_thinking", "why"),
        ("message_field_training", "learn"),
        ("message_field_training_detail", "parts"),
        ("field_system", "rules"),
        ("shards", "4"),
        ("split", "'train[:20%]'"),
        ("split", "train+test"),
        ("data_files", "a.jsonl"),
        ("conversation", "chatml"),
        ("input_transform", "mine.fn"),
        ("temperature", "3"),
        ("chat_template_jinja", "'{{ messages }}'"),
        ("field_mesages", "dialog"),
        ("type", "mine.load"),
    ],
)
def test_what_a_dataset_loses_is_named(tmp_path: Path, key: str, value: str):
    rows = "datasets: [{path: org/rows, " + ("" if key == "type" else "type: chat_template, ")
    _, found = made(tmp_path, "", f"{rows}{key}: {value}}}]\n")
    assert any(f"datasets.{key}: " in line for line in found.notes)
    assert f"datasets.{key}: " in found.text


@pytest.mark.parametrize(
    "entry",
    ["roles: {user: [human], assistant: [gpt, assistant]}",
     "message_property_mappings: {role: from, content: value}", "train_on_eos: turn",
     "roles_to_train: [assistant]", "message_field_training: train", "shards: null"],
)  # fmt: skip
def test_what_is_so_anyway_is_not_said(tmp_path: Path, entry: str):
    _, found = made(tmp_path, "", f"datasets: [{{{CHATS}, {entry}}}]\n")
    assert not any("datasets" in line for line in found.notes)


ASKS = "Below is an instruction that describes a task"
WRITTEN = {
    "alpaca": (
        f"{ASKS}. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{instruction}\n\n### Response:\n"
    ),
    "'alpaca:chat'": (
        f"SYSTEM: {ASKS}. Write a response that appropriately completes the request.\n"
        "USER: {instruction}\nASSISTANT:"
    ),
    "alpaca_instruct.load_no_prompt": "### Instruction:\n{instruction}\n\n### Response:\n",
    "{format: 'Q {instruction} {input}', no_input_format: 'Q {instruction}', system_prompt: S}": (
        "SQ {instruction}"
    ),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_prompts_are_written_as_axolotl_writes_them(tmp_path: Path, kind: str):
    recipe, _ = made(tmp_path, "", f"datasets: [{{path: o/r, type: {kind}}}]\n")
    source = recipe.data.train[0]
    assert source.format == "alpaca"
    assert source.prompt_format is not None
    assert source.prompt_format.text == WRITTEN[kind]
    assert "{input}" in str(source.prompt_format.with_input)


def test_pairs_of_a_type_are_turns_of_its_template(tmp_path: Path):
    rows = "datasets: [{path: o/r, type: chatml.intel}]\n"
    recipe, _ = made(tmp_path, "rl: dpo\n", rows)
    source = recipe.data.train[0]
    assert source.columns is not None
    assert (source.columns.prompt, source.strings_are, recipe.model.chat_template) == (
        "question",
        "turns",
        "chatml",
    )


@pytest.mark.parametrize(
    ("text", "packing", "crosses"),
    [
        ("sample_packing: true\n", "bfd_split", False),
        ("sample_packing: true\npretrain_multipack_attn: false\n", "wrapped", True),
        ("", "wrapped", True),
    ],
)
def test_documents_share_sequences_and_stream(tmp_path: Path, text: str, packing: str, crosses: bool):
    rows = "pretraining_dataset: [{path: org/texts, text_column: body, split: train}]\n"
    recipe, _ = made(tmp_path, f"max_steps: 100\n{text}", rows)
    assert (recipe.length.packing, recipe.length.cross_document_attention) == (packing, crosses)
    assert recipe.data.streaming
    source = recipe.data.train[0]
    assert source.columns is not None
    assert (source.format, source.columns.text) == ("text", "body")


@pytest.mark.parametrize("kind", ["completion", "completion.load"])
def test_long_texts_are_split_not_cut(tmp_path: Path, kind: str):
    recipe, _ = made(tmp_path, "sample_packing: true\n", f"datasets: [{{path: o/r, type: {kind}}}]\n")
    assert (recipe.length.packing, recipe.data.train[0].format) == ("bfd_split", "text")


@pytest.mark.parametrize(
    ("plugins", "text", "loss"),
    [
        ("cut_cross_entropy.CutCrossEntropyPlugin", "", "chunked"),
        ("cut_cross_entropy.CutCrossEntropyPlugin", "cut_cross_entropy: false\n", "full"),
        ("liger.LigerPlugin", "liger_fused_linear_cross_entropy: true\n", "chunked"),
        ("liger.LigerPlugin", "", "full"),
        ("cut_cross_entropy.CutCrossEntropyPlugin", "rl: dpo\n", "full"),
        ("cut_cross_entropy.CutCrossEntropyPlugin", "rl: kto\n", "full"),
        ("cut_cross_entropy.CutCrossEntropyPlugin", "reward_model: true\n", "full"),
    ],
)
def test_a_fused_loss_is_its_plugins_and_of_sft(tmp_path: Path, plugins: str, text: str, loss: str):
    _, found = made(tmp_path, f"plugins: [axolotl.integrations.{plugins}]\n{text}")
    assert found.pins["memory.loss"] == loss


@pytest.mark.parametrize(
    "text",
    ["process_reward_model: true\n", "rl: ebft\n", "trainer_cls: mine.Trainer\n", "kd_trainer: true\n",
     "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]\n"],
)  # fmt: skip
def test_what_trains_something_else_is_refused(tmp_path: Path, text: str):
    with pytest.raises(RecipeError):
        made(tmp_path, text)


ODD: tuple[Any, ...] = (False, -1, "x", [], [[1]], {"a": [1]}, ["a", {"b": 1}])


OF_ANY_KIND = (
    *(
        "learning_rate",
        "rl_beta",
        "chat_template",
        "lr_scheduler_kwargs",
        "bnb_config_kwargs",
        "datasets",
        "rl",
    ),
    *("context_parallel_size", "special_tokens", "tokens", "fsdp_config", "plugins", "eval_steps"),
)


@pytest.mark.parametrize("key", OF_ANY_KIND)
def test_a_value_of_another_kind_is_refused_or_read(key: str):
    tool, base = TOOLS["axolotl"], {"base_model": "a/b", "adapter": "qlora", "val_set_size": 0.1}
    for value in ODD:
        with suppress(RecipeError):
            import_config(Foreign(tool, {**base, key: value}, None, 1, "run.yml"))


@pytest.mark.parametrize(
    "key", ["roles", "roles_to_train", "message_property_mappings", "split", "data_files", "type", "name"]
)
def test_a_dataset_of_another_kind_is_refused_or_read(key: str):
    for value in ODD:
        entry = {"path": "o/r", "type": "chat_template", key: value}
        import_config(
            Foreign(TOOLS["axolotl"], {"base_model": "a/b", "datasets": [entry]}, None, 1, "run.yml")
        )
