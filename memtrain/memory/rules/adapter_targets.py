"""Names in a recipe's adapter against the parts that a model's shape has, before anything is built."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from memtrain.memory.model_shape.layer_parts import is_named
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.sections.model import ALL_LINEAR

HEADS = frozenset(("lm_head", "embed_out"))
"""Names of the LM head."""
BESIDE_LAYERS = frozenset(
    ("lm_head", "embed_tokens", "wte", "wpe", "embed_in", "embed_out", "score", "gate", "shared_expert_gate")
)
"""Modules that an adapter may name, and no layer's shape has. Whether the model has them is seen when it is
built without data (`trainers/model/loading/adapter_targets.py`)."""


WITHOUT_OUT_PROJ = frozenset(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"))
"""Model types whose `out_proj` PEFT adapts by no means: their kernels read its weight beside the module.

Source: peft 0.21.2, tuners/tuners_utils.py, `_check_lora_target_modules_mamba`."""


def _maps_of(shape: ModelShape) -> list[str]:
    """Names of the linear maps of a model's layers."""
    counted = shape.counts.all_linears if shape.counts is not None else ()
    return list(dict.fromkeys((*(part.name for part in shape.linears), *(part.name for part, _ in counted))))


def missing_targets(targets: Sequence[str], shape: ModelShape) -> list[str]:
    """Names of linear maps that an adapter names and the model has not."""
    there = {*_maps_of(shape), *BESIDE_LAYERS}
    return [one for one in targets if one != ALL_LINEAR and one.rsplit(".", 1)[-1] not in there]


def refuse_targets(ledger: DecisionLog, shape: ModelShape) -> None:
    """Refuse names of linear maps and of stacks of experts that the model has not."""
    model = ledger.asked.recipe.model
    adapter = model.adapter
    if adapter is None:
        return
    for key in ("target_modules", "modules_to_save"):
        heads = [name for name in getattr(adapter, key) if name.rsplit(".", 1)[-1] in HEADS]
        if heads and model.quantize != "none":
            ledger.refuse(
                "the LM head cannot be trained on quantized weights: the loss reads the full-precision head",
                f"model.adapter.{key}",
                f"remove {heads[0]} from the list, or set model.quantize to none",
            )
    _refuse_out_proj(ledger, shape)
    stacks = [f"experts.{stack.name}" for stack, _ in shape.stacks]
    maps = _maps_of(shape)
    for target in missing_targets(adapter.target_modules, shape):
        name = target.rsplit(".", 1)[-1]
        near = ", ".join(difflib.get_close_matches(name, maps, n=3, cutoff=0.5) or maps[:8])
        more = "; stacked experts are named in model.adapter.target_parameters" if stacks else ""
        ledger.refuse(
            f"the model has no module {target}",
            "model.adapter.target_modules",
            f"name modules that it has, such as {near}{more}",
        )
    for target in adapter.target_parameters:
        if not stacks:
            what, fix = f"the model has no experts, and nothing to adapt by the name {target}", "remove it"
        elif any(f".{stack}".endswith(f".{target.removeprefix('mlp.')}") for stack in stacks):
            continue
        else:
            what = f"the model has no stack of experts {target}"
            fix = f"name stacks that it has, such as {', '.join(dict.fromkeys(stacks))}"
        ledger.refuse(what, "model.adapter.target_parameters", fix)


def _refuse_out_proj(ledger: DecisionLog, shape: ModelShape) -> None:
    adapter = ledger.asked.recipe.model.adapter
    if adapter is None or shape.model_type not in WITHOUT_OUT_PROJ or not is_named(adapter, "out_proj"):
        return
    others = [name for name in _maps_of(shape) if name != "out_proj" and name not in BESIDE_LAYERS]
    ledger.refuse(
        f"PEFT puts no adapter on out_proj of {shape.model_type} models, which the adapter names",
        "model.adapter.target_modules",
        f"name the others: model.adapter.target_modules: [{', '.join(others)}]",
    )
