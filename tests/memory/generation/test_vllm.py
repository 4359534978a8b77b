"""What vLLM adds to a plan: its memory beside training, asleep and awake, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.auxiliary_models import RewardShape
from memtrain.memory.estimate.pricing import MARGIN_BYTES, MARGIN_SHARE, PlannerInputs
from memtrain.memory.estimate.static import needed
from memtrain.memory.explain.tables import VLLM, owner_table, with_vllm
from memtrain.memory.generation.vllm import CPU_PROCESS, CUDA_ASLEEP, CUDA_PROCESS
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import GIB, MIB
from memtrain.memory.planner.resolve import Resolved

Ask = Callable[..., Resolved]

GRPO: dict[str, Any] = {
    "method": "grpo",
    "rewards__functions": "exact_answer",
    "generate__backend": "vllm",
    "generate__max_tokens": 128,
    "train__batch_size": 64,
    "train__max_steps": 10,
}
PYTHON = {"python": "/envs/vllm/bin/python"}


@pytest.fixture
def on_h100(facts_of: Callable[..., PlannerInputs]) -> PlannerInputs:
    return facts_of(Hardware.named("h100"))


def decision(found: Resolved, setting: str) -> str:
    return next(f"{one.value}: {one.reason}" for one in found.decisions if one.setting == setting)


def test_keys_are_those_of_the_rollout_with_each_prompt_once(ask: Ask, on_h100: PlannerInputs):
    """64 completions of 8 prompts. Prompt 512 - 128 = 384; answer 128 and a block of 32 to end in.

    A token: 2 (keys, values) x 256 x 16 layers x 2 bytes = 16,384; (8 x 384 + 64 x 160) of them.
    """
    found = ask(on_h100, generate__vllm=PYTHON, **GRPO)
    settings = found.settings
    assert settings.sampler == "vllm"
    assert settings.sampler_keys_bytes == 16_384 * (8 * 384 + 64 * 160)
    assert settings.sampler_context == 512
    assert settings.rollout_rows == 64
    weights = 2 * on_h100.shape.num_parameters
    logits = 3 * 4 * 64 * 32_000
    assert settings.sampler_bytes == weights + CUDA_PROCESS + logits + settings.sampler_keys_bytes


def test_an_engine_that_takes_all_room_leaves_what_the_trainer_holds_with_its_margin(
    ask: Ask, on_h100: PlannerInputs
):
    """Keys of 100,000 completions are more than there is: the column of generation ends below the card."""
    many = GRPO | {"train__batch_size": 100_000, "generate__rows": 100_000}
    found = ask(on_h100, generate__vllm=PYTHON, **many)
    assert "the others wait" in decision(found, "sampler_bytes")
    writing = next(one for one in found.prediction.phases if one.phase == "generation")
    assert "weights on their way" in {one.owner for one in writing.owners}
    trainer = round(needed(writing.num_bytes, found.settings) * (1 + MARGIN_SHARE)) + MARGIN_BYTES
    card = on_h100.hardware.memory_bytes
    assert card - trainer - MIB < found.settings.sampler_bytes <= card - trainer


def test_the_engines_share_stands_in_the_column_of_generation_and_in_no_prediction(
    ask: Ask, on_h100: PlannerInputs
):
    found = ask(on_h100, generate__vllm=PYTHON, **GRPO)
    shown = with_vllm(found.prediction, found.settings, found.case.recipe)
    headers, rows = owner_table(shown, found.plain)
    [row] = [row for row in rows if row[0] == VLLM]
    filled = {head for head, cell in zip(headers[1:], row[1:], strict=True) if cell != "0"}
    assert filled == {"generation"}
    reported, totals = (
        {phase.phase: phase.num_bytes for phase in one.phases} for one in (found.prediction, shown)
    )
    assert totals.pop("generation") == reported.pop("generation") + found.settings.sampler_bytes
    assert totals == reported
    apart = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    assert with_vllm(apart.prediction, apart.settings, apart.case.recipe) == apart.prediction


def test_a_sleeping_engine_takes_from_training_what_it_keeps(ask: Ask, on_h100: PlannerInputs):
    native = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    found = ask(on_h100, generate__vllm=PYTHON, **GRPO)
    assert found.settings.sampler_sleep == "level2"
    budgets = [one.prediction.budget_bytes or 0 for one in (native, found)]
    assert budgets[0] - budgets[1] == CUDA_ASLEEP
    assert "stay while the policy trains" in decision(found, "sampler_sleep")


def test_an_engine_that_never_sleeps_takes_all_of_its_memory_from_training(ask: Ask, on_h100: PlannerInputs):
    native = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    found = ask(on_h100, generate__vllm=PYTHON | {"sleep": "off"}, **GRPO)
    budgets = [one.prediction.budget_bytes or 0 for one in (native, found)]
    assert budgets[0] - budgets[1] == found.settings.sampler_bytes


def test_an_engine_with_devices_of_its_own_takes_nothing(ask: Ask, on_h100: PlannerInputs):
    native = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    found = ask(on_h100, generate__vllm=PYTHON | {"devices": 1}, **GRPO)
    assert found.prediction.budget_bytes == native.prediction.budget_bytes
    assert found.settings.sampler_sleep == "none"


def test_on_a_cpu_the_engine_stays_awake_beside_training(ask: Ask, facts_of: Callable[..., PlannerInputs]):
    found = ask(facts_of(), generate__vllm=PYTHON, **GRPO)
    assert found.settings.sampler_sleep == "none"
    assert found.settings.sampler_bytes > CPU_PROCESS + 4 * facts_of().shape.num_parameters
    assert "vLLM sleeps on CUDA only" in decision(found, "sampler_sleep")


def test_less_room_means_fewer_keys_and_then_a_refusal(ask: Ask, on_h100: PlannerInputs):
    roomy = ask(on_h100, generate__vllm=PYTHON, **GRPO).settings
    fixed = roomy.sampler_bytes - roomy.sampler_keys_bytes
    share = (fixed + 100 * MIB) / on_h100.hardware.memory_bytes
    tight = ask(on_h100, generate__vllm=PYTHON | {"memory_share": share}, **GRPO)
    assert 99 * MIB < tight.settings.sampler_keys_bytes <= 100 * MIB
    assert "the others wait" in decision(tight, "sampler_bytes")
    with pytest.raises(DoesNotFit, match="vLLM needs") as caught:
        ask(on_h100, generate__vllm=PYTHON | {"memory_share": 0.01}, **GRPO)
    assert "generate.backend: native" in caught.value.faults[0].fix


def test_generation_beside_training_must_fit_the_budget(ask: Ask, on_h100: PlannerInputs):
    """Moments stay on the device while vLLM writes: with less they wait on the host; then nothing helps."""
    said = GRPO | {"optim__master_weights": False}
    roomy = ask(on_h100, generate__vllm=PYTHON, memory__budget=int(5.5 * GIB), **said)
    tight = ask(on_h100, generate__vllm=PYTHON, memory__budget=int(4.8 * GIB), **said)
    assert (roomy.settings.optimizer_offload, tight.settings.optimizer_offload) == (False, True)
    with pytest.raises(DoesNotFit, match="no plan fits"):
        ask(on_h100, generate__vllm=PYTHON, memory__budget=int(3.5 * GIB), **said)


def test_a_server_needs_no_memory_here(ask: Ask, on_h100: PlannerInputs):
    native = ask(on_h100, **(GRPO | {"generate__backend": "native"}))
    found = ask(on_h100, generate__vllm={"server": "http://localhost:8000"}, **GRPO)
    assert found.settings.sampler == "vllm_server"
    assert found.settings.sampler_bytes == 0
    assert found.prediction.budget_bytes == native.prediction.budget_bytes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"model__quantize": "8bit", "model__adapter": {}, "generate__vllm": PYTHON}, "8bit with vLLM"),
        ({"generate__vllm": PYTHON | {"devices": (1, 2)}}, "generate.vllm.devices names 2"),
        (
            {"generate__vllm": PYTHON | {"devices": 1, "sleep": "level1"}},
            "has no effect: vLLM has its own devices",
        ),
        ({}, "vLLM is not installed in this environment"),
    ],
)
def test_what_vllm_cannot_honour_is_refused(
    ask: Ask, on_h100: PlannerInputs, said: dict[str, Any], words: str
):
    with pytest.raises(RecipeError) as caught:
        ask(on_h100, **GRPO, **said)
    assert any(words in fault.what for fault in caught.value.faults), caught.value.text()


@pytest.mark.parametrize("key", [{"devices": 0}, {"memory_share": 0.5}, {"sleep": "level2"}])
def test_what_is_about_cuda_is_refused_on_a_cpu(
    ask: Ask, facts_of: Callable[..., PlannerInputs], key: dict[str, Any]
):
    with pytest.raises(RecipeError, match="is for CUDA devices"):
        ask(facts_of(), generate__vllm=PYTHON | key, **GRPO)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_weights_in_shards_are_refused(ask: Ask, facts_of: Callable[..., PlannerInputs], engine: str):
    facts = facts_of(Hardware.named("h100", 2), presumed=frozenset({"deepspeed"}))
    with pytest.raises(RecipeError) as caught:
        ask(facts, cluster__engine=engine, generate__vllm=PYTHON, **GRPO)
    assert any("vLLM needs whole weights" in fault.what for fault in caught.value.faults)


def test_what_reads_completions_is_in_the_plan_beside_vllm_too(ask: Ask, on_h100: PlannerInputs):
    """A reward model's own pass and that of old log-probs: as where the trained module writes."""
    judged = replace(on_h100, rewards=(RewardShape(on_h100.shape, "auto"),))
    asked = GRPO | {"grpo__beta": 0.04}
    beside = ask(judged, generate__vllm=PYTHON, **asked).prediction
    alone = ask(judged, **asked | {"generate__backend": "native"}).prediction
    found, native = ({p.phase: p.num_bytes for p in one.phases} for one in (beside, alone))
    assert found["rewards"] == native["rewards"] > found["saving"]
    assert found["saving"] < found["log-probs"] <= native["log-probs"]
