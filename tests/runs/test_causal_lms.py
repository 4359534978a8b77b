"""Every causal LM that transformers builds small: planned exactly, and trained, packed where that is exact.

The families are those of transformers 5.23 that a configuration of a few small numbers makes; each is of two
layers of width 64.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from memtrain.cli.plan.model_shape import shape_for
from memtrain.errors import LaunchError
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.rules.attention import AttentionBackend, AttentionFacts, choose_attention, model_facts
from memtrain.memory.rules.tested_models import PACKING_TESTED_MODELS
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.attention.isolation_check import verify_causal, verify_isolation
from memtrain.trainers.model.heads.lm_head import Scorer, verify_head

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 512}
HEAD = {"head_dim": 16}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
# What a family needs beside SMALL to be small, or to be built at all.
FAMILIES = (
    {
        name: {}
        for name in (
            "apertus",
            "arcee",
            "biogpt",
            "bitnet",
            "bloom",
            "cohere",
            "ctrl",
            "diffllama",
            "ernie4_5",
            "falcon",
            "glm",
            "glm4",
            "gpt-sw3",
            "gpt2",
            "gpt_bigcode",
            "gpt_neox",
            "gpt_neox_japanese",
            "hyperclovax",
            "internlm3",
            "iquestcoder",
            "jais2",
            "ministral3",
            "mpt",
            "nanochat",
            "nemotron",
            "olmo",
            "openai-gpt",
            "persimmon",
            "phi",
            "phi3",
            "qwen2",
            "rwkv",
            "seed_oss",
            "stablelm",
            "starcoder2",
            "xglm",
        )
    }
    | {name: HEAD for name in ("gemma", "granite", "helium", "llama", "mistral", "olmo2", "qwen3", "smollm3")}
    | {
        name: HEAD | WINDOW
        for name in ("beam", "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "olmo3", "vaultgemma")
    }
    | {
        name: EXPERTS
        for name in (
            "ernie4_5_moe",
            "flex_olmo",
            "glm4_moe",
            "granitemoe",
            "granitemoeshared",
            "jetmoe",
            "olmoe",
            "phimoe",
            "qwen3_moe",
        )
    }
    | {name: EXPERTS | WINDOW for name in ("exaone_moe", "gpt_oss", "laguna")}
    | {
        "deepseek_v3": EXPERTS | LATENT | {"first_k_dense_replace": 1, "n_shared_experts": 1},
        "gpt_neo": {"num_layers": 2, "attention_types": [[["global"], 2]]},
        "gptj": {"rotary_dim": 8},
        "codegen": {"rotary_dim": 8},
        "llama4_text": EXPERTS | HEAD | {"attention_chunk_size": 512, "intermediate_size_mlp": 96},
        "mamba": {},
        "mixtral": {"num_local_experts": 4},
        "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
        "opt": {"word_embed_proj_dim": 64},
        "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
        "recurrent_gemma": {},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
    }
)
FAMILIES = {name: said for name, said in FAMILIES.items() if name in CONFIG_MAPPING_NAMES}
"""Those that the installed transformers has."""
QUICK = ("gemma2", "gpt2", "gpt_neox", "opt", "phi", "starcoder2", "cohere", "glm", "deepseek_v3")
OTHERS = ("bloom", "falcon", "stablelm", "gptj", "mamba")
"""Quick ones of those that pack no rows."""


def slow_but(quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in FAMILIES]


def config_of(family):
    return AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_weights_are_those_of_the_model(family):
    config = config_of(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_for(config.to_dict())
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.num_embedding == model.get_input_embeddings().weight.numel()
    assert shape.num_layers == 2


@pytest.mark.parametrize("family", slow_but(QUICK + OTHERS))
def test_rows_that_are_packed_are_what_they_are_alone(family):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family)).eval()
    with attention_switched(model, "eager"):
        verify_head(Scorer(model))
        verify_causal(model)
    if family in PACKING_TESTED_MODELS:
        caps = getattr(model.config, "attn_logit_softcapping", None)
        verify_isolation(model, AttentionBackend.MASKED if caps else AttentionBackend.TORCH_CPU)
        return
    with pytest.raises(LaunchError, match="model.attention: transformers"):
        verify_isolation(model, AttentionBackend.TORCH_CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_whose_rows_were_not_seen_apart_is_planned_a_row_a_row(family):
    known = model_facts(config_of(family).to_dict())
    # Dropout of scores is another reason, which a recipe can take away.
    known["attention_dropout"] = 0.0
    choice = choose_attention(AttentionFacts(device="cpu", dtype="float32", longest_row_tokens=128, **known))
    assert choice.can_pack == (family in PACKING_TESTED_MODELS)
    if not choice.can_pack:
        assert all(why for _, why in choice.refused)


def test_every_family_that_packs_has_a_test_or_is_a_variant_of_one_that_has():
    assert {
        "llama",
        "gpt2",
        "gpt_neox",
        "opt",
        "phi",
        "olmo",
        "starcoder2",
        "qwen3_moe",
    } <= PACKING_TESTED_MODELS
    assert not PACKING_TESTED_MODELS & {
        "bloom",
        "falcon",
        "stablelm",
        "nemotron",
        "mamba",
    }


@pytest.mark.parametrize("family", slow_but(("gpt2", "bloom", "stablelm")))
def test_a_family_trains_from_a_recipe(runs, metrics, family):
    made = config_of(family)
    own = {made.attribute_map.get(key, key): value for key, value in (SMALL | FAMILIES[family]).items()}
    own |= dict.fromkeys(("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"), 0.0)
    known = AutoConfig.for_model(family).to_dict()
    inner = {key: value for key, value in own.items() if key in known and key != "vocab_size"}
    inner["model_type"] = family
    text = runs.recipe.read_text()
    begin, end = text.index("  config:"), text.index("  tokenizer:")
    runs.recipe.write_text(text[:begin] + f"  config: {json.dumps(inner)}\n" + text[end:])
    folder = runs.done("run", "train.max_steps=2")
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["settings"]["attention"] != "transformers") == (family in PACKING_TESTED_MODELS)
    assert len(metrics(folder, "step")) == 2
    weights = {p["phase"]: p for p in plan["prediction"]["phases"]}["load"]["owners"][0]
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    assert weights["owner"] == "weights"
    assert weights["num_bytes"] == 4 * sum(p.numel() for p in model.parameters())


def test_rows_longer_than_a_table_of_positions_are_refused(runs):
    inner = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 64}
    text = runs.recipe.read_text()
    begin, end = text.index("  config:"), text.index("  tokenizer:")
    runs.recipe.write_text(text[:begin] + f"  config: {json.dumps(inner)}\n" + text[end:])
    ended = runs.run("run")
    assert ended.code == 2
    assert "the model has only 64 positions" in ended.err
    assert "set it to at most 64" in ended.err


def test_other_names_of_the_same_numbers_are_read():
    """GPT-2's own spelling, without transformers: 12 layers of width 768 and twelve heads of 64."""
    shape = shape_of({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_layer": 12})
    assert (shape.num_layers, shape.width, shape.num_heads, shape.head_dim) == (12, 768, 12, 64)
    assert "gpt2" in shape.note


def test_a_model_that_sees_ahead_is_refused():
    config = AutoConfig.for_model("bert-generation", **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(LaunchError, match="not causal"):
        verify_causal(model)
