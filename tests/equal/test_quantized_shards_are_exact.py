"""Packed weights in shards of FSDP2: the bytes, losses and gradients of a single process, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_mixtures import save_mixture
from torch import Tensor, nn

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.build.engine import _in_rows
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.experts.forward import is_experts, stacks_of
from memtrain.trainers.model.heads.build import scorer_of
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.loading.sharded_load import is_empty, made_in_parts
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.quantized.linear import PackedLinear, unpacked
from memtrain.trainers.model.quantized.packed import matrices_of
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.weight_layout import full_of, local_of, rows_of
from tests.trainers.two_ranks import on_two_ranks

ADAPTER = Adapter(r=4, target_modules=("q_proj", "o_proj"), target_parameters=("gate_up_proj", "down_proj"))
DORA = Adapter(r=4, kind="dora", target_modules=("q_proj", "o_proj"))
IDS = torch.arange(48)[None] * 5 % 127


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture saved as on the hub: a matrix for each expert; scales of one weight fill no block of 256."""
    return save_mixture(tmp_path_factory.mktemp("mixture"), hidden_size=40)


def made(folder: Path, settings: Settings, adapter: Adapter) -> nn.Module:
    """The scorer with its adapters; without data where ranks are to hold their parts."""
    torch.manual_seed(1)
    model = load_model(Model(path=str(folder), adapter=adapter), settings, seed=0, vocab_size=128)
    adapted: Any = add_adapter(model, adapter, quantize=settings.quantize)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.03)
    apply_checkpointing_and_offload(adapted, settings)
    return scorer_of(adapted, "lm", settings)


def passed(scorer: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probs of a row, and the gradients of the adapters for their sum."""
    request = LogprobRequest(IDS[0, 1:])
    layout = packed_layout((48,))
    inputs = {"input_ids": IDS, "position_ids": layout.position_ids, "layout": layout}
    logp = scorer(inputs, torch.arange(47), request)[0]
    logp.sum().backward()
    return logp.detach(), {n: full_of(p.grad) for n, p in scorer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("adapter", [ADAPTER, DORA], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_two_ranks_hold_and_compute_the_bits_of_one(
    folder: Path, make_settings: Callable[..., Settings], bits: str, adapter: Adapter, tmp_path: Path
) -> None:
    settings = make_settings(adapter=adapter, quantize=bits)
    single = made(folder, settings, adapter)
    expected = {name: weight.detach().clone() for name, weight in single.named_parameters()}
    logp, gradients = passed(single)
    assert len(gradients) == 2 * (2 * 4 if adapter is ADAPTER else 3 * 2)

    def act(ranks: Ranks) -> None:
        shared = settings.model_copy(update={"num_processes": 2, "engine": "fsdp2", "loads_shards": True})
        scorer, why_whole = made_in_parts(shared, lambda: made(folder, shared, adapter))
        assert not why_whole
        assert is_empty(scorer)
        _in_rows(shared)(scorer)
        for name, weight in scorer.named_parameters():
            rows = rows_of(len(expected[name]), ranks.rank, 2)
            own, whole = local_of(weight.detach()), expected[name][rows.start : rows.stop]
            assert own.dtype.is_floating_point, "FSDP2 of older torch cuts floating-point numbers alone"
            assert torch.equal(own.view(whole.dtype) if own.numel() else own.to(whole.dtype), whole), name
        for _ in range(2):
            scorer.zero_grad()
            found, sums = passed(scorer)
            assert torch.equal(found, logp)
            assert sums.keys() == gradients.keys()
            # Both ranks have the same row: the sum over them is twice its gradient.
            assert all(torch.equal(sums[name], 2 * gradients[name]) for name in sums)

    on_two_ranks(tmp_path, act)


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_dora_takes_the_numbers_of_packed_weights(
    folder: Path, make_settings: Callable[..., Settings], bits: str
) -> None:
    """Not of their bytes: a new adapter moves nothing, and the run is that of the unpacked weights."""
    settings = make_settings(adapter=DORA, quantize=bits)
    packed = made(folder, settings, DORA)
    plain = made(folder, make_settings(adapter=DORA), DORA)
    with torch.no_grad():
        for name, module in packed.named_modules():
            if isinstance(module, PackedLinear):
                plain.get_submodule(name).weight.copy_(unpacked(module))
            elif is_experts(module):
                for stack in stacks_of(module):
                    plain.get_parameter(f"{name}.{stack}").copy_(matrices_of(module, stack).whole())
        for name, weight in plain.named_parameters():
            if "magnitude" in name:
                weight.copy_(packed.get_parameter(name))
                base = plain.get_submodule(name.split(".lora_magnitude")[0]).base_layer.weight
                assert torch.equal(weight, base.norm(dim=1))
    (logp, gradients), (expected, wanted) = passed(packed), passed(plain)
    assert torch.allclose(logp, expected, rtol=0, atol=1e-5)
    assert all(torch.allclose(gradients[name], wanted[name], rtol=1e-4, atol=1e-6) for name in wanted)
