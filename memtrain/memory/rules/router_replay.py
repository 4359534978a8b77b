"""Rules for the sampler's choices of experts in the update (`router_replay`): where they are there."""

from __future__ import annotations

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.recipes.sections.methods.online_base import WithMismatch

REPLAYED = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
"""Families whose routers were told their choices in tests."""


def decide_router_replay(ledger: DecisionLog, facts: PlannerInputs, *, balance: float) -> bool:
    """Whether the update uses the sampler's choices; refuses where it cannot. `balance`: weight of the
    load-balance loss."""
    recipe = ledger.asked.recipe
    section = recipe.online
    if not isinstance(section, WithMismatch) or not section.router_replay:
        return False
    path = f"{recipe.method}.router_replay"
    for what, fix in _faults(ledger, facts, balance):
        ledger.refuse(f"router_replay: {what}", path, fix)
    ledger.decide(
        "router_replay", "on", "the update sends tokens to the experts that the sampler chose", path
    )
    return True


def _faults(ledger: DecisionLog, facts: PlannerInputs, balance: float) -> list[tuple[str, str]]:
    """Pairs of an obstacle and the way out."""
    recipe, off = ledger.asked.recipe, "set it to false"
    kind = facts.config.get("model_type")
    found: list[tuple[str, str]] = []
    if facts.shape.experts is None:
        found.append(("the model has no experts", "remove it"))
    elif kind not in REPLAYED:
        found.append((f"the routers of {kind} are untested (tested: {', '.join(REPLAYED)})", off))
    if recipe.generation.backend == "vllm":
        what = "vLLM's completions come without the experts that were chosen for their tokens"
        found.append((what, "set generate.backend: native, or set it to false"))
    if recipe.rewards is not None and recipe.rewards.environment is not None:
        found.append(("the words of an environment are read, and not written, by the sampler", off))
    if recipe.cluster.sharing > 1:
        found.append(("rows are divided over processes", "set cluster.context_parallel: 1"))
    if balance > 0:
        what = "the load-balance loss counts the routers' own choices"
        found.append((what, "set train.router_aux_loss_coef: 0, or set it to false"))
    return found


def refuse_other_sampler(ledger: DecisionLog, settings: Settings) -> None:
    """Refuse the replay of choices that the chosen sampler does not record."""
    if settings.router_replay and settings.sampler == "transformers":
        ledger.refuse(
            "router_replay: transformers' generate does not say the experts of its tokens",
            f"{ledger.asked.recipe.method}.router_replay",
            "set generate.backend: native, or set it to false",
        )
        ledger.raise_refusals()
