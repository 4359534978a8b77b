"""Adapters: what is trained, in which precision, and names that match nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model

from memtrain.errors import LaunchError
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.loading.adapters import add_adapter, load_adapter

TinyModel = Callable[..., Any]
IDS = torch.randint(1, 128, (1, 8), generator=torch.Generator().manual_seed(0))
LINEAR_SIZES = 2 * ((64 + 64) + (64 + 32) * 2 + (64 + 64) + (64 + 128) * 2 + (128 + 64))
"""In plus out features of the seven linear layers of a tiny model, two layers."""


def trained(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_all_linear_trains_r_numbers_for_every_row_and_column(tiny_model: TinyModel):
    model = add_adapter(tiny_model(), Adapter(r=4))
    assert sum(p.numel() for p in trained(model).values()) == 4 * LINEAR_SIZES
    assert all("lora_" in name and "lm_head" not in name for name in trained(model))


def test_a_fresh_adapter_does_not_move_the_model(tiny_model: TinyModel):
    model = tiny_model().eval()
    before = model(input_ids=IDS).logits
    assert torch.equal(add_adapter(model, Adapter()).eval()(input_ids=IDS).logits, before)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 32 / 16), (True, 32 / 4)])
def test_the_scale_is_alpha_over_r_or_its_root(tiny_model: TinyModel, rslora: bool, scale: float):
    model = add_adapter(tiny_model(), Adapter(r=16, alpha=32.0, rslora=rslora))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    layer.lora_B["default"].weight.data.fill_(0.5)
    x = torch.ones(1, 64)
    by_hand = layer.base_layer(x) + scale * (x @ layer.lora_A["default"].weight.T).sum() * 0.5
    torch.testing.assert_close(layer(x), by_hand)


def test_dora_also_learns_a_magnitude(tiny_model: TinyModel):
    model = add_adapter(tiny_model(), Adapter(kind="dora", target_modules=("q_proj",), r=2))
    assert sum("magnitude" in name for name in trained(model)) == 2


def test_modules_to_save_are_trained_in_full(tiny_model: TinyModel):
    model = add_adapter(tiny_model(), Adapter(target_modules=("q_proj",), modules_to_save=("lm_head",)))
    assert any("lm_head" in name and p.shape == (128, 64) for name, p in trained(model).items())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_bfloat16_model_has_float32_adapters_that_compute_in_bfloat16(tiny_model: TinyModel, kind: str):
    model = add_adapter(tiny_model().bfloat16(), Adapter(kind=kind, r=5))
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    kept: list[torch.dtype] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 8 * 5 and tensor.shape[-1] == 5:  # what A makes of the rows, and B's input
            kept.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert set(kept) == {torch.bfloat16}
    assert {p.grad.dtype for p in trained(model).values()} == {torch.float32}
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained(model))


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (Adapter(target_modules=("q_prj",)), "no module q_prj"),
        (Adapter(target_modules=("q_prj",)), "q_proj"),
        (Adapter(target_modules=("query_key_value",)), "name modules that it has"),
        (Adapter(target_modules=("all-linear", "lm_head")), "give all-linear alone"),
        (Adapter(modules_to_save=("lm_haed",)), "such as lm_head"),
    ],
)
def test_a_name_that_matches_nothing_is_reported_with_those_near(
    tiny_llama: TinyModel, adapter: Adapter, said: str
):
    with pytest.raises(LaunchError) as error:
        add_adapter(tiny_llama(), adapter)
    assert said in str(error.value)


def test_the_head_of_quantized_weights_is_not_adapted(tiny_llama: TinyModel):
    with pytest.raises(LaunchError, match="LM head cannot be adapted on quantized weights"):
        add_adapter(tiny_llama(), Adapter(target_modules=("q_proj", "lm_head")), quantize="4bit")


def test_an_adapter_that_would_not_be_honoured_is_refused(tiny_model: TinyModel, tmp_path: Path):
    """Prompt tuning lives outside the layers, where the scorer never asks."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(tiny_model(), config).save_pretrained(tmp_path)
    with pytest.raises(LaunchError, match="is a PROMPT_TUNING adapter; only LoRA and DoRA are supported"):
        load_adapter(tiny_model(), str(tmp_path))


def test_tied_weights_that_were_saved_apart_are_loaded_without_a_warning(
    tiny_model: TinyModel, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    saved = ("embed_tokens", "lm_head")
    add_adapter(
        tied(tiny_model()), Adapter(target_modules=("q_proj",), modules_to_save=saved)
    ).save_pretrained(str(tmp_path))
    recwarn.clear()
    load_adapter(tied(tiny_model()), str(tmp_path))
    assert [str(one.message) for one in recwarn] == []


def tied(model: Any) -> Any:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model
