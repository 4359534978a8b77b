"""Loading: the same random weights for everybody, and one clear error for everything that is no causal LM."""

import json
from typing import Any

import pytest
import torch

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.model.loading.load import load_model

SETTINGS = Settings(
    device="cpu", num_processes=1, threads=1, dtype="float32", attention="stock", liger=False, adapter=None,
    quantize="none", max_length=64, truncation="keep_start", packing="none", documents_see_each_other=False,
    padding_free=False, pad_to_multiple_of=None, group_by_length=False, batch_rows=2, batch_tokens=None,
    micro_rows=2, micro_tokens=None, max_steps=10, checkpoint_every=0, offload="none", loss="full",
    loss_tile_bytes=1 << 20, optimizer="adamw", master_weights=False, expandable_segments=False,
)  # fmt: skip


def small(**config: Any) -> Model:
    """A recipe of a random two-layer Llama."""
    shape = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    return Model(config=shape | config, tokenizer="builtin:tiny")


def refused(model: Model, settings: Settings = SETTINGS, vocab_size: int = 64) -> str:
    with pytest.raises(LaunchError) as error:
        load_model(model, settings, seed=0, vocab_size=vocab_size)
    return str(error.value)


def test_builtin_tiny_has_the_million_weights_it_promises():
    model = load_model(Model(path="builtin:tiny"), SETTINGS, seed=0, vocab_size=1024)
    attention = 128 * 128 * 2 + 128 * 64 * 2 + 2 * 32
    layer = attention + 3 * 128 * 384 + 2 * 128
    assert sum(p.numel() for p in model.parameters()) == 4 * layer + 128 + 1024 * 128 == 918_912
    assert model.training
    assert model.config.use_cache is False


def test_the_seed_alone_makes_random_weights_and_leaves_the_callers_random_state():
    torch.manual_seed(5)
    first = load_model(small(), SETTINGS, seed=7, vocab_size=64)
    after = torch.rand(3)
    torch.manual_seed(6)
    second = load_model(small(), SETTINGS, seed=7, vocab_size=64)
    other = load_model(small(), SETTINGS, seed=8, vocab_size=64)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_weights_come_in_the_dtype_of_the_plan():
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    model = load_model(small(), settings, seed=0, vocab_size=64)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_saved_model_is_read_back_and_attends_by_the_asked_back_end(tmp_path):
    saved = load_model(small(), SETTINGS, seed=0, vocab_size=64)
    saved.save_pretrained(tmp_path)
    settings = SETTINGS.model_copy(update={"attention": "dense"})
    model = load_model(Model(path=str(tmp_path)), settings, seed=1, vocab_size=64)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert model.config._attn_implementation == "memtrain_dense"


def test_a_config_file_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(small().config))
    model = load_model(Model(config=str(file), tokenizer="builtin:tiny"), SETTINGS, seed=0, vocab_size=70)
    assert model.config.vocab_size == 70


def test_a_vocabulary_larger_than_the_embedding_is_refused():
    text = refused(small(vocab_size=50), vocab_size=64)
    assert "64 tokens" in text
    assert "50 rows" in text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llamma"}, "no model_type llamma; near it are llama"),
        ({"num_hidden_layer": 3}, "did you mean num_hidden_layers"),
        ({"model_type": "t5", "num_key_value_heads": 1}, "t5"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_wrong_configuration_is_named(config: dict[str, Any], said: str):
    assert said in refused(small(**config))


def test_a_routers_auxiliary_loss_that_would_be_left_out_is_refused():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    asked = small(model_type="qwen3_moe", output_router_logits=True, **experts)
    assert "router's auxiliary loss" in refused(asked)
    load_model(small(model_type="qwen3_moe", **experts), SETTINGS, seed=0, vocab_size=64)


def test_an_adapter_folder_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    assert "is an adapter of Qwen/Qwen3-0.6B" in refused(Model(path=str(tmp_path)))


def test_a_classifier_is_no_causal_lm(tmp_path):
    config = dict(small().config) | {"architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "no causal language model (it is LlamaForSequenceClassification)" in refused(
        Model(path=str(tmp_path))
    )


def test_missing_weights_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "has no weights for model.layers.1.mlp.up_proj.weight" in refused(Model(path=str(tmp_path)))


def test_pickled_weights_are_refused(tmp_path):
    model = load_model(small(), SETTINGS, seed=0, vocab_size=64)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "only safetensors" in refused(Model(path=str(tmp_path)))


def test_a_model_needing_code_from_the_hub_is_refused(tmp_path):
    config = {"model_type": "their_own", "auto_map": {"AutoConfig": "config.Theirs"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "no code from the hub" in refused(Model(path=str(tmp_path)))


def test_a_folder_that_is_not_there_is_said_at_once():
    assert "there is no folder ./nowhere" in refused(Model(path="./nowhere"))


def test_without_the_hub_and_without_a_cache_it_says_so(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in refused(Model(path="nobody/nothing-here"))


def test_quantized_weights_need_cuda(tmp_path):
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    settings = SETTINGS.model_copy(update={"quantize": "4bit"})
    recipe = Model(path=str(tmp_path), quantize="4bit", adapter=Adapter())
    assert "4bit needs a CUDA device; this run is on cpu" in refused(recipe, settings)
