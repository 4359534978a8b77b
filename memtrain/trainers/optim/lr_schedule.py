"""The learning rate of every step, as a pure function of its number."""

from __future__ import annotations

import math

from memtrain.recipes.sections.optim import Optim

DEFAULT_WARMUP_RATIO = 0.03
"""Taste: the value of Alpaca's recipe, which most later ones kept."""

WSD_DECAY_RATIO = 0.2
"""Share of all steps in which `wsd` falls. Source: Haegele et al. 2024, arXiv:2405.18392, section 4."""


def lr_at(step: int, *, optim: Optim, max_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0, of a run of `max_steps`.

    With w warm-up steps, m = `min_lr_ratio`, N = `max_steps` and p = (step - w) / (N - w):

        step < w    lr * (step + 1) / w
        constant    lr
        linear      lr * (m + (1 - m) * (1 - p))
        cosine      lr * (m + (1 - m) * (1 + cos(pi * p)) / 2)
        wsd         lr until N - d, then lr * (m + (1 - m) * (N - step) / d), with d = ceil(0.2 * N)

    Warm-up ends on the full rate and its first step is not 0, unlike transformers' (step / w); without
    warm-up the values are transformers' own.

    Source: cosine: Loshchilov & Hutter 2016, arXiv:1608.03983, eq. 5; wsd: Hu et al. 2024, arXiv:2404.06395,
    section 4.2, with the linear fall of arXiv:2405.18392.
    """
    warmup = warmup_steps(optim, max_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    if optim.schedule == "wsd":
        decay = max(1, math.ceil(WSD_DECAY_RATIO * max_steps))
        part = max(0.0, min(1.0, (max_steps - step) / decay))
    else:
        part = falls[optim.schedule]
    floor = 0.0 if optim.schedule == "constant" else optim.min_lr_ratio
    return optim.lr * (floor + (1.0 - floor) * part)


def warmup_steps(optim: Optim, max_steps: int) -> int:
    """Steps of warm-up: as given, or the ratio of all steps rounded up; never more than there are steps."""
    if optim.warmup_steps is not None:
        return min(optim.warmup_steps, max_steps)
    ratio = optim.warmup_ratio if optim.warmup_ratio is not None else DEFAULT_WARMUP_RATIO
    return min(math.ceil(ratio * max_steps), max_steps)
