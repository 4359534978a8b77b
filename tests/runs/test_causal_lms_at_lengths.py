"""Every small causal LM at the lengths where its numbers change: packed, padded, sampled rows are as alone.

The families are those of `test_causal_lms.py`; those that turn their positions are made again with positions
that follow the length of a row, of which 16 tokens are the short ones.
"""

from contextlib import nullcontext

import pytest
import torch
from test_causal_lms import FAMILIES, SMALL, config_of
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.memory.rules.tested_models import PACKING_TESTED_MODELS
from memtrain.trainers.model.attention.isolation_check import verify_isolation
from memtrain.trainers.model.attention.own_positions import take_own_positions
from memtrain.trainers.model.attention.padding_check import verify_padding
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.start_check import StartCheck, check_groups
from memtrain.trainers.online.generation.transformers_sampler import FORMS, TransformersSampler
from memtrain.trainers.runtime.ranks import Ranks

SHORT = 16
LONGEST, TOGETHER = 40, 64
QUICK = ("llama", "phi3", "phimoe", "gemma3_text", "mamba", "llama4_text", "bloom")
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
OWN = {
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": SHORT},
    "phimoe": {"rope_parameters": LONG | {"short_mscale": 1.0, "long_mscale": 1.5}},
    "mixtral": {"head_dim": 16},
    "llama4_text": {"floor_scale": 8, "attn_temperature_tuning": True, "no_rope_layers": [1, 0]},
}
"""What a family takes in place of dynamic NTK, or needs beside it."""


def slow_but_quick(names):
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def made(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    take_own_positions(model)
    return model


def following(family):
    """The family with positions that follow the length of a row; None where it has none to turn."""
    rope = config_of(family).to_dict().get("rope_parameters")
    if not rope:
        return None
    of_types = {} if "rope_type" in rope else {name: dict(DYNAMIC) for name in rope}
    asked = {"rope_parameters": of_types or rope | DYNAMIC, "max_position_embeddings": SHORT}
    return AutoConfig.for_model(family, **(SMALL | FAMILIES[family] | asked | OWN.get(family, {})))


TURNED = [family for family in FAMILIES if family in PACKING_TESTED_MODELS and following(family) is not None]


@pytest.mark.parametrize("family", slow_but_quick(TURNED))
def test_rows_that_lie_end_to_end_are_turned_by_their_own_lengths(family):
    model = made(following(family))
    assert reached(length_rules(model.config.to_dict()), LONGEST, "row", "place") is not None
    found = verify_isolation(
        model, AttentionBackend.TORCH_CPU, shared_prompts=False, longest=LONGEST, together=TOGETHER
    )
    assert found.packed_alone < 1e-5
    assert verify_padding(model, longest=LONGEST, by_row=True) < 1e-5


@pytest.mark.parametrize("family", slow_but_quick(FAMILIES))
def test_rows_that_are_padded_beside_longer_ones_are_what_they_are_alone(family):
    assert verify_padding(made(config_of(family)), longest=LONGEST) < 1e-5


@pytest.mark.parametrize("family", slow_but_quick(FAMILIES))
def test_the_familys_sampler_gives_the_models_own_log_probs(family):
    """As a plan would choose it: native where rows are packed, else transformers in the first right way."""
    model = made(config_of(family))
    is_native = family in PACKING_TESTED_MODELS
    reported = []

    def sampler(form):
        if is_native:
            return NativeSampler(model, AttentionBackend.TORCH_CPU, 4)
        return TransformersSampler(model, 4, 0, form=form)

    check = StartCheck(model, Ranks(), reported.append, nullcontext)
    form = check.passing(sampler, FORMS[0], check_groups(range(5, 29)))
    assert bool(reported) == (form is not FORMS[0])
