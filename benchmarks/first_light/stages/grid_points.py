"""One point of the planner's error: a plan of a method, a size, a length and a strategy, measured."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from first_light.bench import Bench, Planned
from first_light.ladder import LORA
from first_light.stages.steps import measured_steps

WORDS: dict[str, tuple[str, ...]] = {
    "planned": (),
    "activation_checkpointing": ("memory.activation_checkpointing=on", "memory.streamed_layers=off"),
    "no_checkpointing": ("memory.activation_checkpointing=off", "memory.streamed_layers=off"),
    "boundary_offloading": ("memory.activation_checkpointing=on", "memory.activation_offloading=on"),
    "full_offloading": ("memory.activation_checkpointing=off", "memory.activation_offloading=on"),
    "streamed_layers": ("memory.streamed_layers=on",),
    "full_logits": ("memory.loss=full",),
    "liger_loss": ("memory.loss=liger",),
    "packing": ("length.packing=bfd",),
    "padded": ("length.padding_free=false",),
    "optimizer_offload": ("memory.optimizer_offload=on",),
    "optimizer_in_backward": ("optim.in_backward=on", "optim.max_grad_norm=null"),
    "compressed_moments": ("optim.compressed_moments=true", "memory.allow=compressed_moments"),
    "split_copies": ("optim.copies=split",),
    "stochastic_rounding": ("optim.copies=stochastic", "memory.allow=stochastic_rounding"),
    "adamw_8bit": ("optim.kind=adamw_8bit",),
    "qlora": ("model.quantize=4bit",),
}
BATCH = {"grpo": 8, "rloo": 8, "online_dpo": 8, "ppo": 8}


def measure_point(
    bench: Bench, method: str, size: str, length: int, adapter: str, strategy: str
) -> dict[str, Any]:
    """Its plan's steps; refused where no such plan is made, or another point has made the same one."""
    planned = planned_point(bench, method, size, length, adapter, strategy)
    alike = bench.work / "plans" / digest(planned.plan, size)
    if alike.is_file() and alike.read_text() != bench.stage:
        return {"refused": f"the same plan as {alike.read_text()}"}
    alike.parent.mkdir(exist_ok=True)
    alike.write_text(bench.stage)
    return measured_steps(bench, planned, 2) | {"point": [method, size, length, adapter, strategy]}


def planned_point(bench: Bench, method: str, size: str, length: int, adapter: str, strategy: str) -> Planned:
    """The plan of a point. Raises: RecipeError and the like where none can be made."""
    words = [LORA] if adapter == "lora" else []
    path, given = bench.recipe(
        method,
        size,
        tokens=bench.tokens(length),
        overrides=[*words, *WORDS[strategy]],
        batch=BATCH.get(method, 4),
        count=64,
    )
    return bench.plan(path, given)


def digest(plan: Any, size: str) -> str:
    """Of what a plan's peak depends on."""
    text = json.dumps([size, plan.recipe.method, plan.settings.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
