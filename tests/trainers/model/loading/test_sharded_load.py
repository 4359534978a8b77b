"""Models that are made without data: each rank's part has the numbers that the whole model would have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trace_cases import BASE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.heads.reward_head import in_float
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.load import SCORE_HEADS
from memtrain.trainers.model.loading.locate import Origin
from memtrain.trainers.model.loading.sharded_init import NeedsWhole, is_keeping, kept_in_parts, kept_of
from memtrain.trainers.model.loading.sharded_load import empty_model, is_empty
from memtrain.trainers.runtime.weight_layout import rows_of

WORLD = 3


def empty(
    folder: Path,
    config: Any,
    auto: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Any:
    """A model of a folder without data, nothing of it quantized."""
    at = {"dtype": dtype, "device": torch.device("cpu")}
    return empty_model(origin(folder), config, Settings(**BASE), auto, **at, **more)


def stretch_of(rank: int) -> Callable[[torch.Size], range]:
    """Rows of a rank of three: the last has fewer, or none."""

    def of(shape: torch.Size) -> range:
        rows, width = rows_of(shape[0], rank, WORLD), shape[1:].numel()
        return range(rows.start * width, rows.stop * width)

    return of


def configured(family: str, **changes: object):
    widths = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AutoConfig.for_model(family, vocab_size=50, num_labels=1, pad_token_id=0, **widths, **changes)


def assert_parts_of(make: Callable[[], nn.Module]) -> None:
    """Every rank's part of what `make` makes is a part of the whole, and torch's random state ends alike."""
    torch.manual_seed(7)
    whole = make()
    after = torch.get_rng_state()
    for rank in range(WORLD):
        torch.manual_seed(7)
        with kept_in_parts(stretch_of(rank)):
            empty = make()
        assert torch.equal(after, torch.get_rng_state())
        assert all(weight.is_meta for weight in empty.parameters())
        kept, expected = kept_of(empty), dict(whole.named_parameters())
        assert kept.keys() == expected.keys()
        for name, one in kept.items():
            mine = stretch_of(rank)(one.shape)
            wanted = expected[name].detach().reshape(-1)[mine.start : mine.stop]
            torch.testing.assert_close(one.numbers(mine), wanted, rtol=0, atol=0, msg=name)
            one.forget()
        for (name, found), (_, buffer) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
            torch.testing.assert_close(found, buffer, rtol=0, atol=0, msg=name)


# GPT-2 draws some weights anew after all others; OPT zeroes a row of its embedding.
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("head", ["lm", "score"])
def test_parts_have_the_random_numbers_of_the_whole(
    family: str, dtype: torch.dtype, is_adapted: bool, head: str
):
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification

    def make() -> nn.Module:
        made = auto.from_config(configured(family), dtype=dtype)
        if is_adapted:
            made = add_adapter(made, Adapter(r=4), head=head)
        if head == "score":
            in_float(made)
        return made

    assert_parts_of(make)


def test_a_module_that_is_trained_beside_an_adapter_is_a_copy_in_parts():
    adapter = Adapter(r=4, modules_to_save=("embed_tokens",))
    assert_parts_of(lambda: add_adapter(AutoModelForCausalLM.from_config(configured("llama")), adapter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_of_dora_are_norms_of_the_rows_of_each_part(dtype: torch.dtype):
    adapter = Adapter(r=4, kind="dora")
    assert_parts_of(
        lambda: add_adapter(AutoModelForCausalLM.from_config(configured("llama"), dtype=dtype), adapter)
    )


def test_what_needs_whole_weights_says_so():
    """GPT-2 has the outputs of a linear map as columns: DoRA takes norms over the rows of all ranks."""

    def make() -> nn.Module:
        adapter = Adapter(r=4, kind="dora", target_modules=("c_attn",))
        return add_adapter(AutoModelForCausalLM.from_config(configured("gpt2")), adapter)

    with pytest.raises(NeedsWhole), kept_in_parts(stretch_of(0)):
        make()
    assert not is_keeping()
    assert not any(weight.is_meta for weight in make().parameters())


def saved(folder: Path, *, tied: bool, shard: str = "5GB") -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(configured("llama", tie_word_embeddings=tied))
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def origin(folder: Path) -> Origin:
    return Origin(str(folder), None, is_offline=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_parts_of_a_model_in_files_are_those_of_the_model(tmp_path: Path, tied: bool, shard: str):
    model = saved(tmp_path, tied=tied, shard=shard)
    for rank in range(WORLD):
        with kept_in_parts(stretch_of(rank)):
            made = empty(tmp_path, model.config)
        assert is_empty(made)
        assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied
        kept, expected = kept_of(made), dict(model.named_parameters())
        assert kept.keys() == expected.keys()
        for name, one in kept.items():
            mine = stretch_of(rank)(one.shape)
            wanted = expected[name].detach().reshape(-1)[mine.start : mine.stop]
            torch.testing.assert_close(one.numbers(mine), wanted, rtol=0, atol=0, msg=name)
        for (name, found), (_, buffer) in zip(made.named_buffers(), model.named_buffers(), strict=True):
            torch.testing.assert_close(found, buffer, rtol=0, atol=0, msg=name)


def test_the_head_of_a_new_reward_model_is_drawn_as_transformers_draws_it(tmp_path: Path):
    model = saved(tmp_path, tied=False)
    torch.manual_seed(5)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path, config=model.config)
    torch.manual_seed(5)
    with kept_in_parts(stretch_of(0)):
        made = empty(tmp_path, model.config, AutoModelForSequenceClassification, may_miss=SCORE_HEADS)
    torch.testing.assert_close(
        kept_of(made)["score.weight"].numbers(range(16))[None], whole.score.weight.detach(), rtol=0, atol=0
    )


def test_files_with_other_names_or_shapes_are_left_to_transformers(tmp_path: Path):
    model = saved(tmp_path, tied=False)
    file = tmp_path / "model.safetensors"
    plain = load_file(file)
    for tensors in (
        {f"old.{name}": tensor for name, tensor in plain.items()},
        plain | {"lm_head.weight": torch.zeros(7, 16)},
    ):
        save_file(tensors, file, {"format": "pt"})
        with pytest.raises(NeedsWhole), kept_in_parts(stretch_of(0)):
            empty(tmp_path, model.config)
    file.rename(tmp_path / "other.safetensors")
    with pytest.raises(NeedsWhole), kept_in_parts(stretch_of(0)):
        empty(tmp_path, model.config)


def test_each_rank_reads_its_part_of_experts_that_files_have_apart(tmp_path: Path):
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(configured("qwen3_moe", **experts))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    with kept_in_parts(stretch_of(1)):
        made = empty(tmp_path, model.config, dtype=torch.bfloat16)
    kept, expected = kept_of(made), dict(model.named_parameters())
    assert kept.keys() == expected.keys()
    for name, one in kept.items():
        mine = stretch_of(1)(one.shape)
        wanted = expected[name].detach().bfloat16().reshape(-1)[mine.start : mine.stop]
        torch.testing.assert_close(one.numbers(mine), wanted, rtol=0, atol=0, msg=name)
