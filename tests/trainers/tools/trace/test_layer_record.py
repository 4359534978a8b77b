"""The record of a layer: what passes without data measure, and the arithmetic by it against the trace."""

import subprocess
import sys
from dataclasses import replace

import layer_records as table
import numpy as np
import pytest
from trace_cases import DORA, EVERY, EXPERTS, HALF, LORA, PADDED, SMALL, has_liger, sft

from memtrain.cli.plan.model_shape import shape_for
from memtrain.memory.estimate.activations import layer_kept
from memtrain.memory.estimate.layer_record import recorded_backward
from memtrain.memory.estimate.peaks import estimate, step_moments
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.explain.own_layers import activations_words
from memtrain.memory.model_shape.layer_record import LayerRecord, ModelRecord, Moment, Peak
from memtrain.memory.model_shape.shape import is_measured, shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.trainers.model.loading.module_shapes import counted_shape
from memtrain.trainers.tools.trace import layer_record as passes
from memtrain.trainers.tools.trace.client import LayersJob, layer_record, layers_job
from memtrain.trainers.tools.trace.layer_record import measure_layers, piece_of
from memtrain.trainers.tools.trace.other_kernels import OTHER_KERNELS
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
NO_ADAPTER = ("falcon_h1", "nemotron_h")
"""Of which PEFT adapts no `out_proj`."""
QUICK_TABLE = [
    ("phi3", "full, float32"),
    ("olmo2", "full"),
    ("gemma", "DoRA, checkpointed"),
    ("granite", "full, padded"),
]
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
            if not (family in NO_ADAPTER and "adapter" in FORMS[form]):
                yield pytest.param(family, FORMS[form], marks=marks)


def error_of(case):
    """Share by which the prediction by the record is above the trace."""
    shape = replace(counted_shape(case.config), record=measure_layers(case.config, case.settings))
    reported = estimate(case.settings, shape, case.batch, accumulates=False)
    return reported.peak.num_bytes / trace(case.job).recorder.peak_bytes - 1


@pytest.mark.parametrize(("family", "changes"), cases())
def test_the_arithmetic_by_a_record_follows_the_trace(family, changes):
    """It told 38 to 89 % too little of these by the formulas of a Llama, and of GPT-NeoX 27 to 47 % too much.
    It may tell a little too much."""
    assert -0.02 < error_of(case_of(family, changes)) < 0.03


TABLE = [
    pytest.param(*one, marks=[] if one in QUICK_TABLE else [pytest.mark.slow]) for one in table.cases(None)
]


@pytest.mark.parametrize(("family", "form"), TABLE)
def test_a_record_is_never_below_the_trace_and_a_little_above(family, form):
    """Of families that have formulas, too: these had -2.8 to +2.9 % of the same cases."""
    assert 0 <= table.error_of(table.case_of(family, form)) < 0.011


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"kernels": "fused"}, id="fused kernels"),
        pytest.param({"kernels": "fused"} | EVERY | {"adapter": LORA}, id="fused, LoRA, checkpointed"),
        pytest.param({"adapter": LORA, "quantize": "4bit"}, id="QLoRA"),
        pytest.param({"adapter": LORA, "quantize": "4bit"} | EVERY, id="QLoRA, checkpointed"),
        pytest.param(
            {"liger": True, "device": "cuda"} | EVERY,
            id="Liger, checkpointed",
            marks=pytest.mark.skipif(not has_liger(), reason="liger-kernel is not installed"),
        ),
    ],
)
def test_what_runs_is_what_is_passed(changes):
    """Kernels, packed weights and Liger's code are in the record, not put beside it. QLoRA on a CPU is 0.4 %
    too low (measured; the reason is not known)."""
    case = replace(sft(SMALL | {"num_hidden_layers": 4}, HALF | {"max_length": 512} | changes), batch=LONG)
    assert -0.005 < error_of(case) < 0.012


@pytest.mark.parametrize("form", ["whole", "LoRA", "LoRA, checkpointed", "LoRA in float32, checkpointed"])
@pytest.mark.parametrize(
    "changes", [{"attention": "torch_cpu"}, {"attention": "torch_varlen", "device": "cuda"}]
)
def test_layers_that_take_packed_rows_are_passed_with_one(changes, form):
    """Memtrain's own attention, which a family has by default, is told where rows begin: without, no layer
    passed. LoRA by torch's CPU kernel is 2.3 % too high (measured; the reason is not known)."""
    case = replace(sft(config_of("gpt_neox"), HALF | {"max_length": 512} | changes | FORMS[form]), batch=LONG)
    assert -0.001 < error_of(case) < 0.025


def test_every_kind_of_layer_is_passed_once_and_stands_for_its_like():
    found = measure_layers(config_of("qwen3_5_text"), case_of("qwen3_5_text", {}).settings)
    assert found.order == (0, 1, 1, 2)
    _, delta, attention = found.kinds
    # What transformers' own code keeps of a delta rule is float32, and several times what attention keeps.
    assert delta.kept.each > 2 * attention.kept.each
    assert {delta.kept.square, attention.kept.square} == {0.0}


def test_a_measured_llama_keeps_what_its_formula_says():
    config, settings = SMALL | {"num_key_value_heads": 4}, case_of("qwen3_5_text", {}).settings
    known = shape_of(config)
    measured = replace(known, record=measure_layers(config, settings))
    load, other = (Workload(settings, one, LONG) for one in (known, measured))
    assert layer_kept(other) == layer_kept(load)


def test_moments_are_parabolas_of_which_each_is_the_highest_somewhere():
    """7 + 5 T + 3 T^2, a constant that is higher in short rows, and a line that is nowhere the highest."""
    lengths = (256, 384, 512)
    owns = [np.array([7 + 5 * T + 3 * T**2, 10**6, 40 * T]) for T in lengths]
    spans = [passes.Span(np.arange(3), own, np.array([2, 9, 0]), np.zeros(3, bool)) for own in owns]
    fit = object.__new__(passes.Fit)
    fit.step, fit.lengths, fit.is_alike, fit.passes = 128, list(lengths), True, spans
    found = fit.peak(lambda span: span)
    assert sorted(round(one.start) for one in found.moments) == [7, 10**6]
    assert found.highest(1, 100) == (10**6, 9)
    assert found.highest(1, 1000) == (3_005_007, 2)
    # Rows beside each other share what no token adds.
    assert found.highest(2, 1000) == (2 * 3_005_000 + 7, 2)


def test_a_kernels_own_memory_is_beside_the_record(monkeypatch):
    """As much as the run's segments take, at the moment when the kernel runs."""
    case = replace(sft(SMALL, HALF | {"attention": "torch_varlen", "device": "cuda"}), batch=LONG)
    kind = measure_layers(case.config, case.settings).kinds[0]
    assert kind.backward.in_kernel
    assert not kind.forward.in_kernel


def test_pieces_are_those_of_the_configuration():
    assert piece_of(config_of("falcon_h1")) == 256
    assert piece_of(config_of("qwen3_5_text")) == 64
    assert piece_of(config_of("recurrent_gemma")) == 16


def test_layers_of_every_family_without_a_formula_are_measured_before_they_are_planned():
    """By a Llama's formulas GPT-NeoX was up to 47 % too high, and StableLM from 4 too low to 23 too high."""
    for family, has_record in {"gpt_neox": True, "glm": True, "lfm2": True, "llama": False}.items():
        shape = shape_for(SMALL | {"model_type": family} | FAMILIES.get(family, {}))
        assert is_measured(shape, LORA) == has_record
        assert is_measured(shape, DORA)
    unknown = replace(shape_for(SMALL | {"model_type": "stablelm"}), unmeasured="it cannot be built")
    assert "it cannot be built. They are counted like those of a Llama" in activations_words(unknown)
    assert not unknown.is_floor


@pytest.mark.slow
def test_a_process_of_its_own_sees_the_layers_and_remembers(tmp_path, monkeypatch):
    """Falcon-H1's time steps are bound by infinity, which JSON has no word for: the process got a null."""
    monkeypatch.setattr("memtrain.trainers.tools.trace.client._sources", lambda: "now")
    case = case_of("falcon_h1", {})
    job = layers_job(case.config | {"time_step_limit": [0.0, float("inf")]}, case.settings)
    assert LayersJob.model_validate_json(job.model_dump_json()) == job
    first = layer_record(job, cache=tmp_path)
    assert first == measure_layers(case.config, case.settings)
    [file] = tmp_path.glob("*.json")
    file.write_text(first.model_copy(update={"piece": 7}).model_dump_json())
    assert layer_record(job, cache=tmp_path).piece == 7


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


@pytest.mark.parametrize(
    ("family", "changes", "treatment"),
    [
        pytest.param("phi3", {"slice_tokens": 512}, "slices", id="in slices"),
        pytest.param("llama", {"offload": "all", "adapter": LORA}, "travelling", id="LoRA, on the host"),
    ],
)
def test_a_turn_of_a_treated_layer_follows_the_trace(family, changes, treatment):
    """Formulas told 15 to 40 % too much of travelling LoRA, and 28 % too little of a forward pass whose loss
    is small; that a whole step followed them was the loss's doing."""
    kernels = {"attention": "torch_varlen", "device": "cuda"}
    case = sft(SMALL | {"model_type": family, "sliding_window": None}, HALF | kernels | changes)
    case = replace(case, batch=HeaviestBatch(rows=1, tokens=4096, scored_tokens=64, longest=4096))
    record = measure_layers(case.config, case.settings, [treatment])
    shape = replace(counted_shape(case.config), record=record)
    load = Workload(case.settings, shape, case.batch)
    moments = step_moments(load, has_state=True, accumulates=False)
    told = [sum(moment.values()) for moment in moments if "recomputation" in moment][:2]
    peaks = trace(case.job).recorder.phase_peaks
    for found, layer in zip(told, ("last", "first"), strict=True):
        assert 0 < found / peaks[f"steady step.backward.{layer}"] - 1 < 0.05


def test_keys_of_other_ranks_and_doras_identity_are_beside_the_record():
    """One process passed the layers: what a row's others send, and what ZeRO-3's parts need, it never saw."""
    moment = Moment(start=0, each=100)
    peak = Peak(moments=(moment,))
    kind = LayerRecord(kept=moment, backward=peak, forward=peak, recomputed=peak)
    record = ModelRecord(
        kinds=(kind,),
        order=(0, 0),
        piece=1,
        tables=moment,
        embedded=moment,
        final_norm=moment,
        final_backward=peak,
    )

    def turn(changes):
        settings = sft(SMALL, changes).settings
        return recorded_backward(Workload(settings, replace(shape_of(SMALL), record=record), LONG)).num_bytes

    alone, ranks = turn({}), {"num_processes": 2, "context_parallel": 2}
    by_keys = turn(ranks | {"context_by": "all_gather", "shared_prompts": True})
    by_heads = turn(ranks | {"context_by": "ulysses"})
    # 1,024 keys and values of 64 numbers, their gradients, and the sums of these; 640 numbers that are dealt
    # out of each of 512 tokens, and 128 that are kept.
    assert by_keys - alone // 2 == 1024 * 64 * 4 * 6
    assert by_heads - alone // 2 == 512 * 4 * (640 + 128)
    assert turn({"adapter": DORA, "engine": "zero3"}) == alone + 4 * 352**2
