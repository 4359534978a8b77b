"""CUDA graphs of the native sampler: where its passes are captured, and why not elsewhere."""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog

PATH = "generate.cuda_graphs"


def decide_graphs(ledger: DecisionLog, settings: Settings) -> bool:
    """Whether passes that write a token are captured; told of a native sampler on a GPU, or where asked."""
    wanted = ledger.asked.recipe.generation.cuda_graphs
    reason = _cannot(settings)
    if wanted == "on" and reason:
        ledger.refuse(f"the sampler's passes cannot be captured: {reason}", PATH, "set it to auto")
        return False
    is_on = wanted != "off" and not reason
    if wanted != "auto" or (settings.sampler == "native" and settings.device == "cuda"):
        why = reason or "one call starts all kernels of a token, where the model can be captured"
        ledger.decide("cuda_graphs", "on" if is_on else "off", why if wanted != "off" else "", PATH)
    return is_on


def _cannot(settings: Settings) -> str:
    """The reason why nothing is captured; empty where there is none."""
    if settings.sampler != "native":
        return "completions are written by another sampler than the native one"
    if settings.device != "cuda":
        return "CUDA graphs are of a GPU"
    if shards_weights(settings):
        return "weights are gathered from other processes"
    if settings.weights_offload:
        return "weights live on the host, and a layer's place on the device is another's a moment later"
    if settings.quantize != "none":
        return "weights are quantized"
    return ""
