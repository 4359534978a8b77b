"""Which attention back end is taken under which facts, and that each refusal says why."""

import subprocess
import sys
from dataclasses import replace

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.rules.attention import AttentionBackend as Backend
from memtrain.memory.rules.attention import AttentionFacts, choose_attention, model_facts, refusal
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe, decide_attention

CPU = AttentionFacts(device="cpu", dtype="float32", head_dim=64)
HOPPER = AttentionFacts(
    device="cuda",
    dtype="bfloat16",
    compute_capability=(9, 0),
    packages=frozenset({"flash_attn", "triton"}),
    longest_row_tokens=2048,
    head_dim=128,
)
EVERY_FLASH = frozenset({"flash_attn", "flash_attn_interface", "triton"})


@pytest.mark.parametrize(
    ("facts", "taken"),
    [
        (CPU, Backend.TORCH_CPU),
        (replace(CPU, dtype="bfloat16", head_dim=80), Backend.TORCH_CPU),
        (HOPPER, Backend.FLASH),
        (replace(HOPPER, packages=EVERY_FLASH), Backend.FLASH3),
        (replace(HOPPER, packages=EVERY_FLASH, softcap=50.0), Backend.FLASH3),
        (replace(HOPPER, packages=EVERY_FLASH, compute_capability=(10, 0)), Backend.FLASH),
        (replace(HOPPER, packages=EVERY_FLASH, compute_capability=(8, 0)), Backend.FLASH),
        (replace(HOPPER, packages=frozenset({"triton"})), Backend.TORCH_VARLEN),
        (replace(HOPPER, packages=frozenset()), Backend.TORCH_VARLEN),
        (replace(HOPPER, dtype="float16"), Backend.FLASH),
        (replace(HOPPER, dtype="float32"), Backend.FLEX),
        (replace(HOPPER, dtype="float32", packages=frozenset()), Backend.TORCH_EFFICIENT),
        (replace(HOPPER, dtype="float32", in_slices=True), Backend.TORCH_EFFICIENT),
        (replace(HOPPER, dtype="float32", in_slices=True, softcap=50.0), Backend.MASKED),
        (replace(HOPPER, in_slices=True), Backend.FLASH),
        (replace(HOPPER, head_dim=512), Backend.FLEX),
        (replace(HOPPER, head_dim=100), Backend.FLEX),
        (replace(HOPPER, compute_capability=(7, 5)), Backend.MASKED),
        (replace(HOPPER, compute_capability=(7, 5), dtype="float16"), Backend.TORCH_EFFICIENT),
        (replace(HOPPER, sliding_window_tokens=2048), Backend.FLASH),
        (replace(HOPPER, sliding_window_tokens=2047), Backend.FLASH),
        (replace(HOPPER, sliding_window_tokens=4096, longest_row_tokens=None), Backend.FLASH),
        (replace(HOPPER, sliding_window_tokens=512, dtype="float32"), Backend.TORCH_EFFICIENT),
        (replace(HOPPER, chunk_tokens=1024), Backend.TRANSFORMERS),
        (replace(HOPPER, softcap=50.0), Backend.FLASH),
        (replace(HOPPER, softcap=50.0, packages=frozenset({"triton"})), Backend.MASKED),
        (replace(CPU, softcap=50.0), Backend.MASKED),
        (replace(HOPPER, has_sinks=True), Backend.FLASH),
        (replace(CPU, has_sinks=True, sliding_window_tokens=128), Backend.TORCH_CPU),
        (replace(CPU, attention_dropout=0.1), Backend.TRANSFORMERS),
        (replace(CPU, own_layers=("mamba",)), Backend.TRANSFORMERS),
    ],
)
def test_the_first_back_end_that_fits_is_taken(facts: AttentionFacts, taken: Backend):
    choice = choose_attention(facts)
    assert choice.backend is taken
    assert choice.reason
    assert choice.can_pack is (taken is not Backend.TRANSFORMERS)


@pytest.mark.parametrize(
    ("backend", "facts", "sentence"),
    [
        (Backend.FLASH, replace(HOPPER, packages=frozenset()), "flash-attn package is not installed"),
        (Backend.FLASH3, HOPPER, "flash_attn_interface) is not installed"),
        (
            Backend.FLASH3,
            replace(HOPPER, compute_capability=(10, 0)),
            "Hopper GPU (compute capability 9.0), this is 10.0",
        ),
        (
            Backend.FLASH,
            replace(HOPPER, compute_capability=(7, 5)),
            "needs compute capability 8.0, this is 7.5",
        ),
        (Backend.TORCH_VARLEN, replace(HOPPER, dtype="float32"), "bfloat16 or float16, this is float32"),
        (Backend.TORCH_VARLEN, replace(HOPPER, head_dim=264), "up to 256 in steps of 8, this is 264"),
        (Backend.FLEX, replace(HOPPER, packages=frozenset()), "triton"),
        (Backend.FLEX, replace(HOPPER, sliding_window_tokens=512), "lower max_length to 512"),
        (Backend.TORCH_VARLEN, replace(HOPPER, chunk_tokens=512), "lower max_length to 512"),
        (
            Backend.TORCH_VARLEN,
            replace(HOPPER, chunk_tokens=64, longest_row_tokens=None),
            "max_length is not bounded",
        ),
        (Backend.TORCH_CPU, replace(CPU, softcap=50.0), "caps attention scores at 50"),
        (Backend.MASKED, replace(CPU, own_layers=("conv", "mamba")), "conv, mamba layers"),
        (Backend.TORCH_CPU, replace(CPU, attention_dropout=0.1), "dropout 0.1"),
        (Backend.FLEX, replace(HOPPER, has_sinks=True), "attention sinks, which flex does not compute"),
    ],
)
def test_a_refusal_says_why_with_the_value_in_hand(backend: Backend, facts: AttentionFacts, sentence: str):
    assert sentence in (refusal(backend, facts) or "")


def test_the_choice_lists_every_back_end_that_cannot_run():
    choice = choose_attention(replace(HOPPER, dtype="float32"))
    assert [backend for backend, _ in choice.refused] == [Backend.FLASH3, Backend.FLASH, Backend.TORCH_VARLEN]


@pytest.mark.parametrize(
    ("presumed", "asked", "dtype", "taken"),
    [
        ((), "auto", "float32", Backend.TORCH_EFFICIENT),
        (("triton",), "auto", "float32", Backend.FLEX),
        (("triton", "flash_attn"), "auto", "float32", Backend.FLEX),
        (("flash_attn_interface",), "auto", "float32", Backend.TORCH_EFFICIENT),
        (("flash_attn", "flash_attn_interface"), "auto", "bfloat16", Backend.TORCH_VARLEN),
        (("flash_attn",), "flash", "bfloat16", Backend.FLASH),
        (("flash_attn_interface",), "flash3", "bfloat16", Backend.FLASH3),
    ],
)
def test_packages_that_the_runs_machine_is_taken_to_have_count(
    recipe_of, monkeypatch, presumed, asked, dtype, taken
):
    """A plan for another machine: Triton is there, though it is not here, and what a recipe names is."""
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset())
    recipe = recipe_of({"model.attention": asked})
    ledger = DecisionLog(SourcedRecipe(recipe, lambda key: "default"), presumed=frozenset(presumed))
    config = {"model_type": "llama", "head_dim": 128}
    choice = decide_attention(ledger, Hardware.named("h100"), dtype, config)
    assert choice is not None
    assert choice.backend is taken


def test_a_back_end_asked_for_is_taken_where_it_can_run():
    choice = choose_attention(HOPPER, Backend.MASKED)
    assert choice.backend is Backend.MASKED
    assert choice.reason.startswith("asked for")
    assert choose_attention(CPU, Backend.TRANSFORMERS).can_pack is False


@pytest.mark.parametrize(
    ("facts", "asked", "why"),
    [
        (CPU, Backend.TORCH_VARLEN, "does not run on cpu"),
        (replace(HOPPER, dtype="float32"), Backend.TORCH_VARLEN, "float32"),
    ],
)
def test_a_back_end_asked_for_that_cannot_run_is_an_error_naming_those_that_can(facts, asked, why):
    with pytest.raises(RecipeError, match=why) as refused:
        choose_attention(facts, asked)
    assert "masked" in refused.value.faults[0].fix


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        ({"head_dim": 128, "hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 128}),
        ({"sliding_window": 4096}, {"sliding_window_tokens": 4096}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {}),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, {}),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
            {"sliding_window_tokens": 512},
        ),
        ({"attention_chunk_size": 8192, "layer_types": ["chunked_attention"]}, {"chunk_tokens": 8192}),
        (
            {"attn_logit_softcapping": 50.0, "attention_dropout": 0.1},
            {"softcap": 50.0, "attention_dropout": 0.1},
        ),
        ({"attn_logit_softcapping": None, "sliding_window": None}, {}),
        ({"model_type": "gemma2"}, {"softcap": 50.0}),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, {}),
        ({"model_type": "gpt_oss"}, {"has_sinks": True}),
        (
            {"layer_types": ["linear_attention", "full_attention", "moe"]},
            {"own_layers": ("linear_attention",)},
        ),
        ({"mamba_d_state": 16}, {"own_layers": ("mamba_d_state",)}),
        ({"model_type": "rwkv"}, {"own_layers": ("rwkv",), "untried": "rwkv"}),
        ({"model_type": "xlstm"}, {"own_layers": ("xlstm",), "untried": "xlstm"}),
        ({"text_config": {"sliding_window": 1024}}, {"sliding_window_tokens": 1024}),
    ],
)
def test_facts_are_read_from_a_configuration(config: dict[str, object], expected: dict[str, object]):
    nothing = {
        "head_dim": None,
        "sliding_window_tokens": None,
        "chunk_tokens": None,
        "top_keys_tokens": None,
        "softcap": None,
        "attention_dropout": 0.0,
        "has_sinks": False,
        "own_layers": (),
        "untried": "",
    }
    assert model_facts(config) == nothing | expected


def test_choosing_does_not_import_torch():
    code = "import sys, memtrain.memory.rules.attention; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
