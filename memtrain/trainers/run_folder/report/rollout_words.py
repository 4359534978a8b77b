"""Words about completions: their length over a run, and the tokens that a speed is made of; no torch."""

from __future__ import annotations

from collections.abc import Sequence

RESAMPLED = "groups_resampled"
"""Metric of a step: the groups that dynamic sampling replaced before it."""


def mean_length_words(lengths: Sequence[float]) -> str:
    """First and last mean length of the completions of a rollout; empty for methods without."""
    if not lengths:
        return ""
    ends = lengths[:1] if len(lengths) == 1 else (lengths[0], lengths[-1])
    return f"{' -> '.join(f'{length:,.1f}' for length in ends)} tokens"


def turn_words(turns: Sequence[tuple[float, float]]) -> str:
    """Mean turns of a completion and the environment's tokens in it, over the run; empty without one."""
    if not turns:
        return ""
    made, read = (sum(values) / len(turns) for values in zip(*turns, strict=True))
    return f"{made:,.1f} in a completion (and {read:,.1f} tokens of the environment, which are not trained)"


def resampled_words(counts: Sequence[float]) -> str:
    """Groups that dynamic sampling replaced over the run; empty where it is off."""
    if not counts:
        return ""
    rollouts = f"{len(counts):,} rollout{'' if len(counts) == 1 else 's'}"
    return f"{sum(counts):,.0f} in {rollouts} (of rewards that were all alike; other prompts came instead)"


def counted_words(tokens: int, loss_tokens: int, lengths: Sequence[float]) -> str:
    """Tokens that the speed is made of, and loss tokens; of rollouts without any, that there were none."""
    of = " of prompts and completions" if lengths else ""
    if lengths and not loss_tokens:
        return f"{tokens:,} tokens{of}; no loss tokens: every completion was left out of the update"
    again = ", counted in each update of a rollout" if lengths and loss_tokens > tokens else ""
    return f"{tokens:,} tokens{of}, {loss_tokens:,} loss tokens{again}"
