"""Chunked loss: the LM head and the loss in tiles of the vocabulary, logits never held whole.

When: always, unless there is room for whole logits and they are faster. Saves: 12-16 bytes for every token
and word of the vocabulary. Costs: for a head that is trained in half precision one more product with it, a
tenth of a step for small models with large vocabularies, nothing otherwise. Exact: sums in float32 in another
order. Refused: never.

Source: Wijmans et al. 2024, arXiv:2411.09009 (cut cross-entropy), and memtrain/trainers/losses, whose tiles
memtrain/memory/estimate/head.py counts in `_chunked_head`.
"""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings
from memtrain.memory.strategies.base import ON_A_CPU, Strategy, StrategyContext, StrategyRequest, Updates
from memtrain.recipes.recipe import Recipe


def wish(recipe: Recipe) -> StrategyRequest:
    """Request of `memory.loss`."""
    loss = recipe.memory.loss
    return "auto" if loss == "auto" else "on" if loss == "chunked" else "off"


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Tiles of the size that the recipe names."""
    return ({"loss": "chunked"},)


STRATEGY = Strategy(
    name="chunked_loss",
    axis="loss",
    summary="LM head and loss in chunks; the logits are never whole in memory",
    saves="12-16 bytes for every token and word of the vocabulary",
    costs="one more product with a head that is trained in half precision",
    measured=ON_A_CPU,
    is_exact=True,
    recovery="loss_tile",
    evidence="logits in parts",
    is_used=lambda settings: settings.loss == "chunked",
    wish=wish,
    use_keys=lambda recipe: {"memory.loss": "chunked"},
    never_keys=lambda recipe: {"memory.loss": "full"},
    changes=changes,
    without={"loss": "full"},
)
