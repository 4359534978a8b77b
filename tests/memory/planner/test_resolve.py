from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import may_accumulate
from memtrain.memory.explain.nothing_fits import NoPlan
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.length_profile import LengthProfile, LengthReport
from memtrain.memory.plan.prompt_groups import PromptGroups
from memtrain.memory.plan.units import GIB
from memtrain.memory.planner.pinned_recipe import kept_pins
from memtrain.memory.planner.resolve import PlannerInputs, Resolved, resolve
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.recipe import Recipe

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def profile(*tokens: int, pieces: int | None = None) -> LengthProfile:
    report = LengthReport(
        num_rows=len(tokens),
        num_tokens=sum(tokens),
        num_loss_tokens=sum(tokens) // 2,
        rows_cut=0,
        rows_dropped=0,
        rows_split=0,
        pieces=pieces or len(tokens),
        tokens_cut=0,
        tokens_dropped=0,
        tokens_idle=0,
        loss_tokens_cut=0,
        loss_tokens_dropped=0,
        num_sequences=len(tokens),
        fill=1.0,
    )
    longest = tuple(sorted(tokens, reverse=True))
    return LengthProfile(report=report, total_tokens=sum(tokens), longest=longest, longest_piece=max(tokens))


Ask = Callable[..., Resolved]


def recipe_of(keys: dict[str, Any]) -> Recipe:
    recipe: dict[str, Any] = {"method": "sft", "model": {"path": "m"}, "data": {"train": "d.jsonl"}}
    for key, value in keys.items():
        section, name = key.split(".")
        recipe.setdefault(section, {})[name] = value
    return Recipe.model_validate(recipe)


def ask(
    hardware: Hardware | None = None,
    lengths: LengthProfile | None = None,
    config: dict[str, Any] = CONFIG,
    presumed: frozenset[str] = frozenset(),
    **said: Any,
) -> Resolved:
    keys = {key.replace("__", "."): value for key, value in said.items()}
    asked = SourcedRecipe(recipe_of(keys), lambda key: f"r.yaml:{key}" if key in keys else "default")
    facts = PlannerInputs(
        hardware=hardware or cpu(64 * GIB, 4),
        shape=shape_of(config),
        config=config,
        profile=lengths or profile(*([512] * 40), *([100] * 60)),
        count_steps=lambda rows, tokens, epochs: int(epochs * 10),
        method="sft",
        presumed=presumed,
    )
    return resolve(asked, facts)


def reason_of(resolved: Resolved, setting: str) -> str:
    return next(one.reason for one in resolved.decisions if one.setting == setting)


def source_of(resolved: Resolved, setting: str) -> str:
    return next(one.source for one in resolved.decisions if one.setting == setting)


def test_a_cpu_run_is_exact_padding_free_and_alone():
    settings = ask().settings
    assert (settings.device, settings.dtype, settings.num_processes) == ("cpu", "float32", 1)
    assert (settings.attention, settings.padding_free) == ("torch_cpu", True)
    assert (settings.checkpoint_every, settings.offload) == (0, "none")


def test_a_gpu_run_computes_in_bfloat16_with_one_process_for_each_device():
    settings = ask(Hardware.named("h100", 2)).settings
    assert (settings.device, settings.dtype, settings.num_processes) == ("cuda", "bfloat16", 2)
    assert settings.attention in ("flash", "torch_varlen")


def test_a_gpu_without_bfloat16_computes_in_float16_and_says_so():
    """Weights that are trained have float32 copies; rows are packed without scores of row length squared."""
    resolved = ask(Hardware.named("t4"))
    assert (resolved.settings.dtype, resolved.settings.master_weights) == ("float16", True)
    assert "no fast bfloat16" in reason_of(resolved, "dtype")
    assert "scaled loss" in reason_of(resolved, "dtype")
    assert resolved.settings.attention == "torch_efficient"


def test_streamed_layers_take_an_attention_that_goes_in_slices():
    """FlexAttention is the first for float32 on a GPU, and returns no log-sum-exp."""
    card, there = Hardware.named("h100"), frozenset({"triton"})
    taken = {
        said: ask(card, presumed=there, model__dtype="float32", memory__streamed_layers=said).settings
        for said in ("off", "on")
    }
    assert {said: one.attention for said, one in taken.items()} == {"off": "flex", "on": "torch_efficient"}
    assert taken["on"].slice_tokens > 0


@pytest.mark.parametrize("here", [(), ("triton",), ("triton", "liger_kernel")])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"model__dtype": "float32"},
        {"model__compile": "on"},
        {"model__liger": "off"},
        {"model__kernels": "transformers"},
        {"model__kernels": "fused", "model__liger": "off"},
        {"memory__streamed_layers": "on"},
        {"memory__loss": "full"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_a_run_that_goes_on_has_every_setting_that_it_had(family, said, here, monkeypatch):
    """On a GPU kernels follow from packages and from one another: an H100 took others after a resumption.

    But for the steps that are taken where memory runs out.
    """
    monkeypatch.setattr(
        "memtrain.memory.rules.ledger.installed", lambda *names: frozenset(names) & frozenset(here)
    )
    config = CONFIG | {"model_type": family} | ({"hidden_act": "silu"} if family == "phi3" else {})
    keys = {key.replace("__", "."): value for key, value in said.items()}
    try:
        settings = ask(Hardware.named("h100"), config=config, **said).settings
    except RecipeError:
        pytest.skip("no such run begins")
    asked = kept_pins(SourcedRecipe(recipe_of(keys), lambda key: "default"), settings)
    facts = ask(Hardware.named("h100"), config=config, **said).case.facts
    found = resolve(asked, facts).settings
    assert found.model_copy(update={"recovery": settings.recovery}) == settings


def test_what_float16_cannot_be_with_is_computed_in_float32():
    resolved = ask(Hardware.named("t4"), optim__in_backward="on", optim__max_grad_norm=None)
    assert resolved.settings.dtype == "float32"


def test_what_the_user_said_is_the_source_of_the_setting():
    resolved = ask(train__batch_size=8, model__dtype="float32")
    assert source_of(resolved, "batch_size") == "r.yaml:train.batch_size"
    assert source_of(resolved, "dtype") == "r.yaml:model.dtype"
    assert source_of(resolved, "attention") == "rule"


def test_a_smaller_budget_takes_a_smaller_micro_batch():
    roomy, tight = ask(), ask(memory__budget="8GiB")
    assert roomy.settings.micro_tokens is not None
    assert tight.settings.micro_tokens is not None
    assert tight.settings.micro_tokens <= roomy.settings.micro_tokens
    assert tight.prediction.peak.num_bytes <= 8 * GIB


def test_checkpointing_left_open_is_off_where_everything_fits():
    assert ask(memory__activation_checkpointing="auto").settings.checkpoint_every == 0


def test_a_budget_that_nothing_fits_names_the_largest_owners_and_ways_out():
    with pytest.raises(DoesNotFit) as caught:
        ask(memory__budget="1GiB")
    fault = caught.value.faults[0]
    assert "no plan fits 1.00 GiB" in fault.what
    assert "optimizer" in fault.what
    assert fault.where == "r.yaml:memory.budget"
    assert "lora" in fault.fix


def test_a_refusal_of_a_whole_card_names_the_card():
    """`--budget 24GiB` is for a 3090, which has 23.56: the refusal says whose they are."""
    made, card = ask(), Hardware.for_budget(24 * GIB)
    whose = replace(made.case.facts, hardware=card)
    refused = [NoPlan(made.chosen, num, made.case.asked, whose) for num in (card.memory_bytes, 5 * GIB)]
    assert "no plan fits 23.56 GiB of 3090: " in refused[0].faults[0].what
    assert "no plan fits 5.00 GiB: " in refused[1].faults[0].what


def test_the_plain_run_needs_more():
    resolved = ask(lengths=profile(*[4096] * 8))
    assert resolved.plain.peak.num_bytes > resolved.prediction.peak.num_bytes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cluster__device": "cuda"}, "no CUDA device"),
        ({"cluster__processes": 9}, "this machine has 4 CPU cores"),
        ({"model__dtype": "float16", "optim__in_backward": "on"}, "known to be finite"),
        ({"model__dtype": "float16", "optim__copies": "split"}, "bfloat16 weights"),
        ({"optim__kind": "adamw_8bit"}, "bitsandbytes"),
        ({"model__liger": "on"}, "Liger runs on CUDA only"),
        ({"model__attention": "torch_varlen"}, "does not run on cpu"),
        ({"train__batch_size": 1, "cluster__processes": 2}, "cannot be divided over 2 processes"),
        ({"train__batch_size": 8, "train__micro_batch_size": 16}, "has 8 rows a step"),
        ({"train__micro_tokens": 100}, "the longest sequence has 512 tokens"),
        ({"length__padding_free": False, "train__micro_tokens": 4096}, "pads its rows"),
        ({"optim__master_weights": True, "model__dtype": "float32"}, "float32 already"),
    ],
)
def test_what_cannot_run_is_refused_with_its_place(said: dict[str, Any], words: str):
    with pytest.raises(RecipeError) as caught:
        ask(**said)
    fault = next(one for one in caught.value.faults if words in one.what)
    assert fault.where.startswith("r.yaml:") or fault.where == "default"
    assert fault.fix


def test_every_refusal_is_reported_at_once():
    with pytest.raises(RecipeError) as caught:
        ask(optim__kind="adamw_8bit", model__dtype="float16", optim__copies="split", model__liger="on")
    assert len(caught.value.faults) == 3


def test_a_model_whose_rows_cannot_be_kept_apart_is_padded_or_refused():
    bloom = CONFIG | {"model_type": "bloom"}
    assert ask(config=bloom).settings.padding_free is False
    with pytest.raises(RecipeError, match="rows cannot be kept apart"):
        ask(config=bloom, length__packing="bfd")


def test_the_batch_is_worked_out_in_one_line():
    resolved = ask(train__batch_size=16, train__micro_batch_size=4)
    assert reason_of(resolved, "micro_batch") == ("asked for; 16 rows = 4 accumulation steps of up to 4 rows")


def test_tokens_of_a_step_are_shared_by_micro_batches_of_tokens():
    """16,384 tokens a step, 4,096 at once: four micro-batches."""
    resolved = ask(train__batch_tokens=16_384, train__micro_tokens=4096)
    assert "4 accumulation steps" in reason_of(resolved, "micro_batch")


def test_epochs_become_steps():
    resolved = ask(train__epochs=2.5)
    assert resolved.settings.max_steps == 25
    assert reason_of(resolved, "max_steps") == "asked for; 2.5 epochs over 100 sequences"


def test_a_step_that_is_one_micro_batch_however_long_its_rows_are_holds_no_gradients():
    """Rows of at most 100 tokens: eight are 800. Gradients wait where a ninth or a limit makes two."""
    made = ask(lengths=profile(*[100] * 40), train__batch_size=8)
    settings, known = made.settings, made.case.facts
    one = settings.model_copy(update={"batch_size": 8, "micro_batch_size": 8, "micro_tokens": 800})
    assert not may_accumulate(one, known)
    assert not may_accumulate(one.model_copy(update={"micro_tokens": None}), known)
    for update in ({"micro_batch_size": 7}, {"micro_tokens": 799}, {"batch_size": 9}, {"batch_size": None}):
        assert may_accumulate(one.model_copy(update=update), known)
    two = {"num_processes": 2, "batch_size": 16}
    assert not may_accumulate(one.model_copy(update=two), known)


def test_a_step_of_completions_in_one_micro_batch_holds_no_gradients():
    """Groups of four: eight completions of 300 tokens with their prompt. On two processes, groups are dealt
    whole, and one may have two micro-batches."""
    made = ask(lengths=profile(*[300] * 40), train__batch_size=8)
    groups = PromptGroups(written=4, learned=4, own_tokens=200, is_shared=True)
    lengths = made.case.facts.profile.model_copy(update={"groups": groups})
    known = replace(made.case.facts, method="grpo", profile=lengths)
    one = made.settings.model_copy(update={"batch_size": 8, "micro_batch_size": 8, "micro_tokens": None})
    assert not may_accumulate(one, known)
    for update in ({"micro_batch_size": 4}, {"micro_tokens": 100}, {"num_processes": 2, "batch_size": 16}):
        assert may_accumulate(one.model_copy(update=update), known)
