"""Every strategy is applied by its name; every pair that excludes each other is refused with its reason."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.settings import Settings
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.strategies.base import TRAINED, StrategyContext
from memtrain.memory.strategies.exclusions import EXCLUSIONS, excluded
from memtrain.memory.strategies.registry import STRATEGIES, is_searched, used_in, wish_of, without_strategies
from memtrain.recipes.edit import with_key
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.sections.memory import Changing, StrategyName
from memtrain.recipes.sections.model import Adapter

BASE: dict[str, Any] = {"model__dtype": "bfloat16", "train__batch_size": 16}
Plan = Callable[..., Settings]


@pytest.fixture(scope="module")
def facts(facts_of, profile_of) -> PlannerInputs:
    return facts_of(Hardware.named("h100"), profile_of(*[512] * 64))


@pytest.fixture(scope="module")
def plan(ask, facts) -> Plan:
    return lambda **said: ask(facts, **(BASE | said)).settings


@pytest.fixture(scope="module")
def plain_settings(plan: Plan) -> Settings:
    return plan()


def names(settings: Settings) -> set[str]:
    return {strategy.name for strategy in used_in(settings)}


def test_the_recipe_and_the_pages_name_the_same_strategies():
    assert set(get_args(StrategyName)) | set(get_args(Changing)) == set(STRATEGIES)
    assert {name for name in get_args(Changing)} == {
        name for name, one in STRATEGIES.items() if not one.is_exact and name != "master_weights"
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_page_says_what_it_saves_and_costs_and_which_keys_it_stands_for(name: str):
    strategy = STRATEGIES[name]
    assert strategy.summary
    assert strategy.saves
    assert strategy.costs
    recipe = load_recipe("dpo/qwen3-0.6b-lora").recipe
    for key, value in {**strategy.use_keys(recipe), **strategy.never_keys(recipe)}.items():
        with_key(recipe, key, value)


SEARCHED = [name for name, one in STRATEGIES.items() if is_searched(one)]
NEEDS_A_PACKAGE = ("liger_loss", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "qlora")


@pytest.mark.parametrize("name", [name for name in SEARCHED if name not in NEEDS_A_PACKAGE])
def test_a_strategy_that_must_be_used_is_used(plan: Plan, name: str):
    assert name in names(plan(memory__use=name))


@pytest.mark.parametrize("budget", ["5GiB", "6GiB", "8GiB", "10GiB"])
def test_a_strategy_that_must_not_be_used_is_not_used_where_it_would_be(plan: Plan, budget: str):
    said = {"train__micro_batch_size": 16, "memory__budget": budget}
    used = names(plan(**said)) & set(SEARCHED)
    assert used
    for name in used:
        try:
            assert name not in names(plan(**said, memory__never=name))
        except DoesNotFit:
            assert budget in ("5GiB", "6GiB")


def test_rules_honour_names_too(plan: Plan):
    assert plan(memory__never="padding_free").padding_free is False
    assert plan(memory__use="packing", length__max_length=1024).packing == "bfd"
    assert plan(memory__use="smaller_micro_batch").micro_batch_size == 1
    one = plan(memory__use="optimizer_in_backward", optim__max_grad_norm=None)
    assert (one.in_backward, one.micro_batch_size) == (True, 16)


@pytest.mark.parametrize("name", ["adamw_8bit", "qlora", "liger_loss"])
def test_a_strategy_that_cannot_be_used_here_is_refused_by_name(plan: Plan, name: str):
    with pytest.raises(RecipeError) as caught:
        plan(memory__use=name)
    fault = caught.value.faults[0]
    assert name in fault.what
    assert "not installed" in fault.what
    assert fault.where == "r.yaml:memory.use"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"memory__use": "lora", "memory__never": "lora"}, "in memory.use and in memory.never"),
        (
            {"memory__use": "activation_checkpointing", "memory__activation_checkpointing": "off"},
            "memory.activation_checkpointing contradicts it",
        ),
        (
            {"memory__never": "chunked_loss", "memory__loss": "chunked"},
            "memory.loss contradicts it",
        ),
        ({"memory__use": "optimizer_in_backward"}, "max_grad_norm"),
        ({"memory__use": "shared_prompts"}, "no answers that could share a prompt"),
        ({"memory__use": "master_weights", "model__dtype": "float32"}, "float32 already"),
        (
            {"memory__use": ("boundary_offloading", "full_offloading")},
            "boundary_offloading cannot be combined with full_offloading",
        ),
        (
            {"memory__use": ("activation_checkpointing", "full_offloading")},
            "full_offloading cannot be combined with activation checkpointing",
        ),
        (
            {"memory__use": ("streamed_layers", "full_offloading")},
            "full_offloading cannot be combined with streamed layers",
        ),
        (
            {"memory__use": "streamed_layers", "model__attention": "transformers"},
            "streamed layers under transformers attention",
        ),
        (
            {"memory__use": "boundary_offloading", "memory__activation_checkpointing": "off"},
            "memory.activation_checkpointing contradicts it",
        ),
    ],
)
def test_wishes_that_contradict_each_other_are_refused_with_the_way_out(
    plan: Plan, said: dict[str, Any], words: str
):
    with pytest.raises(RecipeError) as caught:
        plan(**said)
    fault = caught.value.faults[0]
    assert words in fault.what
    assert fault.fix


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"model__quantize": "8bit", "model__adapter": {"r": 8}},
            "stay in half precision from all tokens of a call",
        ),
        ({"cluster__engine": "zero3", "cluster__processes": 2}, "cuts up gradients module by module"),
        (
            {
                "cluster__context_parallel": 2,
                "cluster__processes": 2,
                "cluster__context_parallel_mode": "ulysses",
            },
            "attention heads are divided for whole rows",
        ),
    ],
)
def test_slices_are_refused_with_the_reason(ask, facts_of, profile_of, said: dict[str, Any], words: str):
    two = facts_of(Hardware.named("h100", 2), profile_of(*[512] * 64))
    with pytest.raises(RecipeError) as caught:
        ask(two, **(BASE | said | {"memory__use": "streamed_layers"}))
    assert any(words in fault.what and fault.fix for fault in caught.value.faults)


def test_an_unknown_strategy_is_refused_with_the_nearest(tmp_path: Any):
    file = tmp_path / "r.yaml"
    file.write_text("method: sft\nmodel: {path: m}\ndata: {train: d.jsonl}\nmemory: {use: chunked_los}\n")
    with pytest.raises(RecipeError, match="chunked_loss"):
        load_recipe(str(file))


def test_use_and_never_say_their_keys_and_keep_their_place(recipe_of):
    asked = SourcedRecipe(
        recipe_of({"memory.never": "padding_free"}), lambda key: "r:1" if "never" in key else "default"
    )
    changed = with_use_and_never(asked)
    assert changed.recipe.length.padding_free is False
    assert changed.where("length.padding_free") == "r:1"
    assert asked.recipe.length.padding_free is None


LORA: dict[str, Any] = {"adapter": Adapter(), "master_weights": False}
AWAY: dict[str, Any] = {"weights_offload": True, "checkpoint_every": 1}
SHARDED: dict[str, Any] = {"engine": "fsdp2", "num_processes": 2}
ZERO: dict[str, Any] = {"engine": "zero2", "num_processes": 2}
PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("boundary_offloading", {"offload": "boundaries"}),
    ("full_offloading", {"offload": "all", "checkpoint_every": 1}),
    ("full_offloading", {"offload": "all", "checkpoint_every": 2}),
    ("full_offloading", {"offload": "all", "compiled": True}),
    ("full_offloading", {"offload": "all", "slice_tokens": 64}),
    ("streamed_layers", {"slice_tokens": 64, "attention": "flex"}),
    ("streamed_layers", {"slice_tokens": 64, "context_parallel": 2, "context_by": "ulysses"}),
    ("streamed_layers", {"slice_tokens": 64, "compiled": True}),
    ("streamed_layers", {"slice_tokens": 64, "router_replay": True}),
    ("streamed_layers", {"slice_tokens": 64, "quantize": "8bit"}),
    ("streamed_layers", {"slice_tokens": 64, "router_aux_loss_coef": 0.01}),
    ("streamed_layers", {"slice_tokens": 64, "engine": "zero3", "num_processes": 2}),
    ("weights_offload", {"weights_offload": True}),
    ("weights_offload", {"weights_offload": True, "offload": "all"}),
    ("weights_offload", AWAY | {"compiled": True}),
    ("weights_offload", AWAY | {"num_processes": 2}),
    ("weights_offload", AWAY | {"quantize": "8bit", "adapter": Adapter()}),
    ("weights_offload", AWAY | {"optimizer": "muon"}),
    ("weights_offload", AWAY | {"optimizer_offload": True}),
    ("weights_offload", AWAY | {"compressed_moments": True}),
    ("weights_offload", AWAY | {"dtype": "float16"}),
    ("weights_offload", AWAY | {"router_aux_loss_coef": 0.01}),
    ("weights_offload", AWAY | {"reference": "synced"}),
    ("packing", {"packing": "bfd", "padding_free": False}),
    ("shared_prompts", {"shared_prompts": True, "padding_free": False}),
    ("qlora", {"quantize": "4bit"}),
    ("adapter_off_reference", {"reference": "adapter_off"}),
    ("master_weights", {"master_weights": True, "adapter": Adapter()}),
    ("master_weights", {"master_weights": True, "dtype": "float32"}),
    ("pure_bfloat16", {"master_weights": False, "dtype": "float16"}),
    ("pure_bfloat16", {"master_weights": False, "num_processes": 2, "engine": "zero2"}),
    *(
        (name, {"copies": copies} | broken)
        for name, copies in (("split_copies", "split"), ("stochastic_rounding", "stochastic"))
        for broken in ({"master_weights": False}, {"optimizer": "muon"}, ZERO)
    ),
    ("compressed_moments", {"compressed_moments": True, "optimizer": "muon"}),
    ("compressed_moments", {"compressed_moments": True, "master_weights": False}),
    ("compressed_moments", {"compressed_moments": True, "optimizer_offload": True}),
    ("compressed_moments", {"compressed_moments": True} | SHARDED),
    ("optimizer_offload", {"optimizer_offload": True, "optimizer": "adafactor"}),
    ("optimizer_offload", {"optimizer_offload": True, "in_backward": True}),
    ("optimizer_offload", {"optimizer_offload": True, "num_processes": 2, "engine": "zero1"}),
    ("optimizer_offload", SHARDED | {"optimizer_offload": True, "shard_offload": "parameters"}),
    ("lora", LORA | {"dtype": "bfloat16", "num_processes": 2, "engine": "zero2"}),
    ("optimizer_in_backward", {"in_backward": True, "dtype": "float16"}),
    ("optimizer_in_backward", {"in_backward": True, "num_processes": 2}),
    ("optimizer_in_backward", {"in_backward": True, "micro_batch_size": 2}),
    ("full_offloading", SHARDED | {"offload": "all"}),
    ("qlora", LORA | {"quantize": "4bit", "dtype": "float32", "num_processes": 2, "engine": "zero3"}),
    ("adafactor", SHARDED | {"optimizer": "adafactor"}),
    ("adamw_8bit", SHARDED | {"optimizer": "adamw_8bit"}),
    ("paged_adamw", SHARDED | {"optimizer": "paged_adamw"}),
    ("paged_adamw_8bit", SHARDED | {"optimizer": "paged_adamw_8bit"}),
    ("context_parallel", {"context_parallel": 2, "attention": "transformers"}),
    ("context_parallel", {"context_parallel": 2, "loss": "liger"}),
    ("context_parallel", {"context_parallel": 2, "engine": "zero3"}),
    ("liger_loss", {"loss": "liger", "shared_prompts": True}),
]


PAIRS.sort(key=lambda pair: list(STRATEGIES).index(pair[0]))  # stable: a page's own stay in its order
PAIR_IDS = [f"{number}-{pair.strategy}-{pair.other}" for number, pair in enumerate(EXCLUSIONS)]


@pytest.mark.parametrize(("pair", "case"), list(zip(EXCLUSIONS, PAIRS, strict=True)), ids=PAIR_IDS)
def test_a_pair_of_the_table_is_excluded_with_its_reason(
    plain_settings: Settings, pair: Any, case: tuple[str, dict[str, Any]]
):
    name, changes = case
    assert pair.strategy == name
    plain = plain_settings.model_copy(
        update={"micro_batch_size": 16, "micro_tokens": None, "checkpoint_every": 0}
    )
    assert excluded(plain) is None
    broken = plain.model_copy(update=changes)
    assert pair.is_other(broken)
    found = excluded(broken)
    assert found is not None
    assert found.strategy == name
    assert found.reason


def test_what_changes_the_numbers_is_taken_only_where_allowed_and_needed(ask, facts, plan: Plan):
    """0.3 billion parameters in bfloat16: 0.6 GiB each for weights and gradients, 1.2 GiB of moments."""
    allowed = {"memory__allow": ("lora", "adafactor")}
    assert plan(**allowed).adapter is None
    tight = BASE | {"memory__budget": "3GiB", "memory__never": ("optimizer_offload", "weights_offload")}
    with pytest.raises(DoesNotFit):
        ask(facts, **tight)
    changed = {
        name for name in names(ask(facts, **tight, **allowed).settings) if not STRATEGIES[name].is_exact
    }
    assert len(changed) == 1


def test_a_wish_is_on_off_or_open(facts, recipe_of):
    case = StrategyContext(
        SourcedRecipe(recipe_of({"memory.use": "lora", "memory.never": "chunked_loss"}), str), facts
    )
    wishes = [
        wish_of(STRATEGIES[name], case) for name in ("lora", "chunked_loss", "qlora", "full_offloading")
    ]
    assert wishes == ["on", "off", "off", "auto"]


FLAT = {"padding_free": True}
IN_USE: dict[str, dict[str, object]] = {
    "padding_free": FLAT,
    "packing": FLAT | {"packing": "bfd"},
    "shared_prompts": FLAT | {"shared_prompts": True},
    "context_parallel": FLAT | {"num_processes": 4, "context_parallel": 2},
    "activation_checkpointing": {"checkpoint_every": 1},
    "checkpoint_every_n": {"checkpoint_every": 4},
    "streamed_layers": FLAT | {"slice_tokens": 64},
    "boundary_offloading": {"checkpoint_every": 1, "offload": "boundaries", "offload_keep": 2},
    "full_offloading": {"checkpoint_every": 0, "offload": "all"},
    "chunked_loss": {"loss": "chunked"},
    "liger_loss": {"loss": "liger"},
    "weights_offload": {"checkpoint_every": 1, "weights_offload": True},
    "optimizer_offload": {"optimizer_offload": True},
    "optimizer_in_backward": {"in_backward": True},
    "precomputed_reference": {"reference": "precomputed"},
    "adapter_off_reference": {"adapter": Adapter(), "reference": "adapter_off"},
}
"""Settings under which a strategy is used that the plain run is without."""


def test_the_plain_run_is_without_every_strategy_but_those_that_say_what_is_trained():
    assert set(IN_USE) == {name for name, one in STRATEGIES.items() if one.axis not in TRAINED}


@pytest.mark.parametrize("name", IN_USE)
def test_the_plain_run_is_without(make_settings, name: str):
    settings = make_settings(micro_batch_size=2, micro_tokens=None, **IN_USE[name])
    assert name in names(settings)
    plain = without_strategies(settings)
    assert not names(plain) & set(IN_USE)
    assert (plain.attention, plain.liger, plain.shard_offload) == ("transformers", False, "none")
    assert (plain.adapter, plain.optimizer, plain.micro_batch_size) == (settings.adapter, "adamw", 2)
    assert without_strategies(plain) == plain


@pytest.mark.parametrize("reference", ["none", "copy", "synced"])
def test_a_reference_that_no_strategy_made_stays(make_settings, reference: str):
    assert without_strategies(make_settings(reference=reference)).reference == reference


def test_what_is_trained_is_the_same_in_the_plain_run(make_settings):
    said = {"optimizer": "paged_adamw_8bit", "quantize": "4bit", "adapter": Adapter(r=4)}
    plain = without_strategies(make_settings(**said))
    assert {name: getattr(plain, name) for name in said} == said
    assert without_strategies(make_settings(dtype="bfloat16", master_weights=True)).master_weights


def test_the_plain_run_of_a_plan_keeps_its_moments_on_the_device(ask, facts):
    """They were left on the host: an 8B model was said to need 64 GiB plainly, in place of 94."""
    resolved = ask(facts, **BASE, memory__optimizer_offload="on")
    assert resolved.settings.optimizer_offload
    owners = {owned.owner: owned.num_bytes for owned in resolved.plain.peak.owners}
    assert owners["optimizer"] == 4 * owners["weights"]  # two float32 moments of bfloat16 weights
