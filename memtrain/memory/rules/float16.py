"""Float16 for GPUs without bfloat16 (T4, V100): its exclusions, and its reason."""

from __future__ import annotations

from memtrain.recipes.recipe import Recipe

FLOAT16_REASON = (
    "this run computes in float16 with a scaled loss; the optimizer's weights, gradients and moments are "
    "float32"
)
AUTO_REASON = (
    "this GPU has no fast bfloat16, and multiplies float16 several times as fast as float32: computed with a "
    "scaled loss; the optimizer's weights, gradients and moments are float32"
)

Faults = list[tuple[str, str, str]]


def float16_faults(recipe: Recipe) -> Faults:
    """(what, where, fix) of each part of a recipe that float16 cannot be with."""
    faults: Faults = []
    optim, engine = recipe.optim, recipe.cluster.engine
    if engine not in ("auto", "ddp"):
        what = f"cluster.engine {engine} does not scale the loss here"
        faults.append((what, "cluster.engine", "set it to ddp, or model.dtype: float32"))
    if optim.in_backward == "on" or "optimizer_in_backward" in recipe.memory.use:
        what = "gradients wait until all are known to be finite, and optim.in_backward frees each at once"
        faults.append((what, "optim.in_backward", "remove it, or set model.dtype: float32"))
    if optim.copies in ("split", "stochastic"):
        what = f"optim.copies {optim.copies} puts float32 numbers together with bfloat16 weights"
        faults.append((what, "optim.copies", "remove it, or set model.dtype: float32"))
    if optim.master_weights is False and recipe.model.adapter is None:
        what = "weights without float32 copies lose most updates"
        faults.append((what, "optim.master_weights", "remove it, or set model.dtype: float32"))
    if recipe.taught is not None:
        what = "gradients of this loss are made with it, and rounded before they could be scaled"
        faults.append((what, "model.dtype", "set it to float32, or use a GPU with bfloat16"))
    return faults
