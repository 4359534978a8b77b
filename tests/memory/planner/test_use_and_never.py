"""What `memory.use` and `memory.never` stand for is a recipe, or refused with a reason: no exception."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memtrain.cli.plan.make_plan import make_plan
from memtrain.errors import RecipeError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.reading.load import load_recipe

ONLINE = "rewards: {functions: [{function: length}]}\ngenerate: {num_generations: 3, max_tokens: 12}\n"
MakeSettings = Callable[..., Settings]


@pytest.fixture
def settings_of(tmp_path: Path) -> MakeSettings:
    """Factory of resolved settings: `settings_of("dpo", "memory.never=[packing]")`."""

    def make(method: str, *overrides: str) -> Settings:
        path = tmp_path / f"{method}.yaml"
        path.write_text(
            f"method: {method}\nmodel: {{path: builtin:tiny}}\n"
            f"data: {{train: {{source: builtin:arithmetic, limit: 8}}, cache_dir: {tmp_path}/cache}}\n"
            "length: {max_length: 256}\ntrain: {batch_size: 6, max_steps: 2}\n"
            f"cluster: {{device: cpu}}\n{ONLINE if method == 'grpo' else ''}"
        )
        return make_plan(load_recipe(str(path), list(overrides)), run_dir=str(tmp_path / "run")).plan.settings

    return make


def test_a_step_in_one_micro_batch_is_what_never_smaller_means(settings_of: MakeSettings):
    settings = settings_of("sft", "memory.never=[smaller_micro_batch]")
    assert (settings.micro_batch_size, settings.micro_tokens) == (6, None)


@pytest.mark.parametrize("name", ["shared_prompts", "precomputed_reference", "adapter_off_reference"])
def test_never_what_cannot_be_used_changes_nothing(settings_of: MakeSettings, name: str):
    assert settings_of("sft", f"memory.never=[{name}]") == settings_of("sft")


@pytest.mark.parametrize(
    ("method", "name", "reason"),
    [
        ("sft", "shared_prompts", "the rows of sft have no answers"),
        ("sft", "precomputed_reference", "sft needs no reference"),
        ("reward", "adapter_off_reference", "reward needs no reference"),
        ("grpo", "packing", "no effect on grpo"),
        ("dpo", "packing", "dpo concatenates prompts with their answers"),
    ],
)
def test_use_of_what_cannot_be_used_is_refused(
    settings_of: MakeSettings, method: str, name: str, reason: str
):
    with pytest.raises(RecipeError, match=reason):
        settings_of(method, f"memory.use=[{name}]")


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("activation_checkpointing", "checkpoint_every_n", "every layer is checkpointed, or every n-th"),
        ("boundary_offloading", "full_offloading", "inputs of checkpointed layers are offloaded"),
        ("precomputed_reference", "adapter_off_reference", "before training or in every step"),
    ],
)
def test_two_that_stand_in_place_of_each_other_are_refused_by_name(
    settings_of: MakeSettings, first: str, second: str, reason: str
):
    with pytest.raises(RecipeError, match=f"{first} cannot be combined with {second}: .*{reason}"):
        settings_of("dpo", f"memory.use=[chunked_loss, {first}, {second}]")


def test_no_attention_that_shares_a_prompt_is_named(settings_of: MakeSettings):
    """The reason stood in empty brackets."""
    with pytest.raises(
        RecipeError, match=r"by its answers \(transformers attention does not keep rows apart\)"
    ):
        settings_of("dpo", "model.attention=transformers", "length.shared_prompts=true")


def test_packing_is_not_padded_against_never(settings_of: MakeSettings):
    """The plan packed with rows end to end all the same, and said nothing."""
    with pytest.raises(RecipeError, match="packed rows are never padded"):
        settings_of("sft", "memory.use=[packing]", "memory.never=[padding_free]")


@pytest.mark.parametrize("key", ["length.padding_free=false", "length.group_by_length=true"])
def test_padded_rows_take_the_models_own_attention(settings_of: MakeSettings, key: str):
    """A back end for rows end to end stopped such a run in its first step."""
    assert settings_of("sft", key).attention == "transformers"
    with pytest.raises(RecipeError, match="attention torch_cpu needs concatenated rows, but rows are padded"):
        settings_of("sft", key, "model.attention=torch_cpu")
