"""Time of a step's completions, by hand: passes that read all weights, prompts, and reward models."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from memtrain.memory.estimate.auxiliary_models import RewardShape
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.generation.rollout_time import rollout_time
from memtrain.memory.generation.vllm import longest_prompt
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.planner.resolve import Resolved
from memtrain.recipes.sections.generate import Generate

Ask = Callable[..., Resolved]
GENERATE = Generate(max_tokens=128)


@pytest.fixture
def on_h100(facts_of: Callable[..., PlannerInputs]) -> PlannerInputs:
    return facts_of(Hardware.named("h100"))


@pytest.fixture
def settings(ask: Ask, on_h100: PlannerInputs):
    found = ask(
        on_h100,
        method="grpo",
        rewards__functions="exact_answer",
        generate__max_tokens=128,
        train__batch_size=64,
        train__max_steps=10,
    )
    return found.settings.model_copy(update={"cuda_graphs": False, "rollout_rows": 64, "sampler": "native"})


def test_operators_that_are_launched_one_by_one_take_the_time_of_a_small_model(settings, on_h100):
    """47 operators a layer of 13.2 microseconds each for each of 128 tokens; captured, 2.5 each."""
    eager = rollout_time(settings, on_h100, GENERATE)
    layers = on_h100.shape.num_layers
    assert eager.writing_s == pytest.approx(128 * 47 * layers * 13.2e-6)
    captured = rollout_time(settings.model_copy(update={"cuda_graphs": True}), on_h100, GENERATE)
    assert captured.writing_s < eager.writing_s


def test_half_as_many_rows_at_once_take_twice_as_many_passes(settings, on_h100):
    halved = settings.model_copy(update={"rollout_rows": 32})
    whole = rollout_time(settings, on_h100, GENERATE)
    assert rollout_time(halved, on_h100, GENERATE).writing_s == pytest.approx(2 * whole.writing_s)


def test_a_prompt_is_read_once_for_its_group_and_judged_with_every_completion(settings, on_h100):
    """8 prompts of 64 completions; else 64. A reward model reads 64 rows of prompt and completion."""
    shared = rollout_time(settings, on_h100, GENERATE)
    alone = rollout_time(settings.model_copy(update={"sampler": "transformers"}), on_h100, GENERATE)
    assert alone.reading_s == pytest.approx(8 * shared.reading_s)
    assert shared.judging_s == 0
    judged = replace(on_h100, rewards=(RewardShape(on_h100.shape, "auto"),))
    tokens = 64 * (longest_prompt(on_h100, GENERATE) + 128)
    rate = on_h100.hardware.rates.half_matmul_per_s
    assert rollout_time(settings, judged, GENERATE).judging_s == pytest.approx(
        2 * on_h100.shape.num_parameters * tokens / rate
    )


def test_weights_on_the_host_cross_the_bus_for_every_token(settings, on_h100):
    moved = settings.model_copy(update={"weights_offload": True, "cuda_graphs": True})
    here = settings.model_copy(update={"cuda_graphs": True})
    assert (
        rollout_time(moved, on_h100, GENERATE).writing_s > 2 * rollout_time(here, on_h100, GENERATE).writing_s
    )
