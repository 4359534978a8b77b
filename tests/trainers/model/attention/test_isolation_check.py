"""The start-up check passes plain models untouched, and stops those that would contaminate silently."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import functions, set_attention
from memtrain.trainers.model.attention.isolation_check import verify_causal, verify_isolation
from memtrain.trainers.model.attention.two_part import PLAIN

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LINEAR = {f"linear_{key}": value for key, value in (("num_value_heads", 4), ("num_key_heads", 2))} | {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRIDS = {
    "qwen3_5_text": LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **config: object) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoConfig.for_model(family, **(SHAPE | config))
        return AutoModelForCausalLM.from_config(made, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_passes_and_its_rows_do_not_move_each_other_by_a_bit(tiny_model, dtype: torch.dtype):
    found = verify_isolation(tiny_model().to(dtype), AttentionBackend.TORCH_CPU)
    assert (found.packed_seen, found.shared_seen) == (0.0, 0.0)
    assert found.shared_alone is not None
    assert max(found.packed_alone, found.shared_alone) < (1e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("check", [verify_causal, lambda m: verify_isolation(m, AttentionBackend.TORCH_CPU)])
def test_weights_that_are_no_numbers_are_reported_as_such(tiny_llama, check: Callable, value: float):
    """They were told as a model that is not causal, or whose rows influence each other."""
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, :2] = value
    with pytest.raises(
        LaunchError, match=r"no finite numbers: model\.layers\.1\.self_attn\.k_proj\.weight has 2"
    ):
        check(model)


def test_hidden_states_that_overflow_are_reported_with_the_precision(tiny_llama):
    model = tiny_llama().half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(6e4)
        model.model.layers[0].mlp.up_proj.weight.fill_(6e4)
    with pytest.raises(LaunchError, match="overflow in float16"):
        verify_causal(model)


def test_shared_prompts_are_left_out_when_not_asked_for(tiny_llama):
    found = verify_isolation(tiny_llama(), AttentionBackend.MASKED, shared_prompts=False)
    assert (found.shared_seen, found.shared_alone) == (None, None)


def test_experts_pass():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    verify_isolation(model_of("qwen3_moe", **experts), AttentionBackend.TORCH_CPU)


def test_a_model_with_adapters_passes(tiny_llama):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    verify_isolation(get_peft_model(tiny_llama(), config), AttentionBackend.TORCH_CPU)


def test_the_check_leaves_model_and_random_state_as_they_were(tiny_llama: Callable[..., nn.Module]):
    model = tiny_llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    verify_isolation(model, AttentionBackend.TORCH_CPU)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_that_carry_state_are_found_in_the_model_itself(family: str, dtype: torch.dtype):
    model = model_of(family, dtype, **HYBRIDS[family])
    with pytest.raises(LaunchError, match="influence each other|gets no layout") as refused:
        verify_isolation(model, AttentionBackend.TORCH_CPU)
    # Of some releases of transformers the model itself, of others its attention does not pass the layout on.
    assert any(type(part).__name__ in str(refused.value) for part in model.modules())
    assert "model.attention: transformers" in refused.value.faults[0].fix


@pytest.mark.parametrize(
    ("family", "config", "meaning"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0, "sliding_window": 512}, "soft-capped"),
    ],
)
def test_attention_of_another_kind_is_refused(family: str, config: dict[str, object], meaning: str):
    model = model_of(family, **config)
    with pytest.raises(LaunchError, match=meaning):
        verify_isolation(model, AttentionBackend.TORCH_CPU)
    assert not model.config._attn_implementation.startswith("memtrain")


@pytest.mark.parametrize(
    ("family", "config", "backend"),
    [
        ("mistral", {"sliding_window": 8}, "torch_cpu"),
        ("gemma2", {"attn_logit_softcapping": 1.0, "sliding_window": 8}, "masked"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}, "torch_cpu"),
    ],
)
def test_windows_caps_and_sinks_are_those_of_the_model_itself(family, config, backend):
    model = model_of(family, **config, initializer_range=0.2)
    verify_isolation(model, AttentionBackend(backend))


def test_an_unknown_change_of_the_scores_is_found_against_the_models_own_attention(monkeypatch):
    """As if a release of transformers renamed `softcap`: no guard knows it, and the numbers still tell."""
    monkeypatch.setattr(functions, "rule_of", lambda others, span: PLAIN)
    model = model_of("gemma2", attn_logit_softcapping=1.0, sliding_window=512, initializer_range=0.2)
    with pytest.raises(LaunchError, match="differs from its rows computed alone"):
        verify_isolation(model, AttentionBackend.TORCH_CPU)


def test_a_model_that_attends_to_other_keys_than_its_tokens_is_refused():
    """DeepSeek 4 compresses its keys: an assertion about an empty cache ended the run as a bug."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts["num_hidden_layers"] = 4
    with pytest.raises(LaunchError, match="does not run under torch_cpu attention"):
        verify_isolation(model_of("deepseek_v4", **experts), AttentionBackend.TORCH_CPU)


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    model = model_of("bloom", n_head=4)
    with pytest.raises(LaunchError, match="does not allow another attention function"):
        verify_isolation(model, AttentionBackend.TORCH_CPU)


@pytest.mark.parametrize(
    ("family", "config", "implementation"),
    [
        ("mistral", {"sliding_window": 8}, "sdpa"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
        ("bloom", {"n_head": 4}, "eager"),
    ],
)
def test_stock_attention_is_the_one_that_the_models_class_allows(
    family: str, config: dict[str, object], implementation: str
):
    model = model_of(family, **config)
    set_attention(model, AttentionBackend.TRANSFORMERS)
    assert model.config._attn_implementation == implementation
