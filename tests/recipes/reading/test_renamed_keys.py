import re

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.peers.hints import hints, words_of_values
from memtrain.recipes.peers.table import table
from memtrain.recipes.reading.field_types import (
    choices,
    every_key,
    field_types,
    follow,
    item_of,
    section_of,
)
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.reading.unknown_keys import unknown_key
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.reference.starter import starter_recipe
from memtrain.recipes.sections.length import Length

RENAMED_KEYS = {word: advice for word, advice in hints().items() if "." not in word}
IN_SECTION = {
    row.key: row.words
    for heading, rows in table("others").sections()
    for row in rows
    if heading.startswith("Words that mean")
}
NAMED = ["max_seq_length", "use_liger_loss", "use_liger_kernel", "vllm_sleep_enabled"]
NAMED += ["per_device_train_batch_size", "gradient_accumulation_steps", "max_prompt_length", "learning_rate"]
NAMED += ["num_train_epochs", "model_name_or_path", "dataset_name", "gradient_checkpointing", "lora_r"]
NAMED += ["load_in_4bit", "sequence_len", "micro_batch_size", "output_dir"]


def test_the_table_knows_the_spellings_that_people_bring():
    assert len(RENAMED_KEYS) >= 60
    assert not [name for name in NAMED if name not in RENAMED_KEYS]


def test_every_replacement_is_a_key_of_the_recipe():
    known = every_key(Recipe)
    for old, way_out in (RENAMED_KEYS | IN_SECTION).items():
        keys = [found for found in re.findall(r"`([a-z_.]+)", way_out) if found[0].isalpha()]
        assert keys or way_out.startswith("remove it"), old
        assert way_out.startswith("remove it") or not [key for key in keys if key not in known], old


@pytest.mark.parametrize("key", sorted(words_of_values()))
def test_every_replaced_value_is_legal_where_it_stands(key: str):
    annotation = follow(Recipe, tuple(key.split(".")))[1]
    assert set(words_of_values()[key].values()) <= set(choices(annotation))


def test_an_old_spelling_is_never_a_key_of_the_section_it_is_replaced_in():
    for old, advice in RENAMED_KEYS.items():
        new = [] if advice.startswith("remove it") else re.findall(r"`([a-z_.]+)", advice)
        section = section_of(field_types(Recipe)[new[0].split(".")[0]]) if new and "." in new[0] else None
        assert section is None or old not in section.model_fields or new[0].endswith(f".{old}"), old


@pytest.mark.parametrize("old", sorted(IN_SECTION))
def test_a_word_of_a_section_is_no_key_of_it_and_leads_to_ours(old: str):
    section, _, key = old.rpartition(".")
    assert old not in every_key(Recipe)
    annotation = follow(Recipe, tuple(section.split(".")))[1] if section else Recipe
    item = item_of(annotation)
    found = unknown_key(
        key,
        (section_of(annotation) or section_of(item) or Recipe) if section else Recipe,
        tuple(section.split(".")) if section else (),
    )
    assert found.fix.removeprefix("write ") == IN_SECTION[old]


def test_rows_at_most_lead_to_the_limit_of_a_source():
    data = section_of(field_types(Recipe)["data"])
    assert data is not None
    assert unknown_key("max_rows", data, ("data",)).fix == "write `data.train.limit`"


@pytest.mark.parametrize(
    ("section", "word", "ours"),
    [
        ("train", "optim", "optim.kind"),
        ("train", "early_stopping_patience", "eval.early_stopping.patience"),
        ("eval", "early_stopping_threshold", "eval.early_stopping.min_gain"),
        ("train", "fp16", "model.dtype: float16"),
        ("model", "bnb_4bit_compute_dtype", "model.dtype"),
    ],
)
def test_a_word_in_another_section_leads_to_the_key_itself(section: str, word: str, ours: str):
    found = unknown_key(word, section_of(field_types(Recipe)[section]), (section,))
    assert found.fix.startswith(f"write `{ours}`")


def test_double_quantization_is_told_whatever_it_is_called():
    words = ("double_quantization", "bnb_4bit_use_double_quant", "use_bnb_nested_quant", "double_quant")
    assert {unknown_key(word, Recipe, ()).fix for word in words} == {
        "remove it: `model.quantize: 4bit` is NF4 with double quantization always"
    }


def test_capitals_and_dashes_do_not_hide_an_old_spelling():
    assert unknown_key("Learning-Rate", Recipe, ()).fix == "write `optim.lr`"


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rat", "optim.lr"),
        ("max_seq_lenght", "length.max_length"),
        ("gradient_acumulation_steps", "train.batch_size"),
        ("output_dirr", "run_dir"),
    ],
)
def test_a_misspelt_old_spelling_leads_to_our_key(key: str, ours: str):
    found = unknown_key(key, Recipe, ())
    assert found.fix.startswith("did you mean '")
    assert f"? Write `{ours}`" in found.fix
    assert found.meant == (ours,)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("galore_rank", "`optim.kind`"),
        ("load_in_16bit", "`model.dtype`"),
        ("num_iterations", "`grpo.updates_per_rollout`"),
        ("num_ppo_epochs", "`ppo.updates_per_rollout`"),
        ("local_rank", "remove it: the launcher"),
        ("flex_attention", "`model.attention: flex`"),
        ("peft_use_rslora", "`model.adapter.rslora`"),
        ("log_every_n_steps", "`log.every_steps`"),
        ("checkpointer", "`model.path`"),
        ("packed", "`length.packing: bfd`"),
        ("ddp", "`cluster.engine`"),
        ("use_swanlab", "remove it"),
    ],
)
def test_a_word_of_another_trainer_is_not_taken_for_one_that_looks_alike(word: str, ours: str):
    """`load_in_16bit` led to 8-bit weights, `galore_rank` to the rank of an adapter."""
    assert unknown_key(word, Recipe, ()).fix.removeprefix("write ").startswith(ours)


@pytest.mark.parametrize(
    ("key", "below", "ours"),
    [("0", ["limit"], "data.train.limit"), ("1", ["weight"], "data.train.weight")],
)
def test_a_number_where_no_list_stands_leads_to_the_key_without_it(key: str, below: list[str], ours: str):
    train = section_of(item_of(follow(Recipe, ("data", "train"))[1]))
    assert train is not None
    found = unknown_key(key, train, ("data", "train"), below=below)
    assert found.fix == f"leave the number out: `{ours}`"
    assert found.meant == (ours,)


def test_a_misspelling_of_our_own_key_goes_before_an_old_spelling():
    assert unknown_key("max_lenght", Length, ("length",)).meant == ("length.max_length",)


@pytest.mark.parametrize("old", sorted(old for old, said in RENAMED_KEYS.items() if "by default" in said))
def test_a_default_that_is_reported_is_the_default(old: str):
    """`... auto by default`: a value of the key before these words is the default of the field."""
    key = re.findall(r"`([a-z_.]+)", RENAMED_KEYS[old])[0]
    section, name = key.split(".")
    default = section_of(field_types(Recipe)[section]).model_fields[name].default
    reported = re.findall(r"(\w+) by default", RENAMED_KEYS[old])
    legal = choices(follow(Recipe, tuple(key.split(".")))[1])
    assert not [word for word in reported if word in legal and word != default]


@pytest.mark.parametrize("spelling", ["online-dpo", "Online DPO", "ONLINE_DPO"])
def test_a_method_is_known_however_a_recipe_spells_it(spelling: str):
    text = starter_recipe("online_dpo", "r.yaml").replace("method: online_dpo", f"method: {spelling}")
    loaded = load_text(text, "r.yaml")
    assert loaded.recipe.method == "online_dpo"


PEERS = ["epsilon", "full_finetuning", "random_state", "train_on_responses_only", "response_template"]
PEERS += ["use_unsloth", "saves_per_epoch", "evals_per_epoch", "special_tokens", "resize_vocab"]
PEERS += ["unfrozen_parameters", "cut_cross_entropy", "plugins", "wandb_entity", "pref_loss"]
PEERS += [
    "double_quantization",
    "use_galore",
    "enable_thinking",
    "steps_per_generation",
    "mask_truncated_completions",
]
PEERS += ["token", "images"]
# Of TRL, Axolotl, LLaMA-Factory, Unsloth and torchtune, as people have them in their files.
PEERS += ["shuffle_dataset", "disable_dropout", "f_divergence_type", "kl_coef", "cliprange", "lam", "judge"]
PEERS += ["model_type", "lora_model_dir", "loss_watchdog_threshold", "noisy_embedding_alpha", "eot_tokens"]
PEERS += ["excess_length_strategy", "lora_mlp_kernel", "do_bench_eval", "test_datasets", "wandb_name"]
PEERS += ["booster", "neat_packing", "infer_backend", "pure_bf16", "use_muon", "predict_with_generate"]
PEERS += ["use_gradient_checkpointing", "max_lora_rank", "gpu_memory_utilization", "instruction_part"]
PEERS += ["_component_", "checkpoint_dir", "optimizer_in_bwd", "clip_grad_norm", "fsdp_cpu_offload"]
PEERS += ["run_val_every_n_steps", "metric_logger", "apply_lora_to_mlp", "enable_async_checkpointing"]


@pytest.mark.parametrize("word", PEERS)
def test_no_word_of_another_trainer_is_answered_with_a_list_of_all_keys(word: str):
    fix = unknown_key(word, Recipe, ()).fix
    assert fix.startswith(("write `", "remove it"))


MODEL_AND_DATA = "model: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\n"


@pytest.mark.parametrize("key", ["rewards", "eval.metrics"])
def test_a_function_in_the_place_of_its_section_leads_to_the_line_to_write(key: str):
    section, _, inner = key.partition(".")
    written = f"{section}: {{{inner}: ./f.py:exact}}" if inner else f"{section}: ./f.py:exact"
    method = "sft" if inner else "grpo"
    text = (
        f"method: {method}\nmodel: {{path: builtin:tiny}}\ndata: {{train: builtin:arithmetic}}\n{written}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_text(text, "r.yaml")
    fixes = [one.fix for one in caught.value.faults]
    assert f"write {inner or section}: {{functions: ./f.py:exact}}" in fixes


def test_a_long_list_of_names_is_told_once():
    """The same 28 names stood in the error and in the advice."""
    text = (
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\nmemory: {use: [zzz]}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_text(text, "r.yaml")
    (fault,) = caught.value.faults
    assert fault.what.startswith("memory.use.0: 'zzz' is not one of padding_free, ")
    assert fault.fix == "write one of these names, or remove it"
