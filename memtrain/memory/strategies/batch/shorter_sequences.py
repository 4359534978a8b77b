"""Shorter sequences: rows are cut (or left out) at a lower `max_length`.

When: it is allowed, and nothing else fits. Saves: activations in proportion to the longest sequences. Costs:
cut tokens are not trained on; `memtrain inspect-lengths` counts them. Not exact. Refused: where rows have no
limit to lower.

Source: bytes in proportion to tokens, memtrain/memory/estimate/activations.py; what is lost is counted by
memtrain/memory/plan/length_profile.py.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import Strategy, StrategyContext, no_keys


def refusal(case: StrategyContext) -> str | None:
    """Reason against shorter sequences: no length is set."""
    return "length.max_length is null" if case.recipe.length.max_length is None else None


STRATEGY = Strategy(
    name="shorter_sequences",
    axis="length",
    summary="rows are cut at a lower max_length",
    saves="activations, in proportion",
    costs="cut tokens are not trained on",
    measured="losses and costs of each length: [choosing `max_length`](inspect-lengths.md)",
    is_exact=False,
    is_used=lambda settings: False,
    wish=lambda recipe: "allow",
    use_keys=no_keys,
    refusal=refusal,
)
