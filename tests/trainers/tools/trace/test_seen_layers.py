"""Layers that no formula knows: what passes without data find, and the arithmetic by it against the trace."""

import subprocess
import sys
from dataclasses import replace

import pytest
from trace_cases import EXPERTS, HALF, LORA, PADDED, SMALL, sft

from memtrain.cli.plan.model_shape import layers_seer, passed_shape, shape_for
from memtrain.memory.estimate.activations import layer_kept
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.explain.own_layers import activations_words
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.trainers.model.loading.module_shapes import counted_shape
from memtrain.trainers.tools.trace import seen_layers as passes
from memtrain.trainers.tools.trace.client import LayersJob, layers_job, seen_layers
from memtrain.trainers.tools.trace.other_kernels import OTHER_KERNELS
from memtrain.trainers.tools.trace.seen_layers import Seen, piece_of, see_layers
from memtrain.trainers.tools.trace.trace import trace

DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
DELTA |= {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
OF_EXPERTS = EXPERTS | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 256,
}
IN_TURN = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES = {
    "qwen3_next": DELTA | OF_EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | OF_EXPERTS,
    "olmo_hybrid": DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": MAMBA2,
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA2 | OF_EXPERTS | IN_TURN | {"shared_intermediate_size": 256},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1}
    | {"hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "head_dim": 32}
    # As transformers saves it: numbers of experts that no layer has.
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688},
    "minimax": OF_EXPERTS | IN_TURN | {"block_size": 64},
    "gpt_neox": {"intermediate_size": 512},
    "stablelm": {"partial_rotary_factor": 0.25},
    "recurrent_gemma": {"lru_width": 128, "block_types": ["recurrent", "attention"]},
}
QUICK = ("qwen3_5_text", "lfm2", "nemotron_h", "gpt_neox", "stablelm")
TOO_HIGH = (
    ("lfm2", "LoRA in float32, checkpointed"),
    ("recurrent_gemma", "LoRA, checkpointed"),
    ("recurrent_gemma", "LoRA in float32, checkpointed"),
)
NO_ADAPTER = ("falcon_h1", "nemotron_h")
"""Of which PEFT adapts no `out_proj`."""
LONG = HeaviestBatch(rows=2, tokens=1024, scored_tokens=1024, longest=512)
FORMS = {
    "whole": {},
    "checkpointed": {"checkpoint_every": 1},
    "every other": {"checkpoint_every": 2},
    "LoRA": {"adapter": LORA},
    "LoRA, checkpointed": {"adapter": LORA, "checkpoint_every": 1},
    "in float32": {"dtype": "float32"},
    "LoRA in float32, checkpointed": {"adapter": LORA, "dtype": "float32", "checkpoint_every": 1},
}


def config_of(family):
    return SMALL | {"model_type": family} | FAMILIES[family]


def case_of(family, changes):
    return replace(sft(config_of(family), PADDED | HALF | {"max_length": 512} | changes), batch=LONG)


def cases():
    for family in FAMILIES:
        for form in FORMS:
            is_quick = family in QUICK and form in ("whole", "LoRA, checkpointed")
            is_quick |= family == "gpt_neox" and "LoRA in" in form
            marks = [] if is_quick else [pytest.mark.slow]
            if (family, form) in TOO_HIGH:
                why = "of two layers the first needs no gradient of its input: 3 to 10 % too high"
                marks.append(pytest.mark.xfail(reason=why, strict=True))
            if not (family in NO_ADAPTER and "adapter" in FORMS[form]):
                yield pytest.param(family, FORMS[form], marks=marks)


@pytest.mark.parametrize(("family", "changes"), cases())
def test_the_arithmetic_by_seen_layers_follows_the_trace(family, changes):
    """It told 38 to 89 % too little of these by the formulas of a Llama, and of GPT-NeoX 27 to 47 % too much.
    It may tell a little too much."""
    case = case_of(family, changes)
    shape = passed_shape(counted_shape(case.config), see_layers(case.config, case.settings))
    reported = estimate(case.settings, shape, LONG, accumulates=False)
    found = trace(case.job).recorder.peak_bytes
    assert -0.02 < reported.peak.num_bytes / found - 1 < 0.03


@pytest.mark.parametrize("form", ["whole", "LoRA", "LoRA, checkpointed", "LoRA in float32, checkpointed"])
@pytest.mark.parametrize(
    "changes", [{"attention": "torch_cpu"}, {"attention": "torch_varlen", "device": "cuda"}]
)
def test_layers_that_take_packed_rows_are_passed_with_one(changes, form):
    """Memtrain's own attention, which a family has by default, is told where rows begin: without, no layer
    passed."""
    case = replace(sft(config_of("gpt_neox"), HALF | {"max_length": 512} | changes | FORMS[form]), batch=LONG)
    shape = passed_shape(counted_shape(case.config), see_layers(case.config, case.settings))
    reported = estimate(case.settings, shape, LONG, accumulates=False)
    assert -0.02 < reported.peak.num_bytes / trace(case.job).recorder.peak_bytes - 1 < 0.03


def test_every_kind_of_layer_is_passed_once_and_stands_for_its_like():
    seen = see_layers(config_of("qwen3_5_text"), case_of("qwen3_5_text", {}).settings)
    assert seen.order == (0, 0, 0, 1)
    delta, attention = seen.kinds
    # What transformers' own code keeps of a delta rule is float32, and several times what attention keeps.
    assert delta.kept.each > 2 * attention.kept.each
    assert {delta.kept.square, attention.kept.square} == {0.0}


def test_a_seen_llama_keeps_what_its_formula_says():
    """Its output, which was counted too, goes with the forward pass: the next norm keeps a float32 copy."""
    config, settings = SMALL | {"num_key_value_heads": 4}, case_of("qwen3_5_text", {}).settings
    known = shape_of(config)
    load, seen = (
        Workload(settings, one, LONG) for one in (known, replace(known, seen=see_layers(config, settings)))
    )
    assert layer_kept(seen) == layer_kept(load)


def test_bytes_at_three_lengths_lie_on_a_parabola():
    """7 + 5 T + 3 T^2 at two, three and four pieces of ten tokens."""
    found = passes._growth(10, [7 + 5 * tokens + 3 * tokens**2 for tokens in (20, 30, 40)])
    assert (found.start, found.each, found.square) == pytest.approx((7, 5, 3))
    assert found.of(100) == pytest.approx(30_507)


def test_layers_bytes_are_read_off_the_changes_of_their_passes():
    """Two layers get inputs of 4 and 6 and keep 10 and 20; the output of the second, 5, is let go with the
    forward pass. In the backward pass they hold 40 and 7 more, and gradients of their weights of 3 and 2."""
    sizes = {"in": 4, "a": 10, "b": 6, "c": 20, "out": 5, "back": 40, "late": 3, "again": 7, "first": 2}
    order = ["in", "a", "b", "c", "out", "-out", "late", "back", "-back", "-c", "first", "again", "-again"]
    # Computed again the second holds 8 with a gradient of 3, and the first 9 with what came in, 2.
    sizes |= {"enters": 8, "its own": 3, "comes in": 2, "made": 9}
    order += ["its own", "enters", "-enters", "comes in", "made"]
    serials = {name: number for number, name in enumerate(sizes)}
    changes = [
        passes.Change(
            serials[name.lstrip("-")],
            -sizes[name[1:]] if name[0] == "-" else sizes[name],
            name.lstrip("-") in ("late", "first", "its own"),
        )
        for name in order
    ]
    bare = passes.Marks([0, 1, 2], {})
    trained = passes.Marks([1, 3, 5], {2: 6, 1: 10, 0: 13}, done=6)
    again = passes.Marks([], {2: 13, 1: 16, 0: 18}, done=13)
    first, second = (passes._of_layer(changes, 0, (bare, trained, again), at) for at in (0, 1))
    # In the first layer's turn its own 10, what it gave to the second, and 7 more.
    assert first == Seen(16, backward=23, gradients=2, forward=4, recomputed=11, recomputed_gradients=0)
    assert second == Seen(20, backward=60, gradients=3, forward=14, recomputed=8, recomputed_gradients=3)


def test_pieces_are_those_of_the_configuration():
    assert piece_of(config_of("falcon_h1")) == 256
    assert piece_of(config_of("qwen3_5_text")) == 64
    assert piece_of(config_of("recurrent_gemma")) == 16


def test_models_whose_layers_are_unlike_a_llamas_are_passed_before_they_are_planned():
    """By a Llama's formulas GPT-NeoX was up to 47 % too high, and StableLM from 4 too low to 23 too high."""
    for family, is_passed in {"gpt_neox": True, "stablelm": True, "lfm2": True, "llama": False}.items():
        config = SMALL | {"model_type": family} | FAMILIES.get(family, {})
        assert (layers_seer(config, shape_for(config)) is not None) == is_passed
    unseen = replace(shape_for(SMALL | {"model_type": "stablelm"}), unseen="it cannot be built")
    assert "it cannot be built. They are counted like those of a Llama" in activations_words(unseen)
    assert not unseen.is_floor


@pytest.mark.slow
def test_a_process_of_its_own_sees_the_layers_and_remembers(tmp_path, monkeypatch):
    """Falcon-H1's time steps are bound by infinity, which JSON has no word for: the process got a null."""
    monkeypatch.setattr("memtrain.trainers.tools.trace.client._newest_source", lambda: "now")
    case = case_of("falcon_h1", {})
    job = layers_job(case.config | {"time_step_limit": [0.0, float("inf")]}, case.settings)
    assert LayersJob.model_validate_json(job.model_dump_json()) == job
    first = seen_layers(job, cache=tmp_path)
    assert first == see_layers(case.config, case.settings)
    [file] = tmp_path.glob("*.json")
    file.write_text(first.model_copy(update={"piece": 7}).model_dump_json())
    assert seen_layers(job, cache=tmp_path).piece == 7


def test_a_trace_takes_no_kernels_of_other_packages(tmp_path):
    """They are compiled for GPUs, and take no tensors without data."""
    for name in OTHER_KERNELS:
        (tmp_path / f"{name}.py").write_text("")
    look = (
        "from importlib import import_module\n"
        "from memtrain.trainers.tools.trace.other_kernels import OTHER_KERNELS, hide_other_kernels\n"
        "for hides in (False, True):\n"
        "    hides and hide_other_kernels()\n"
        "    for name in OTHER_KERNELS:\n"
        "        try:\n"
        "            print(import_module(name).__name__, end=' ')\n"
        "        except ImportError:\n"
        "            print('none', end=' ')\n"
    )
    path = {"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}"}
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=path)
    assert done.stdout.split() == [*OTHER_KERNELS, "none", "none", "none"]
