"""The numbers of a trained adapter in a new one: of every kind, to the bit, or refused."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict

from memtrain.errors import LaunchError
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.loading.adapters import add_adapter, continue_adapter


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(r=4),
        Adapter(r=4, kind="dora", target_modules=("q_proj", "down_proj")),
        Adapter(r=4, target_modules=("q_proj",), modules_to_save=("lm_head", "embed_tokens")),
        Adapter(r=4, target_modules=("embed_tokens", "q_proj")),
    ],
    ids=["lora", "dora", "saved", "embedding"],
)
def test_every_number_is_taken_over(tiny_llama, tmp_path: Path, adapter: Adapter):
    one = add_adapter(tiny_llama(), adapter)
    with torch.no_grad():
        for weight in one.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn_like(weight))
    one.save_pretrained(tmp_path, save_embedding_layers=False)
    other = add_adapter(tiny_llama(), adapter)
    continue_adapter(other, tmp_path)
    ids = torch.arange(12)[None]
    assert torch.equal(one(input_ids=ids).logits, other(input_ids=ids).logits)
    own, taken = (get_peft_model_state_dict(each, save_embedding_layers=False) for each in (one, other))
    assert own.keys() == taken.keys()
    assert all(torch.equal(own[name], taken[name]) for name in own)


def test_more_or_fewer_tensors_are_refused(tiny_llama, tmp_path: Path):
    add_adapter(tiny_llama(), Adapter(r=4, target_modules=("q_proj",))).save_pretrained(tmp_path)
    with pytest.raises(LaunchError, match=r"it has no .*v_proj.* \(4 such tensors\)"):
        continue_adapter(
            add_adapter(tiny_llama(), Adapter(r=4, target_modules=("q_proj", "v_proj"))), tmp_path
        )
    add_adapter(tiny_llama(), Adapter(r=4, target_modules=("q_proj", "v_proj"))).save_pretrained(tmp_path)
    with pytest.raises(LaunchError, match="no place for its .*v_proj"):
        continue_adapter(add_adapter(tiny_llama(), Adapter(r=4, target_modules=("q_proj",))), tmp_path)
    with pytest.raises(LaunchError, match="does not fit the model"):
        continue_adapter(add_adapter(tiny_llama(), Adapter(r=8, target_modules=("q_proj",))), tmp_path)
