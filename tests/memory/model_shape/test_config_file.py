"""config.json as foreign text: what is no model's is refused with its number, and no code is chosen by it."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.config_file import asked_code, check_values, read_config_json, without_code
from memtrain.memory.model_shape.known_models import known_config, known_models

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def refused(folder: Path, text: str | bytes) -> str:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LaunchError) as error:
        read_config_json(folder, "model.path")
    fault = error.value.faults[0]
    assert fault.where
    assert fault.fix
    return fault.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"hidden_size": -4}, "hidden_size: -4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0"),
        ({"num_attention_heads": True}, "num_attention_heads: true"),
        ({"vocab_size": "many"}, 'vocab_size: "many"'),
        ({"hidden_size": 32.5}, "hidden_size: 32.5"),
        ({"n_embd": -1, "hidden_size": None}, "n_embd: -1"),
        ({"attn_config": {"attn_pdrop": 2}}, "attn_config.attn_pdrop: 2"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: 0"),
        ({"n_positions": 0}, "n_positions: 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1"),
        ({"output_attentions": "yes"}, 'output_attentions: "yes"'),
        ({"hidden_act": 3}, "hidden_act: 3"),
        ({"dtype": "x"}, 'dtype: "x"'),
        ({"torch_dtype": ["bfloat16"]}, 'torch_dtype: ["bfloat16"]'),
        ({"quantization_config": "4bit"}, 'quantization_config: "4bit"'),
        ({"text_config": 3}, "text_config: 3"),
        ({"eos_token_id": [2, "</s>"]}, 'eos_token_id: "</s>"'),
        ({"pad_token_id": True}, "pad_token_id: true"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3"),
        ({"n_head": 4, "num_attention_heads": None, "num_kv_heads": 3}, "num_kv_heads: 3"),
        ({"hidden_size": 30}, "num_attention_heads: 4"),
        ({"layer_types": ["full_attention"]}, 'layer_types: ["full_attention"]'),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok: 5"),
        ({"attention_dropout": None}, "attention_dropout: null"),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_window: null"),
        ({"vocab_size": 9, "pad_token_id": 9}, "pad_token_id: 9"),
        ({"intermediate_size": [48, -1]}, "intermediate_size: -1"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps: 1e+300"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size: 0"),
        ({"num_labels": 10**9}, "num_labels: 1000000000"),
        ({"layer_types": 5}, "layer_types: 5"),
        ({"rope_scaling": "linear"}, 'rope_scaling: "linear"'),
        ({"model_type": 3}, "model_type: 3"),
        ({"architectures": [3]}, "architectures: [3]"),
        ({"layer_types": ["full_attention", None]}, 'layer_types: ["full_attention", null]'),
        ({"mlp_only_layers": ["first"]}, 'mlp_only_layers: ["first"]'),
    ],
)
def test_numbers_that_no_model_has_are_refused(changes: dict[str, Any], said: str, tmp_path: Path):
    assert f"the model's config has {said}" in refused(tmp_path, json.dumps(LLAMA | changes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "is not JSON: Expecting property name"),
        ("[]", "is not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"rms_norm_eps": NaN}', "NaN is not a number"),
        ('{"rms_norm_eps": {"__float__": "NaN"}}', "NaN is not a number"),
        ('{"rms_norm_eps": {"__float__": {}}}', "is not JSON"),
        ("{" + f'"hidden_size": {"1" * 5000}' + "}", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (" " * (2**24 + 1), "larger than 16 MiB"),
    ],
)
def test_text_that_is_no_config_is_reported(text: str | bytes, said: str, tmp_path: Path):
    assert said in refused(tmp_path, text)


def test_a_folder_or_nothing_in_its_place_is_reported(tmp_path: Path):
    with pytest.raises(LaunchError, match="there is no file"):
        read_config_json(tmp_path, "model.path")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(LaunchError, match="cannot be read: it is a folder"):
        read_config_json(tmp_path / "config.json" / "..", "model.path")


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinity_bounds_time_steps_of_published_models(written: str, tmp_path: Path):
    """As older versions of transformers wrote it, and as 5 does: a model that it saved could not be built."""
    (tmp_path / "config.json").write_text(f'{{"time_step_limit": [0.0, {written}]}}')
    assert read_config_json(tmp_path, "model.path")["time_step_limit"] == [0.0, float("inf")]


def test_all_faults_are_told_at_once_each_with_its_file_and_what_it_must_be(tmp_path: Path):
    wrong = {"hidden_size": 0, "num_attention_heads": "four", "use_cache": 1, "rms_norm_eps": -1e-6}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wrong))
    with pytest.raises(LaunchError) as error:
        read_config_json(tmp_path, "model.path")
    assert {fault.what.rpartition(" has ")[2].partition(":")[0] for fault in error.value.faults} == set(wrong)
    assert {fault.where for fault in error.value.faults} == {str(tmp_path / "config.json")}
    assert all(fault.fix.startswith("it must be ") for fault in error.value.faults)


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": [1, 2], "pad_token_id": -1, "bos_token_id": None},
        {"num_attention_heads": 71, "num_kv_heads": 2, "multi_query": True, "hidden_size": 71 * 64},
        {"hidden_size": 30, "head_dim": 8, "num_key_value_heads": 1},
        {"num_key_value_heads": [1, 2], "intermediate_size": [64, 32], "dtype": "torch.bfloat16"},
        {"num_local_experts": 0, "num_experts_per_tok": 2},
    ],
)
def test_values_that_some_model_is_published_with_are_taken(values: dict[str, Any]):
    check_values(LLAMA | values, "config.json")


def test_no_default_of_transformers_is_refused():
    """The guard against limits that are too narrow: every eighth causal language model that it knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    seen = 0
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[::8]:
        config = CONFIG_MAPPING[kind]().to_dict()
        check_values(json.loads(json.dumps(config, default=str)), kind)
        seen += 1
    assert seen > 15


def test_every_shipped_shape_is_within_the_limits():
    for name in known_models():
        check_values(known_config(name) or {}, name)
    assert len(known_models()) > 200


def test_the_keys_that_choose_code_are_left_out_of_every_part_and_named():
    asked = {
        "hidden_size": 8,
        "attn_implementation": "kernels-community/flash-attn3",
        "text_config": {"experts_implementation": "someone/theirs", "vocab_size": 9},
        "use_kernels": None,
    }
    assert without_code(asked) == {"hidden_size": 8, "text_config": {"vocab_size": 9}}
    assert asked_code(asked) == [
        "attn_implementation: kernels-community/flash-attn3",
        "experts_implementation: someone/theirs",
    ]
