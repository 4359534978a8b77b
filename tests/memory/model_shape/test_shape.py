"""Shapes from config.json alone against the models transformers builds."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.shape import FAMILIES, read_config, shape_of
from memtrain.recipes.sections.model import Adapter

SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
CASES = [(model_type, {}) for model_type in FAMILIES] + [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("gemma2", {"attention_bias": True}),
]


@pytest.mark.parametrize("tied", [False, True])
def test_a_scorer_has_one_row_of_weights_for_a_head(tied):
    made = AutoConfig.for_model("qwen3", **SMALL, tie_word_embeddings=tied, num_labels=1)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(made)
    shape = shape_of(made.to_dict(), "", "score")
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.num_head == SMALL["hidden_size"]
    assert not shape.tied


def built(model_type, **more):
    config = SMALL | EXPERTS.get(model_type, {}) | more
    with torch.device("meta"):
        made = AutoConfig.for_model(model_type, **config)
        return AutoModelForCausalLM.from_config(made), made.to_dict()


@pytest.mark.parametrize(("model_type", "more"), CASES, ids=lambda value: str(value))
def test_parameters_of_every_part_equal_those_of_the_model(model_type, more):
    model, config = built(model_type, **more)
    shape = shape_of(config)
    assert shape.note == ""
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.num_embedding == model.get_input_embeddings().weight.numel()
    inner = model.model
    assert shape.num_layer_parameters == sum(p.numel() for p in inner.layers.parameters())
    norms = sum(p.numel() for name, p in inner.layers.named_parameters() if "norm" in name)
    assert shape.num_layers * shape.num_norms_per_layer == norms
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_that_says_only_its_type_gets_the_defaults_of_transformers(model_type):
    made = AutoConfig.for_model(model_type)
    short, whole = shape_of({"model_type": model_type}), shape_of(made.to_dict())
    assert short == whole


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapter_parameters_equal_those_of_peft(model_type, kind):
    from peft import LoraConfig, get_peft_model

    if kind == "dora" and model_type == "qwen3_moe":
        pytest.skip("one kind is enough where experts are left out")
    made = AutoConfig.for_model(model_type, **SMALL, **EXPERTS.get(model_type, {}))
    model = AutoModelForCausalLM.from_config(made)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=kind == "dora"))
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert shape_of(made.to_dict()).num_adapter(Adapter(kind=kind, r=4)) == trained


def test_an_adapter_on_named_modules_counts_only_those():
    shape = shape_of(SMALL | {"model_type": "llama"})
    adapter = Adapter(r=2, target_modules=("q_proj", "v_proj"))
    assert shape.num_adapter(adapter) == 3 * 2 * ((64 + 96) + (64 + 48))


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None, 0),
        ({"model_type": "mistral"}, 4096, 32),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None, 0),
        ({"model_type": "gemma3_text"}, 4096, 22),
        ({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 16}, 16, 2),
    ],
)
def test_sliding_windows_concern_the_layers_the_model_gives_them(config, window, layers):
    shape = shape_of(config)
    assert (shape.sliding_window, shape.num_sliding_layers) == (window, layers)


def test_an_unknown_model_type_is_counted_by_its_sizes_and_noted():
    shape = shape_of(SMALL | {"model_type": "newest_thing"})
    assert "newest_thing" in shape.note
    assert shape.num_parameters == shape_of(SMALL | {"model_type": "llama"}).num_parameters


def test_a_config_without_a_decoders_numbers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert_like"}')
    with pytest.raises(RecipeError, match="hidden_size"):
        read_config(tmp_path)
    with pytest.raises(RecipeError, match="no config.json"):
        read_config(tmp_path / "nowhere")


def test_real_models_have_the_parameters_their_cards_say():
    llama = shape_of(
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    )
    assert llama.num_parameters == 8_030_261_248


def test_reading_a_config_loads_no_torch():
    code = "import sys; import memtrain.memory.model_shape.shape; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
