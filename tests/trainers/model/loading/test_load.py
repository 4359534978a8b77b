"""Loading: the same random weights for everybody, and one clear error for everything that is no causal LM."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from memtrain.errors import LaunchError, MemtrainError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.model.loading import load, quantize
from memtrain.trainers.model.loading.load import load_model

SETTINGS = Settings(
    device="cpu", num_processes=1, threads=1, dtype="float32", attention="transformers", liger=False,
    adapter=None,
    quantize="none", max_length=64, truncation="keep_start", packing="none", cross_document_attention=False,
    padding_free=False, pad_to_multiple_of=None, group_by_length=False, batch_size=2, batch_tokens=None,
    micro_batch_size=2, micro_tokens=None, max_steps=10, checkpoint_every=0, offload="none", loss="full",
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


@pytest.mark.parametrize(("drawn_on", "expected"), [(None, "meta"), ("cpu", "cpu")])
def test_random_weights_are_made_where_they_will_be(
    drawn_on: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
):
    """Not on the host first, which takes minutes for a large model; or where they were drawn before."""
    seen: list[str] = []
    plain = load.built

    def noting(*given: Any, **more: Any) -> Any:
        seen.append(torch.get_default_device().type)
        return plain(*given, **more)

    monkeypatch.setattr(load, "built", noting)
    # Stands in for a GPU: a device of which the host holds nothing.
    monkeypatch.setattr(load, "local_device", lambda settings: torch.device("meta"))
    made = load_model(small(), SETTINGS, seed=7, vocab_size=64, drawn_on=drawn_on)
    assert seen == [expected]
    assert {one.device.type for one in made.parameters()} == {"meta"}


def test_random_weights_of_a_gpu_are_not_drawn_as_others_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    """Chat and merge begin from the weights that the run began from."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match="drawn on a GPU, and there is none here"):
        load_model(small(), SETTINGS, seed=7, vocab_size=64, drawn_on="cuda")


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
    settings = SETTINGS.model_copy(update={"attention": "masked"})
    model = load_model(Model(path=str(tmp_path)), settings, seed=1, vocab_size=64)
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)
    assert model.config._attn_implementation == "memtrain_masked"


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


def test_router_logits_that_a_configuration_asks_for_are_not_kept():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    asked = small(model_type="qwen3_moe", output_router_logits=True, **experts)
    model: Any = load_model(asked, SETTINGS, seed=0, vocab_size=64)
    assert model.model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).router_logits is None
    assert model.config.output_router_logits


def test_an_adapter_folder_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    assert "is an adapter of Qwen/Qwen3-0.6B" in refused(Model(path=str(tmp_path)))


def test_a_classifier_is_no_causal_lm(tmp_path):
    config = dict(small().config) | {"architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "not a causal language model (it is LlamaForSequenceClassification)" in refused(
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
    assert "comes with its own code" in refused(Model(path=str(tmp_path)))


def test_a_folder_that_is_not_there_is_said_at_once():
    assert "there is no folder ./nowhere" in refused(Model(path="./nowhere"))


def test_without_the_hub_and_without_a_cache_it_says_so(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "hub cannot be reached" in refused(Model(path="nobody/nothing-here"))


def test_quantized_weights_on_a_gpu_need_bitsandbytes(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    settings = SETTINGS.model_copy(update={"quantize": "4bit", "device": "cuda"})
    recipe = Model(path=str(tmp_path), quantize="4bit", adapter=Adapter())
    assert "4bit needs bitsandbytes, which is not installed" in refused(recipe, settings)


@pytest.mark.parametrize(
    "asked",
    [
        {"attn_implementation": "kernels-community/flash-attn3"},
        {"attn_implementation": "someone/theirs:attend", "use_kernels": True},
        {"_attn_implementation": "someone/theirs"},
        {"experts_implementation": "someone/theirs"},
    ],
)
def test_a_model_does_not_choose_code_of_the_hub(asked: dict[str, Any], tmp_path, monkeypatch):
    from transformers import modeling_utils

    fetched: list[str] = []
    monkeypatch.setattr(
        modeling_utils, "lazy_import_flash_attention", lambda name, **others: fetched.append(name)
    )
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | asked))
    for named in (
        Model(path=str(tmp_path)),
        Model(config=str(tmp_path / "config.json"), tokenizer="builtin:tiny"),
    ):
        model = load_model(named, SETTINGS, seed=0, vocab_size=64)
        assert model.config._attn_implementation == "sdpa"
    assert fetched == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "no_such_act"}, "no_such_act"),
        ({"rope_parameters": {"rope_type": "no_such_rope", "rope_theta": 1e4}}, "no_such_rope"),
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"layer_types": 5}, "layer_types"),
        ({"dtype": "float1"}, "float1"),
        ({"attention_bias": None}, "config has attention_bias: null"),
        ({"use_cache": "yes"}, 'config has use_cache: "yes"'),
        ({"id2label": {"a": "b"}}, 'config has id2label: {"a": "b"}'),
        ({"text_config": {}}, "config has text_config: {}"),
        ({"model_type": "no_such_model"}, "does not know no_such_model models"),
        ({"max_position_embeddings": 0}, "config has max_position_embeddings: 0"),
        ({"num_hidden_layers": 1}, "weights of more layers than its config.json"),
        ({"intermediate_size": 64}, "weights of another shape"),
    ],
)
def test_a_saved_configuration_that_no_model_has_is_reported_with_its_cause(
    changes: dict[str, Any], said: str, tmp_path
):
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert said in refused(Model(path=str(tmp_path)))
    # The tokenizer of the folder is not blamed for it: transformers reads the configuration first.
    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer, tiny_tokenizer

    for file in tiny_tokenizer.FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    found = ""
    try:
        load_tokenizer(str(tmp_path))
    except MemtrainError as error:
        found = error.faults[0].what
    assert "tokenizer" not in found


@pytest.mark.parametrize("asked", ["return_dict", "output_attentions", "output_hidden_states"])
def test_a_model_that_wants_other_outputs_is_read_as_any_other(asked: str, tmp_path):
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {asked: asked != "return_dict"}))
    model = load_model(Model(path=str(tmp_path)), SETTINGS, seed=0, vocab_size=64)
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, 64)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_a_broken_adapter_config_is_reported(text: str, tmp_path):
    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    assert "adapter_config.json" in refused(Model(path=str(tmp_path)))


def test_advice_to_trust_code_is_never_passed_on(tmp_path):
    config = {"model_type": "their_own", "auto_map": {"AutoConfig": "config.Theirs"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "trust_remote_code" not in refused(Model(path=str(tmp_path)))


def test_transformers_is_asked_to_fetch_no_kernels():
    code = (
        "import memtrain, transformers.integrations.hub_kernels as hub\n"
        "assert hub._TRANSFORMERS_USE_HUB_KERNELS == 'NO'"
    )
    environment = {name: value for name, value in os.environ.items() if name != "USE_HUB_KERNELS"}
    reported = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert reported.returncode == 0, reported.stderr


def test_the_plan_says_that_a_model_chose_code_in_vain():
    from memtrain.memory.hardware.devices import detect
    from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe, decide_attention
    from memtrain.recipes.reading.load import recipe_of_words

    words = ["method=sft", "model.path=builtin:tiny", "data.train=builtin:arithmetic"]
    loaded = recipe_of_words(words)
    ledger = DecisionLog(SourcedRecipe(loaded.recipe, loaded.where))
    config = {"model_type": "llama", "attn_implementation": "kernels-community/flash-attn3"}
    decide_attention(ledger, detect("cpu"), "float32", config)
    assert "kernels-community/flash-attn3, which no model may choose" in ledger.decisions[0].reason


def test_a_model_that_cannot_be_built_or_read_is_refused_by_its_plan(tmp_path):
    from memtrain.trainers.model.loading.module_shapes import check_model

    load_model(small(), SETTINGS, seed=0, vocab_size=64).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    named = Model(path=str(tmp_path))
    check_model(named, config)
    with pytest.raises(LaunchError, match="no_such_act"):
        check_model(named, config | {"hidden_act": "no_such_act"})
    with pytest.raises(LaunchError, match="not a causal language model"):
        check_model(named, {"model_type": "t5"})
    with pytest.raises(LaunchError, match="quantized already"):
        check_model(named, config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(LaunchError, match="weights of another shape"):
        check_model(named, config | {"intermediate_size": 64})
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(LaunchError, match="cut off"):
        check_model(named, config)
