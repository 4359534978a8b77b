"""The verdict of a verification: every check with its finding, as JSON of a stated version."""

from __future__ import annotations

from typing import Literal

from memtrain.recipes.sections.base import Section

VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes."""


class Check(Section):
    """A check of a verification."""

    name: str
    """loss, log-probs, gradients, update, contamination, resume, or ran."""
    outcome: Literal["pass", "fail", "not run"]
    found: float | None
    """The largest value of all steps."""
    limit: float | None
    """Limit of the value."""
    where: str
    """The parameter, token or strategy that is furthest off."""
    says: str
    """The check and its outcome in words."""


class Ran(Section):
    """The operations of one side, counted in a step."""

    attention: str
    attention_ops: dict[str, int]
    layer_passes: float
    largest_logits_rows: int
    micro_batches: int
    forwarded_tokens: int
    offloaded_bytes: int
    optimizer: str
    kernels: tuple[str, ...]


class Verification(Section):
    """Result of `memtrain verify`."""

    version: int = VERSION
    is_exact: bool
    """Whether every check that could run passed."""
    recipe: str
    method: str
    dtype: str
    device: str
    steps: int
    strategies: tuple[str, ...]
    """Strategies of the plan."""
    checks: tuple[Check, ...]
    gradients: dict[str, float]
    """The largest relative difference of each parameter's gradient, over the steps."""
    planned: Ran
    plain: Ran
    notes: tuple[str, ...]
    versions: dict[str, str]
