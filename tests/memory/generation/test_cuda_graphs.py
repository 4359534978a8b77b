"""CUDA graphs of the native sampler: on where they can be, reported, and refused where asked for in vain."""

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.generation.cuda_graphs import decide_graphs
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe
from memtrain.recipes.recipe import Recipe

ON_A_GPU = {"device": "cuda", "sampler": "native", "attention": "torch_varlen"}


def ledger(wanted: str) -> DecisionLog:
    recipe = Recipe.model_validate(
        {
            "method": "grpo",
            "model": {"path": "a/model"},
            "data": {"train": ("rows.jsonl",)},
            "rewards": {"functions": ("builtin:length",)},
            "generate": {"cuda_graphs": wanted},
        }
    )
    return DecisionLog(SourcedRecipe(recipe, lambda key: "recipe.yaml:3"))


@pytest.mark.parametrize(
    ("wanted", "changes", "value"),
    [
        ("auto", {}, "on"),
        ("off", {}, "off"),
        ("auto", {"quantize": "4bit"}, "off"),
        ("auto", {"weights_offload": True}, "off"),
        ("auto", {"num_processes": 2, "engine": "fsdp2"}, "off"),
    ],
)
def test_the_plan_says_whether_passes_are_captured(make_settings, wanted, changes, value):
    log = ledger(wanted)
    assert decide_graphs(log, make_settings(**(ON_A_GPU | changes))) == (value == "on")
    assert [(one.setting, one.value) for one in log.decisions] == [("cuda_graphs", value)]


def test_nothing_is_said_of_graphs_on_a_cpu(make_settings):
    log = ledger("auto")
    assert not decide_graphs(log, make_settings(**(ON_A_GPU | {"device": "cpu"})))
    assert log.decisions == []


def test_graphs_that_cannot_be_are_refused_where_they_are_asked_for(make_settings):
    log = ledger("on")
    decide_graphs(log, make_settings(**(ON_A_GPU | {"device": "cpu"})))
    with pytest.raises(RecipeError, match="CUDA graphs are of a GPU"):
        log.raise_refusals()
