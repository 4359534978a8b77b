"""Names of an adapter that the model has not are refused by the plan, without building the model."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.shape import FAMILIES, shape_of
from memtrain.memory.rules.adapter_targets import BESIDE_LAYERS
from memtrain.trainers.model.loading.module_shapes import counted_shape
from tests.memory.conftest import SMALL

MIXTURE = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("config", "adapter", "words", "way"),
    [
        ({}, {"target_modules": ["q_prj"]}, "the model has no module q_prj", "such as q_proj"),
        (
            {},
            {"target_parameters": ["experts.up"], "target_modules": []},
            "the model has no experts",
            "remove it",
        ),
        (
            MIXTURE,
            {"target_modules": ["gate_up_proj"]},
            "no module gate_up_proj",
            "stacked experts are named in",
        ),
        (
            MIXTURE,
            {"target_modules": [], "target_parameters": ["mlp.experts.nothing"]},
            "the model has no stack of experts mlp.experts.nothing",
            "experts.gate_up_proj, experts.down_proj",
        ),
    ],
)
def test_a_name_that_the_model_has_not_is_refused_with_those_it_has(
    ask, facts_of, config, adapter, words, way
):
    with pytest.raises(RecipeError) as caught:
        ask(facts_of(config=config or SMALL), model__adapter=adapter)
    (fault,) = caught.value.faults
    assert words in fault.what
    assert way in fault.fix


@pytest.mark.parametrize("targets", [["all-linear"], ["in_proj", "mamba.out_proj"]])
def test_the_map_that_peft_adapts_by_no_means_is_refused_with_the_others(ask, facts_of, targets):
    """Falcon-H1 with the default adapter, all-linear, was planned, and PEFT refused it in the run."""
    config = SMALL | {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}
    facts = facts_of(config=SMALL)
    with pytest.raises(RecipeError) as caught:
        ask(replace(facts, shape=counted_shape(config)), model__adapter={"target_modules": targets})
    (fault,) = caught.value.faults
    assert fault.what.startswith("PEFT puts no adapter on out_proj of falcon_h1 models")
    made = AutoConfig.for_model(**config)
    others = fault.fix.split("[")[1].rstrip("]").split(", ")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
        get_peft_model(model, LoraConfig(target_modules=others))
        with pytest.raises(ValueError, match="incompatible with Mamba-based models"):
            get_peft_model(AutoModelForCausalLM.from_config(made), LoraConfig(target_modules=["out_proj"]))


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_the_head_of_quantized_weights_is_refused_by_the_plan(ask, facts_of, key):
    """A plan for 16 GiB was made of unsloth#1884, and the run it was for could not be built."""
    adapter = {key: ["q_proj", "lm_head"] if key == "target_modules" else ["lm_head"]}
    with pytest.raises(RecipeError) as caught:
        ask(facts_of(config=SMALL), model__adapter=adapter, model__quantize="4bit")
    assert "LM head cannot be trained on quantized weights" in caught.value.faults[0].what


@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        ({}, {"target_modules": ["q_proj", "self_attn.v_proj", "lm_head"]}),
        (MIXTURE, {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
        (MIXTURE, {"target_modules": [], "target_parameters": ["gate_up_proj"]}),
    ],
)
def test_names_that_the_model_has_are_taken(ask, facts_of, config, adapter):
    assert ask(facts_of(config=config or SMALL), model__adapter=adapter).settings.adapter is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_no_linear_map_of_a_family_is_unknown(family):
    mixture = {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    config = AutoConfig.for_model(
        family, **{k: v for k, v in SMALL.items() if k != "model_type"} | mixture | {"pad_token_id": 0}
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    known = {part.name for part in shape.linears} | BESIDE_LAYERS
    found = {n.rsplit(".", 1)[-1] for n, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert found <= known
