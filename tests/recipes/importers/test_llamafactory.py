"""LLaMA-Factory's configurations: the rows, the losses and the lengths that they train with."""

import json
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.formats.fields import BadRow, message_of
from memtrain.recipes.importers.importing import Imported, import_config, read_foreign
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.recipe import Recipe

PLAIN = "model_name_or_path: Qwen/Qwen2.5-7B\n"


def of_keys(folder: Path, keys: str) -> tuple[Recipe, Imported]:
    file = folder / "run.yaml"
    file.write_text(PLAIN + ("" if "\ndataset: " in keys else "dataset: x\n") + keys)
    made = import_config(read_foreign(str(file), "llamafactory"))
    assert made.faults == []
    return load_text(made.text, "recipe.yaml").recipe, made


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ("", {"sigmoid": 1.0}),
        ("pref_loss: hinge\n", {"hinge": 1.0}),
        ("pref_ftx: 0.5\n", {"sigmoid": 1.0, "sft": 0.5}),
        ("pref_loss: ipo\npref_ftx: 1\n", {"ipo": 1.0, "sft": 1.0}),
        ("pref_loss: orpo\npref_beta: 0.2\n", {"sft": 1.0, "orpo": 0.2}),
        ("pref_loss: orpo\npref_ftx: 0.5\n", {"sft": 1.5, "orpo": 0.1}),
        ("pref_loss: simpo\npref_beta: 2.5\nsimpo_gamma: 1.0\n", {"simpo": 1.0}),
        ("pref_bco_weight: 0.25\n", {"sigmoid": 0.8, "bco_pair": 0.2}),
    ],
)
def test_the_loss_of_pairs_has_all_its_parts(keys: str, parts: dict[str, float], tmp_path: Path):
    recipe, made = of_keys(tmp_path, f"stage: dpo\n{keys}")
    assert recipe.dpo is None or recipe.dpo.parts == pytest.approx(parts)
    assert (recipe.dpo is None) == (parts == {"sigmoid": 1.0})
    if "simpo" in parts:
        assert recipe.dpo is not None
        assert (recipe.dpo.beta, recipe.dpo.simpo_gamma) == (2.5, 1.0)
    assert not any("pref" in line and "not carried over" in line for line in made.notes)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("stage: sft\n", ("keep_end", "none", False)),
        ("stage: sft\npacking: true\n", ("keep_end", "bfd", False)),
        ("stage: sft\nneat_packing: true\nmask_history: true\n", ("keep_end", "bfd", False)),
        ("stage: dpo\n", ("keep_end", "none", False)),
        ("stage: kto\npacking: true\n", ("keep_end", "none", False)),
        ("stage: rm\n", ("keep_end", "none", False)),
        ("stage: pt\n", ("keep_start", "wrapped", True)),
        ("stage: pt\npacking: false\n", ("keep_start", "none", False)),
    ],
)
def test_rows_are_cut_and_packed_as_there(keys: str, expected: tuple[str, str, bool], tmp_path: Path):
    recipe, _ = of_keys(tmp_path, keys)
    length = recipe.length
    assert (length.truncation, length.packing, length.cross_document_attention) == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("stage: dpo\npref_loss: kto_pair\n", "kto_pair"),
        ("stage: dpo\npref_ftx: much\n", "not a number"),
        ("stage: grpo\n", "no counterpart"),
        ("finetuning_type: prefix\n", "prefix"),
        ("do_predict: true\n", "trains nothing"),
        ("export_dir: out\n", "trains nothing"),
        ("infer_backend: vllm\n", "trains nothing"),
        ("mix_strategy: interleave_under\ninterleave_probs: 1\ndataset: a, b\n", "numbers for 2"),
    ],
)
def test_what_would_train_something_else_is_refused(keys: str, words: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(PLAIN + keys)
    with pytest.raises(RecipeError, match=words):
        import_config(read_foreign(str(file), "llamafactory"))


INFO = {
    "plain": {"file_name": "plain.json"},
    "renamed": {
        "file_name": "sub/renamed.jsonl",
        "columns": {"prompt": "ask", "response": "reply", "system": "rules", "history": "before"},
    },
    "chats": {"hf_hub_url": "me/chats", "subset": "en", "split": "test", "formatting": "sharegpt"},
    "roles": {
        "file_name": "roles.json",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "tools": "functions"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "odd": {
        "file_name": "odd.json",
        "formatting": "sharegpt",
        "tags": {"role_tag": "who", "user_tag": "asker"},
    },
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
    },
    "ends": {
        "file_name": "ends.json",
        "ranking": True,
        "formatting": "sharegpt",
        "num_samples": 50,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "verdicts": {
        "file_name": "v.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "good"},
        "tags": {"role_tag": "role", "content_tag": "content"},
    },
    "texts": {"file_name": "texts.txt", "columns": {"prompt": "body"}},
    "scripted": {"script_url": "code"},
}


@pytest.mark.parametrize(
    ("stage", "name", "source", "lost"),
    [
        ("sft", "plain", {"source": "{}/plain.json", "format": "alpaca"}, ""),
        (
            "sft",
            "renamed",
            {
                "source": "{}/sub/renamed.jsonl",
                "format": "alpaca",
                "columns": {"instruction": "ask", "output": "reply", "system": "rules", "history": "before"},
            },
            "earlier turns",
        ),
        ("sft", "chats", {"source": "me/chats", "name": "en", "split": "test", "format": "messages"}, ""),
        (
            "sft",
            "roles",
            {
                "source": "{}/roles.json",
                "format": "messages",
                "columns": {"messages": "turns", "tools": "functions"},
            },
            "",
        ),
        ("sft", "odd", {"source": "{}/odd.json", "format": "messages"}, "who, value"),
        (
            "dpo",
            "pairs",
            {
                "source": "{}/pairs.json",
                "format": "preference",
                "strings_are": "turns",
                "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
            },
            "",
        ),
        ("rm", "ends", {"source": "{}/ends.json", "format": "preference", "limit": 50}, ""),
        (
            "kto",
            "verdicts",
            {"source": "{}/v.json", "format": "unpaired", "columns": {"label": "good"}},
            "",
        ),
        ("pt", "texts", {"source": "{}/texts.txt", "format": "text", "columns": {"text": "body"}}, ""),
        ("sft", "scripted", {"source": "code", "format": "alpaca"}, "script_url"),
    ],
)
def test_an_entry_of_dataset_info_is_a_source(stage, name, source, lost: str, tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    nested = tmp_path / "examples" / "train"
    nested.mkdir(parents=True)
    file = nested / "run.yaml"
    file.write_text(f"model_name_or_path: a/b\nstage: {stage}\ndataset: {name}\ncutoff_len: 64\n")
    made = import_config(read_foreign(str(file)))
    assert made.faults == []
    (read,) = load_text(made.text, "recipe.yaml").recipe.data.train
    expected = {key: str(value).format(data) if key == "source" else value for key, value in source.items()}
    assert read.model_dump(exclude_defaults=True, exclude_none=True) == expected
    assert any(lost in line and "not carried over" in line for line in made.notes) == bool(lost)


@pytest.mark.parametrize(("history", "kept"), [("", "keep_start"), ("mask_history: true\n", "keep_end")])
def test_first_turns_of_conversations_are_kept(history: str, kept: str, tmp_path: Path):
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    recipe, _ = of_keys(tmp_path, f"stage: sft\ndataset: chats\n{history}")
    assert recipe.length.truncation == kept


def test_sets_and_mixtures_of_datasets_keep_their_names_and_shares(tmp_path: Path):
    recipe, _ = of_keys(
        tmp_path,
        "stage: sft\ndataset: a, b\neval_dataset: c, d/e\neval_on_each_dataset: true\n"
        "mix_strategy: interleave_under\ninterleave_probs: 0.25, 0.75\nmax_samples: 7\n",
    )
    assert [(one.weight, one.limit) for one in recipe.data.train] == [(0.25, 7), (0.75, 7)]
    assert recipe.data.eval_sets == ("c", "d-e")


@pytest.mark.parametrize(
    ("template", "ours"),
    [("llama3", "llama3"), ("qwen", "qwen2.5"), ("qwen3_nothink", "qwen3-instruct"), ("vicuna", None)],
)
def test_a_template_is_named_where_it_is_the_same(template: str, ours: str | None, tmp_path: Path):
    recipe, made = of_keys(tmp_path, f"stage: sft\ntemplate: {template}\n")
    assert recipe.model.chat_template == ours
    assert any("template" in line and "not carried over" in line for line in made.notes) == (ours is None)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ("bf16: true\n", "bfloat16"),
        ("fp16: true\n", "float16"),
        ("", "bfloat16"),
        ("finetuning_type: full\n", "float32"),
        ("finetuning_type: full\nbf16: true\n", "bfloat16"),
        ("finetuning_type: full\nuse_badam: true\n", "bfloat16"),
    ],
)
def test_the_precision_is_the_tools(keys: str, dtype: str, tmp_path: Path):
    recipe, _ = of_keys(tmp_path, f"stage: sft\n{keys}")
    assert recipe.model.dtype == dtype


@pytest.mark.parametrize(
    ("keys", "goes_on", "reference"),
    [
        ("stage: sft\n", True, None),
        ("stage: dpo\n", True, "adapter_off"),
        ("stage: dpo\npref_loss: simpo\n", True, "auto"),
        ("stage: sft\ncreate_new_adapter: true\n", False, None),
    ],
)
def test_an_adapter_is_trained_on_where_it_is_here(keys: str, goes_on: bool, reference, tmp_path: Path):
    own = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(own))
    recipe, made = of_keys(tmp_path, f"{keys}adapter_name_or_path: {tmp_path}\n")
    assert recipe.model.adapter is not None
    assert recipe.model.adapter.path == (str(tmp_path) if goes_on else None)
    assert any("adapter_name_or_path" in line for line in made.notes) is not goes_on
    assert (recipe.dpo.reference if recipe.dpo else None) == reference


@pytest.mark.parametrize("patience", [2, 3])
def test_a_section_of_nothing_but_defaults_is_written(patience: int, tmp_path: Path):
    recipe, _ = of_keys(tmp_path, f"stage: sft\nearly_stopping_steps: {patience}\nval_size: 0.1\n")
    assert recipe.eval.early_stopping is not None
    assert recipe.eval.early_stopping.patience == patience
    recipe, made = of_keys(tmp_path, f"stage: sft\nearly_stopping_steps: {patience}\n")
    assert recipe.eval.early_stopping is None
    assert any("early_stopping" in line and "held out" in line for line in made.notes)


def test_its_ppo_is_ppo(tmp_path: Path):
    recipe, _ = of_keys(
        tmp_path,
        "stage: ppo\nreward_model: some/judge\nper_device_train_batch_size: 2\nppo_epochs: 2\n"
        "ppo_buffer_size: 2\ngradient_accumulation_steps: 4\nmax_new_tokens: 512\ntop_p: 0.9\n",
    )
    assert recipe.ppo is not None
    assert (recipe.ppo.beta, recipe.ppo.kl_target, recipe.ppo.updates_per_rollout) == (0.2, 6.0, 2)
    assert (recipe.train.batch_size, recipe.ppo.steps_per_rollout) == (8, 2)
    made = recipe.generate
    assert (made.num_generations, made.max_tokens, made.top_p) == (1, 512, 0.9)
    assert (made.top_k, made.temperature) == (50, 0.95)


@pytest.mark.parametrize(("keys", "processes"), [("", "auto"), ("ray_num_workers: 4\n", 4)])
def test_devices_are_written_where_they_are_known(keys: str, processes: object, tmp_path: Path):
    recipe, _ = of_keys(tmp_path, f"stage: sft\n{keys}")
    assert recipe.cluster.processes == processes


@pytest.mark.parametrize("name", ["dist_config", "kernel_config", "peft_config"])
def test_files_of_its_next_version_are_recognised(name: str, tmp_path: Path):
    file = tmp_path / "v1.yaml"
    file.write_text(f"model: Qwen/Qwen3-0.6B\nmicro_batch_size: 1\ncutoff_len: 64\n{name}:\n  name: x\n")
    with pytest.raises(RecipeError, match="LLaMA-Factory v1"):
        read_foreign(str(file))


def test_its_calls_of_tools_are_calls():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    one = message_of({"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}, "m")
    assert one == {"role": "assistant", "content": "", "tool_calls": [call]}
    text = '<think>\nso\n</think>\n[{"name": "add", "arguments": {"a": 1}}]'
    several = message_of({"role": "function_call", "content": text}, "m")
    assert several == {"role": "assistant", "content": "<think>\nso\n</think>", "tool_calls": [call]}
    for wrong in (
        "add(1)",
        "[]",
        '{"name": "add"}',
        '{"name": 1, "arguments": {}}',
        "[1]",
        '{"name": "a", "name": "b"}',
    ):
        with pytest.raises(BadRow, match="function_call"):
            message_of({"from": "function_call", "value": wrong}, "m")
