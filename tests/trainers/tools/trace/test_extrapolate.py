"""Depths that stand for a deep model, by the kinds of its layers."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
from trace_cases import CASES, EXPERTS, LLAMA, SMALL, sft, zero

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.tools.trace.extrapolate import (
    kinds_repeat,
    num_of_buckets,
    predict_by_trace,
    shallow_depths,
)
from memtrain.trainers.tools.trace.extrapolate import num_layers as num_layers_of
from memtrain.trainers.tools.trace.fake_model import shorten

CUDA = {"device": "cuda", "attention": "torch_varlen"}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
LATENT |= {"v_head_dim": 32, "n_group": 1, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 1}
DEEPSEEK = SMALL | EXPERTS | LATENT | {"model_type": "deepseek_v3", "moe_intermediate_size": 64}
QWEN_MOE = SMALL | EXPERTS | {"model_type": "qwen3_moe", "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (SMALL, (0, 1)),
        (SMALL | {"model_type": "gemma3_text"}, (0, 6)),
        (SMALL | EXPERTS | {"model_type": "gpt_oss"}, (0, 2)),
        (DEEPSEEK | {"first_k_dense_replace": 3}, (3, 1)),
        (QWEN_MOE | {"mlp_only_layers": [0, 5]}, (6, 1)),
        (QWEN_MOE | {"decoder_sparse_step": 2}, (0, 2)),
    ],
)
def test_layers_repeat_after_those_of_kinds_of_their_own(config, found):
    assert kinds_repeat(config | {"num_hidden_layers": 24}) == found


MAMBA = SMALL | {"mamba_d_state": 16, "mamba_dt_rank": 8, "num_experts": 2, "num_local_experts": 2}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1}


@pytest.mark.parametrize(
    ("config", "num_layers", "kinds"),
    [
        (
            MAMBA | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 1},
            6,
            ["linear_attention", "full_attention", *["linear_attention"] * 3, "full_attention"],
        ),
        (
            SMALL | NEMOTRON | {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M*-M*-"},
            4,
            ["linear_attention", "full_attention", "mlp", "linear_attention"],
        ),
    ],
)
def test_a_configuration_that_computes_its_layers_is_shortened(config, num_layers, kinds):
    """Jamba's and Bamba's kinds follow from the number of layers, Nemotron-H's number from the kinds: neither
    could be traced where the model was deeper than its traces."""
    deep = {key: value for key, value in config.items() if key != "num_hidden_layers"}
    made = make_config(deep)
    assert num_layers_of(replace(CASES["chunked"].job, config=deep)) == len(made.layer_types)
    shorten(made, num_layers)
    assert (made.num_hidden_layers, made.layer_types) == (num_layers, kinds)


def test_depths_hold_the_leading_layers_and_one_period_more():
    assert shallow_depths(61, 1, leading=3) == (6, 7)
    assert shallow_depths(62, 6, leading=3) == (14, 20)
    assert shallow_depths(8, 1, leading=6) is None


def test_a_mixture_with_leading_dense_layers_is_traced_shallow_as_whole():
    """DeepSeek-V3's first three layers are dense: models of three and four layers showed its experts' layers
    as the difference of one of each."""
    config = DEEPSEEK | {"first_k_dense_replace": 3, "num_hidden_layers": 9}
    job = replace(CASES["mixtral"], config=config).job
    guessed, whole = predict_by_trace(job), predict_by_trace(job, is_whole=True)
    assert guessed.recorder is not whole.recorder
    assert [one.num_bytes for one in guessed.phases] == pytest.approx(
        [one.num_bytes for one in whole.phases], rel=0.0005
    )


def test_states_that_take_turns_on_the_device_are_not_taken_to_grow_with_depth():
    """Moments of an adapter of 30B, 3 GiB, come in two buckets of 256 MiB; models of three and four layers,
    whose moments fit into them, showed all at once, and a plan for 24 GiB as one that does not fit."""
    config = LLAMA | {"hidden_size": 2048, "num_hidden_layers": 9}
    adapter = Adapter(r=2048, target_modules=("q_proj", "v_proj"))
    job = sft(config, CUDA | {"optimizer_offload": True, "adapter": adapter}).job
    assert num_of_buckets(job, 9) == 6
    guessed, whole = predict_by_trace(job), predict_by_trace(job, is_whole=True)
    assert guessed.recorder is None
    (shallow,), (deep,) = ([o for o in one.phases if o.phase == "steady step"] for one in (guessed, whole))
    assert shallow.num_bytes == pytest.approx(deep.num_bytes, rel=0.001)
    assert deep.num_bytes < 2.1 * 2**30


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.filterwarnings("ignore")
def test_no_shallow_model_stands_for_a_deep_one_under_zero():
    """Parts of three and four layers are smaller than the embedding, and their norm grew: 15 % too low."""
    config = LLAMA | {"vocab_size": 16384, "num_hidden_layers": 9, "tie_word_embeddings": True}
    changes = zero(2, config) | CUDA | {"num_processes": 8, "checkpoint_every": 1}
    job = sft(config, changes | {"dtype": "bfloat16", "master_weights": True}).job
    guessed, whole = predict_by_trace(job), predict_by_trace(job, is_whole=True)
    assert guessed.phases == whole.phases
