"""Tokens of a mixture's experts in the report: the fullest, the idle, and a row for each layer; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memtrain.trainers.protocols.events import ExpertsEvent


class LayerTokens(NamedTuple):
    """Tokens that the experts of a layer were sent; layers and experts are numbered from 0."""

    layer: int
    """Number among the layers with experts."""
    fewest: int
    mean: float
    most: int
    fullest: int
    """The expert with the most."""
    num_idle: int
    """Experts that got none."""


def layers_of(events: Sequence[ExpertsEvent]) -> list[LayerTokens]:
    """A row for each layer, of all events together."""
    if not events:
        return []
    layers = zip(*(event.tokens for event in events), strict=True)
    sent = [[sum(one) for one in zip(*of_layer, strict=True)] for of_layer in layers]
    return [
        LayerTokens(
            number,
            min(tokens),
            sum(tokens) / len(tokens),
            max(tokens),
            tokens.index(max(tokens)),
            tokens.count(0),
        )
        for number, tokens in enumerate(sent)
    ]


def expert_words(events: Sequence[ExpertsEvent]) -> str:
    """The fullest expert beside the mean of its layer, and the experts without a token; empty without
    experts."""
    layers = [one for one in layers_of(events) if one.mean]
    if not layers:
        return ""
    most = max(layers, key=lambda one: one.most / one.mean)
    num_experts = len(events[0].tokens[0]) * len(events[0].tokens)
    steps = sum(event.steps for event in events)
    idle = sum(one.num_idle for one in layers)
    place = f"expert {most.fullest} of layer {most.layer}"
    return (
        f"{most.most / most.mean:.2f} times the mean of its layer ({place}: {most.most:,} tokens, mean "
        f"{most.mean:,.0f}); {idle:,} of {num_experts:,} experts got no token in "
        f"{steps:,} logged step{'' if steps == 1 else 's'}"
    )
