"""Teachers in the plan: what they hold, and what they cannot be with."""

from dataclasses import replace

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.estimate.teachers import TeacherShape
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.shape import shape_of
from tests.memory.conftest import SMALL

LARGE = SMALL | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
KEYS = {"method": "distill", "distill__teacher": "t", "length__max_length": 512}


@pytest.fixture
def facts(facts_of, recipe_of):
    """Facts of a student with a larger teacher."""

    def made(hardware=None, config=LARGE, **keys):
        said = {key.replace("__", "."): value for key, value in (KEYS | keys).items()}
        recipe = recipe_of(said)
        teacher = TeacherShape(shape_of(config), "auto", "t", config) if recipe.taught.loads_teacher else None
        return facts_of(hardware, method="distill", taught=recipe.taught, teacher=teacher)

    return made


def test_a_teacher_is_in_every_phase_and_its_time_in_the_step(ask, facts):
    resolved = ask(facts(), **KEYS)
    weights = 4 * shape_of(LARGE).num_parameters
    for phase in resolved.prediction.phases:
        assert {one.owner: one.num_bytes for one in phase.owners}["teacher"] == weights
    small = facts(config=SMALL)
    assert resolved.chosen.step_s > ask(small, **KEYS).chosen.step_s * 1.5


def test_a_file_holds_no_teacher(ask, facts):
    keys = {"distill__teacher": None, "distill__top_k": 64, "distill__top_k_file": "f"}
    resolved = ask(facts(**keys), **KEYS | keys)
    assert resolved.settings.teacher == "file"
    assert resolved.settings.teacher_top_k == 64
    assert not [one for phase in resolved.prediction.phases for one in phase.owners if one.owner == "teacher"]


@pytest.mark.parametrize(
    ("config", "keys", "says"),
    [
        (LARGE | {"vocab_size": 50_000}, {}, "a vocabulary of 50,000 tokens, and the student one of 32,000"),
        (LARGE | {"attention_chunk_size": 16}, {}, "the teacher"),
        (
            LARGE,
            {"cluster__engine": "zero2", "cluster__processes": 2},
            "the student's pass is made inside the teacher's",
        ),
        (
            LARGE,
            {"distill__teacher": "adapter_off", "model__adapter": {"r": 4, "modules_to_save": ("lm_head",)}},
            "adapter_off reads the student's head",
        ),
        (LARGE, {"cluster__context_parallel": 2, "cluster__processes": 2}, "a teacher reads whole rows"),
        (LARGE, {"model__dtype": "float16"}, "rounded before they could be scaled"),
    ],
)
def test_what_a_teacher_cannot_be_with_is_refused(ask, facts, config, keys, says):
    hardware = Hardware.named("h100", 2) if "cluster__processes" in keys else None
    with pytest.raises(RecipeError) as caught:
        ask(facts(hardware, config, **keys), **KEYS | keys)
    assert any(says in fault.what for fault in caught.value.faults), caught.value


def test_teacher_and_student_may_be_padded_otherwise(ask, facts):
    resolved = ask(facts(config=LARGE | {"vocab_size": 32_128}), **KEYS)
    said = next(one.reason for one in resolved.decisions if one.setting == "teacher")
    assert "the loss is over the 32,000 columns that both heads have" in said


def test_a_run_without_a_teacher_is_none_of_it(ask, facts_of):
    resolved = ask(replace(facts_of()), length__max_length=512)
    assert resolved.settings.teacher == "none"
