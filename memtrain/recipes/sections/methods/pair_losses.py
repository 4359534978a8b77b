"""Facts of the preference losses: knobs, the need of a reference, the pairs of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PairLossName = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "robust",
    "discopop",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
    "simpo",
    "orpo",
    "cpo",
    "sft",
]


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Facts of a preference loss, whose formula has the same name in trainers/losses/preference."""

    reads: tuple[str, ...] = ()
    """Knobs of `dpo:` that it reads; one that none of a recipe's losses reads is refused. Losses that do not
    read `divergence` know reverse KL alone."""
    needs_reference: bool = True
    ranks_the_batch: bool = False
    """The pairs of a step are sorted: a step must be one micro-batch of one process."""
    counts_tokens: bool = False
    """The sum is divided by chosen tokens, not by pairs."""


SMOOTHED = ("beta", "label_smoothing", "divergence")

PAIR_LOSSES: Mapping[PairLossName, PairLoss] = {
    "sigmoid": PairLoss(SMOOTHED),
    "sigmoid_norm": PairLoss(SMOOTHED),
    "hinge": PairLoss(("beta", "divergence")),
    "ipo": PairLoss(("beta", "divergence")),
    "exo_pair": PairLoss(SMOOTHED),
    "robust": PairLoss(SMOOTHED),
    "discopop": PairLoss(("beta", "discopop_tau", "divergence")),
    "nca_pair": PairLoss(("beta",)),
    "bco_pair": PairLoss(("beta",)),
    "sppo_hard": PairLoss(("beta",)),
    "apo_zero": PairLoss(("beta",)),
    "apo_down": PairLoss(("beta",)),
    "aot": PairLoss(("beta", "label_smoothing"), ranks_the_batch=True),
    "aot_unpaired": PairLoss(("beta", "label_smoothing"), ranks_the_batch=True),
    "simpo": PairLoss(("beta", "simpo_gamma", "label_smoothing"), needs_reference=False),
    "orpo": PairLoss(needs_reference=False),
    "cpo": PairLoss(("beta", "label_smoothing"), needs_reference=False),
    "sft": PairLoss(needs_reference=False, counts_tokens=True),
}
"""Every preference loss by its name in `dpo.loss`."""
