"""The start-up check of samplers: it passes those that are right, mends what it can, and stops the others."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import SETTINGS
from torch import nn

from memtrain.cli.plan.make_plan import make_plan
from memtrain.cli.plan.model_shape import shape_for
from memtrain.errors import LaunchError
from memtrain.memory.generation.decode_bytes import generation_bytes
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.sections.generate import Generate
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.online.generation import native_sampler
from memtrain.trainers.online.generation.backend import OwnSampler
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.kv_cache import KVCache
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling
from memtrain.trainers.online.generation.start_check import StartCheck, check_groups
from memtrain.trainers.online.generation.transformers_sampler import FORMS, Form, TransformersSampler
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.online.vllm.weight_check import furthest
from memtrain.trainers.runtime.operator_tape import OperatorTape
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source

SMALL: dict[str, Any] = {
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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "diffllama": {},
    "hrm_text": {"num_key_value_heads": 4, "head_dim": 16, "H_cycles": 1, "L_cycles": 2},
    "rwkv": {},
    "recurrent_gemma": {},
    "xlstm": {"num_heads": 4, "head_dim": 16, "num_blocks": 2, "qk_dim_factor": 1.0},
    "mamba": {},
}
PROMPT = tuple(range(5, 21))


def model_of(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
        return AutoModelForCausalLM.from_config(made).eval()


def checked(model: Any, make: Callable[[Form], Any], first: Form = FORMS[0]) -> tuple[Form, list[str]]:
    reported: list[str] = []
    check = StartCheck(model, Ranks(), reported.append, nullcontext)
    return check.passing(make, first, check_groups(PROMPT)), reported


def fallback(model: Any) -> Callable[[Form], TransformersSampler]:
    return lambda form: TransformersSampler(model, 4, 0, form=form)


@pytest.mark.parametrize("family", ["llama", "diffllama", "hrm_text"])
def test_the_native_sampler_keeps_keys_by_when_they_are_attended_to(family: str):
    """DiffLlama attends twice in a layer, HRM runs its layers in cycles: by layer one overwrote the other."""
    model = model_of(family)
    form, reported = checked(model, lambda form: NativeSampler(model, AttentionBackend.TORCH_CPU, 4))
    assert (form, reported) == (FORMS[0], [])


def test_keys_that_overwrite_each_other_are_stopped_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    """As it was: one place for both attentions of a layer."""
    plain = KVCache.next_turn
    monkeypatch.setattr(KVCache, "next_turn", lambda self: plain(self) // 2)
    monkeypatch.setattr(KVCache, "begin_pass", lambda self: setattr(self, "turn", 0))
    model = model_of("diffllama")
    with pytest.raises(LaunchError, match="does not give the model's own log-probs") as stopped:
        checked(model, lambda form: NativeSampler(model, AttentionBackend.TORCH_CPU, 4))
    assert "generate.backend: transformers" in stopped.value.faults[0].fix


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", 0), ("mamba", 0), ("xlstm", 1), ("rwkv", 2), ("recurrent_gemma", 2)],
)
def test_generate_is_called_in_the_first_way_that_is_right(family: str, form: int):
    """xLSTM's state runs through padding; RWKV's cache is wrong, RecurrentGemma's fails on these layers."""
    model = model_of(family)
    found, reported = checked(model, fallback(model))
    assert found is FORMS[form]
    assert bool(reported) == (form > 0)
    assert not reported or "slower" in reported[0]


@pytest.mark.parametrize("family", ["xlstm", "rwkv", "recurrent_gemma"])
def test_completions_written_in_that_way_have_the_models_log_probs(family: str):
    model = model_of(family)
    found, _ = checked(model, fallback(model))
    groups = [
        Group(PROMPT[:3], 2, 0),
        Group(PROMPT, 3, 1),
        Group(PROMPT[2:9], 1, 2),
        Group(PROMPT[3:6], 1, 3),
    ]
    made = TransformersSampler(model, 4, 0, form=found).generate(groups, Sampling(max_tokens=6))
    assert [len(samples) for samples in made] == [2, 3, 1, 1]
    for group, samples in zip(groups, made, strict=True):
        assert all(furthest(model, group, sample) < 1e-4 for sample in samples)


def test_a_model_that_no_way_of_calling_generate_is_right_for_is_stopped(monkeypatch: pytest.MonkeyPatch):
    model = model_of("llama")
    plain = TransformersSampler.generate

    def lying(self: TransformersSampler, *args: Any) -> Any:
        return [
            [type(one)(one.token_ids, (-9.0,) * 8, one.finish) for one in of] for of in plain(self, *args)
        ]

    monkeypatch.setattr(TransformersSampler, "generate", lying)
    with pytest.raises(LaunchError, match="its cache is off by") as stopped:
        checked(model, fallback(model))
    assert "vllm" in stopped.value.faults[0].fix


@pytest.mark.parametrize("family", ["llama", "diffllama", "hrm_text"])
def test_the_keys_that_are_kept_are_those_that_are_planned(family: str, monkeypatch: pytest.MonkeyPatch):
    """A prompt of 3 tokens, and two completions of 4: 11 tokens in float32."""
    kept: list[KVCache] = []

    class Watched(KVCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(self)

    monkeypatch.setattr(native_sampler, "KVCache", Watched)
    model = model_of(family)
    NativeSampler(model, AttentionBackend.TORCH_CPU, 2).generate(
        [Group(PROMPT[:3], 2, 0)], Sampling(max_tokens=4)
    )
    shape = shape_for(model.config.to_dict())
    asked = Generate.model_validate({"num_generations": 2, "max_tokens": 4})
    settings = Settings.model_validate(SETTINGS | {"sampler": "native"})
    planned = generation_bytes(settings, shape, asked, prompt=3, rows=2)
    assert kept[0].num_bytes == planned["keys and values"]


class StartsNothing(OperatorTape):
    """A recording that is there, and whose start computes nothing."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        super().record(run)
        return lambda: None


@pytest.mark.parametrize(("recorder", "is_on"), [(OperatorTape, True), (StartsNothing, False)])
def test_captured_passes_that_write_something_else_are_given_up(
    recorder: type[OperatorTape], is_on: bool, tmp_path: Any
):
    """At the start of the run, which goes on without them, and says so."""
    plan = make_plan(load_recipe("smoke/grpo", [f"data.cache_dir={tmp_path}"]), run_dir=str(tmp_path)).plan
    make_accelerator(plan.settings)
    built = build(plan)
    steps = online_source(plan, built, Rollouts())
    assert isinstance(steps, OnlineSteps)
    reported: list[str] = []
    own = OwnSampler(plan, built, DecodeGraphs(recorder, reported.append))
    own.check(Generating(own, 4, Ranks(), reported.append), steps.prompts)
    assert own.graphs is not None
    assert own.graphs.is_on == is_on
    assert len(reported) == (not is_on)
    assert all("with CUDA graphs the sampler is off by" in one for one in reported)
