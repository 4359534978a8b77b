"""Packed experts with adapters train the same on the host as on the device, recomputed, or in slices."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_mixtures import save_mixture

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.experts.forward import is_experts
from memtrain.trainers.model.experts.grouped import frozen_product
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from tests.equal.test_weights_offload_is_exact import equal, train

BOTH = Adapter(r=4, target_modules=("q_proj", "o_proj"), target_parameters=("gate_up_proj", "down_proj"))
FORMS: dict[str, dict[str, Any]] = {
    "checkpointed": {},
    "on the host": {"weights_offload": True},
    "on the host, inputs too": {"weights_offload": True, "offload": "boundaries"},
    "on the host, adapters too": {"weights_offload": True, "adapters_offload": True},
    "in slices on the host": {
        "weights_offload": True,
        "adapters_offload": True,
        "slice_tokens": 24,
        "checkpoint_every": 0,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mixture(tmp_path_factory.mktemp("mixture"), num_hidden_layers=3, num_experts=6)


@pytest.mark.parametrize("form", FORMS)
def test_training_is_the_same(folder: Path, make_settings: Callable[..., Settings], form: str) -> None:
    settings = make_settings(checkpoint_every=1, adapter=BOTH, quantize="4bit").model_copy(update=FORMS[form])
    plain: Any = load_model(Model(path=str(folder), adapter=BOTH), settings, seed=0, vocab_size=128)
    set_attention(plain, "torch_cpu")
    torch.manual_seed(1)
    plain = add_adapter(plain, BOTH, quantize="4bit")
    treated = copy.deepcopy(plain)
    weights = apply_checkpointing_and_offload(treated, settings, LazyEngine()).weights
    found, expected = train(treated, settings), train(plain, settings)
    if settings.slice_tokens:
        # An expert's tokens of a slice are fewer: their products are summed in another order.
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6)
    else:
        assert equal(found, expected)
    if weights is not None:
        experts = next(module for module in treated.modules() if is_experts(module))
        homes = weights.all_of_them()
        packed = [p for name, p in experts.named_parameters(recurse=False) if "proj" in name]
        assert len(packed) == 8
        assert all(id(one) in homes for one in packed), "packed experts and their scales travel"


@pytest.mark.parametrize("transposes", [True, False])
def test_of_the_experts_that_are_unpacked_in_parts_one_part_is_there_at_a_time(transposes: bool) -> None:
    parts: list[weakref.ref[torch.UntypedStorage]] = []

    class Watched:
        shape, num_at_once = torch.Size((6, 8, 8)), 2

        def between(self, first: int, last: int) -> torch.Tensor:
            assert all(one() is None for one in parts), "the part before is gone"
            made = torch.ones(last - first, 8, 8)
            parts.append(weakref.ref(made.untyped_storage()))
            return made

    ends_E = torch.arange(1, 7, dtype=torch.int32) * 3
    made = frozen_product(torch.ones(18, 8), cast(Any, Watched()), ends_E, inputs_first=not transposes)
    assert torch.equal(made, torch.full((18, 8), 8.0))
    assert len(parts) == 3
