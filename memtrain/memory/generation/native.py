"""Models that the native sampler does not write for."""

from __future__ import annotations

from collections.abc import Mapping

from memtrain.memory.rules.attention import own_scores


def not_native(attention: str, config: Mapping[str, object], longest: int | None) -> str | None:
    """Reason that completions are written by transformers' `generate`, as a clause; None where they need not.

    `longest`: tokens of a prompt with its completion; None: without bound.
    """
    if attention == "transformers":
        return "this model's attention cannot keep rows apart here"
    scores = own_scores(config, longest)
    return None if scores is None else f"it does not compute this model's {scores}"
