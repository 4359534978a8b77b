"""A plan to test with: small, complete, and changed by dotted recipe keys and by settings."""

from collections.abc import Callable
from typing import Any

import pytest

from memtrain.memory.plan.plan import (
    Decision,
    Owned,
    PhasePeak,
    Plan,
    Prediction,
    PreparedData,
    PreparedSplit,
)
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe

MakePlan = Callable[..., Plan]

GIB = 2**30

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "num_processes": 1,
    "threads": 1,
    "dtype": "float32",
    "attention": "torch_cpu",
    "liger": False,
    "adapter": None,
    "quantize": "none",
    "max_length": 1024,
    "truncation": "keep_start",
    "packing": "bfd",
    "cross_document_attention": False,
    "padding_free": True,
    "pad_to_multiple_of": None,
    "group_by_length": False,
    "batch_size": 8,
    "batch_tokens": None,
    "micro_batch_size": 2,
    "micro_tokens": None,
    "max_steps": 100,
    "checkpoint_every": 1,
    "offload": "none",
    "loss": "chunked",
    "loss_tile_bytes": 2**26,
    "optimizer": "adamw",
    "master_weights": False,
    "expandable_segments": True,
}


def prediction(scale: float) -> Prediction:
    owners = {"weights": 2.0, "gradients": 2.0, "optimizer": 4.0, "activations": 1.5 * scale}

    def peak(phase: str, names: tuple[str, ...]) -> PhasePeak:
        owned = tuple(Owned(owner=name, num_bytes=int(owners[name] * GIB)) for name in names)
        return PhasePeak(phase=phase, num_bytes=sum(one.num_bytes for one in owned), owners=owned)

    phases = (
        peak("load", ("weights",)),
        peak("first step", ("weights", "gradients", "activations")),
        peak("steady step", ("weights", "gradients", "optimizer", "activations")),
        peak("evaluation", ("weights", "optimizer", "activations")),
    )
    return Prediction(phases=phases, method="arithmetic", budget_bytes=16 * GIB)


@pytest.fixture
def make_plan() -> MakePlan:
    """Factory of plans: `make_plan({"optim.lr": 1e-4}, threads=2)` sets recipe keys, then settings."""

    def make(keys: dict[str, Any] | None = None, **settings: Any) -> Plan:
        recipe: dict[str, Any] = {
            "method": "sft",
            "model": {"path": "builtin:tiny"},
            "data": {"train": "builtin:arithmetic", "eval_fraction": 0.1},
            "length": {"packing": "bfd"},
        }
        for key, value in (keys or {}).items():
            *above, last = key.split(".")
            section = recipe
            for name in above:
                section = section.setdefault(name, {})
            section[last] = value
        split = PreparedSplit(
            folder="/cache/3f2a",
            num_rows=1000,
            num_tokens=90_000,
            num_loss_tokens=40_000,
            num_skipped=0,
            longest_tokens=700,
        )
        reason = "the only one that keeps packed rows apart on a CPU"
        return Plan(
            recipe=Recipe.model_validate(recipe),
            recipe_path="recipe.yaml",
            run_dir="runs/recipe",
            settings=Settings(**(SETTINGS | settings)),
            decisions=(
                Decision(setting="attention", value="torch_cpu", reason=reason, source="rule"),
                Decision(setting="packing", value="bfd", reason="asked for", source="recipe.yaml:9"),
            ),
            data=PreparedData(train=split, eval=None, held_out_rows=100),
            prediction=prediction(1),
            plain=prediction(8),
            versions={"memtrain": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "python": "3.12.3"},
        )

    return make
