"""Optimizer offload: moments and float32 copies wait in host memory, and travel to the device for the step.

When: weights and gradients fit, the optimizer's states do not. Saves: two numbers for each trained weight on
the device, and a third where it has a float32 copy (of split copies the bits), but for two buckets: while one
is stepped, the next comes or the one before leaves. Costs: they cross the bus twice a step (the more
micro-batches a step has, the less it is felt); as many bytes of host memory. Exact: the same update on the
same numbers. Refused: on a CPU, and for optimizers without moments of that size or with paged ones.

Source: Ren et al. 2021, arXiv:2101.06840 (ZeRO-Offload); here the update itself stays on the device.
"""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import ON_A_GPU, Conflict, Strategy, StrategyContext, Updates, on_off

WITH_MOMENTS = ("adamw", "muon")
"""Optimizers whose moments are worth moving."""


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """All moments, where there are any."""
    return ({"optimizer_offload": True},) if settings.optimizer in WITH_MOMENTS else ()


def refusal(case: StrategyContext) -> str | None:
    """Reason where the strategy would move nothing."""
    if case.facts.hardware.device == "cpu":
        return "on a CPU the optimizer states are in host memory already"
    if case.recipe.optim.kind not in WITH_MOMENTS:
        return f"{case.recipe.optim.kind} has hardly any states to offload"
    return None


STRATEGY = Strategy(
    name="optimizer_offload",
    axis="states",
    summary="optimizer states and float32 copies offloaded to CPU, and copied to the device for the step",
    saves="two numbers for each trained weight, and its float32 copy",
    costs="the states are copied over PCIe twice a step; host memory",
    measured=ON_A_GPU,
    is_exact=True,
    is_used=lambda settings: settings.optimizer_offload,
    wish=lambda recipe: on_off(recipe.memory.optimizer_offload),
    use_keys=lambda recipe: {"memory.optimizer_offload": "on"},
    never_keys=lambda recipe: {"memory.optimizer_offload": "off"},
    changes=changes,
    without={"optimizer_offload": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "optimizers whose states are not moved",
            "paged and 8-bit states have their own placement; sgd and adafactor have hardly any",
            when=lambda settings: settings.optimizer not in ("adamw", "muon"),
        ),
        Conflict(
            "optimizer_in_backward",
            "states are copied in buckets after the backward pass; optimizer_in_backward steps each "
            "weight alone",
        ),
        Conflict(
            "DeepSpeed's ZeRO",
            "it steps flat parts of weights; cluster.cpu_offload: optimizer moves their states",
            when=uses_zero,
        ),
        Conflict(
            "shards that wait on the host",
            "the states are there with them",
            when=lambda settings: settings.shard_offload != "none",
        ),
    ),
)
