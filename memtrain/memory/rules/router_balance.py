"""Rules for the loss that evens the load of a mixture's experts: its weight, and where it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.rules.ledger import DecisionLog

PATH = "train.router_aux_loss_coef"
BALANCED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Families whose load-balance loss was compared with transformers' own, in tests."""


def decide_router_balance(ledger: DecisionLog, facts: PlannerInputs) -> float:
    """The weight of the load-balance loss; notes why, and refuses where it cannot be computed."""
    recipe, config = ledger.asked.recipe, facts.config
    wanted = recipe.train.router_aux_loss_coef
    if facts.shape.experts is None:
        if wanted not in ("auto", 0):
            ledger.refuse("the model has no experts: there is no load to balance", PATH, "leave it out")
        return 0.0
    weight = _own_weight(config) if wanted == "auto" else wanted
    if weight is None:
        ledger.refuse(
            "the model's configuration asks for its routers' auxiliary loss (output_router_logits: true) and "
            "gives no router_aux_loss_coef",
            PATH,
            "set it: 0.001 is usual, 0 leaves the loss to the tokens",
        )
        return 0.0
    if not weight:
        reason = f"the loss is that of the tokens; no loss balances the experts ({PATH}: 0.001 would)"
        ledger.decide("router_balance_loss", "off", reason)
        return 0.0
    for what, fix in _faults(ledger, config):
        ledger.refuse(f"the load-balance loss of experts cannot be computed {what}", PATH, fix)
    source = "the model's own weight" if wanted == "auto" else PATH
    ledger.decide(
        "router_balance_loss",
        f"{weight:g}",
        f"{source}; over all tokens of a step and all ranks, without padding; a pass more to count them",
    )
    return weight


def _own_weight(config: Mapping[str, Any]) -> float | None:
    """The weight that a configuration asks for; 0 where it asks for none, None where it gives none."""
    text = config.get("text_config") or config
    if not text.get("output_router_logits"):
        return 0.0
    weight = text.get("router_aux_loss_coef")
    return None if weight is None else float(weight)


def _faults(ledger: DecisionLog, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of an obstacle and the way out."""
    recipe = ledger.asked.recipe
    text = config.get("text_config") or config
    found: list[tuple[str, str]] = []
    off = f"set {PATH}: 0"
    kind = text.get("model_type")
    if kind not in BALANCED:
        found.append((f"for {kind}: its routers are untested (tested: {', '.join(BALANCED)})", off))
    if recipe.cluster.sharing > 1:
        found.append(("with rows in slices over several devices", "set cluster.context_parallel: 1"))
    return found
