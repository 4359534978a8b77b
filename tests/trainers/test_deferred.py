"""Models that are made without weights: only where the files have the model's own names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.trainers.model.deferred import empty_model, is_empty
from memtrain.trainers.model.where import Origin


def saved(folder: Path, *, tied: bool, shard: str = "5GB") -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
    )
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def origin(folder: Path) -> Origin:
    return Origin(str(folder), None, is_offline=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
def test_an_empty_model_has_no_weights_and_its_own_buffers(tmp_path: Path, tied: bool, shard: str):
    model = saved(tmp_path, tied=tied, shard=shard)
    made = empty_model(origin(tmp_path), model.config, torch.float32)
    assert made is not None
    assert is_empty(made)
    assert [(n, p.shape) for n, p in made.named_parameters()] == [
        (n, p.shape) for n, p in model.named_parameters()
    ]
    assert all(parameter.is_meta for parameter in made.parameters())
    for (name, found), (_, expected) in zip(made.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied


def test_files_with_other_names_are_left_to_transformers(tmp_path: Path):
    model = saved(tmp_path, tied=False)
    file = tmp_path / "model.safetensors"
    save_file({f"old.{name}": tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert empty_model(origin(tmp_path), model.config, torch.float32) is None
    file.unlink()
    assert empty_model(origin(tmp_path), model.config, torch.float32) is None
