"""The form of a strategy's page: name, changes, price, refusals, conflicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.rules.oom_recovery import RecoveryStep
from memtrain.recipes.recipe import Recipe

StrategyRequest = Literal["on", "off", "auto", "allow"]
"""Request of a recipe for a strategy: must be used, must not, the plan decides, or only when allowed."""

StrategyGroup = Literal[
    "rows",
    "sequences",
    "prompts",
    "context",
    "checkpointing",
    "offloading",
    "weights",
    "loss",
    "micro-batch",
    "states",
    "backward",
    "optimizer",
    "precision",
    "copies",
    "moments",
    "adapter",
    "length",
    "reference",
]
"""Choices that stand in place of each other."""

TRAINED: frozenset[StrategyGroup] = frozenset(
    {"micro-batch", "optimizer", "precision", "copies", "moments", "adapter", "length"}
)
"""Choices of the trained weights and the steps, which the plain run makes too."""

Evidence = Literal[
    "rows end to end",
    "rows in one sequence",
    "fewer tokens",
    "several micro-batches",
    "all layers twice",
    "some layers twice",
    "layers in parts",
    "bytes that travel",
    "weights that travel",
    "logits in parts",
    "freed gradients",
    "bits beside the weights",
    "weights without copies",
    "moments in 8 bits",
    "log-probs in the feed",
    "policy as reference",
]
"""Marks that a strategy leaves in a step, by which `memtrain verify` sees it at work."""

Updates = Mapping[str, object]
"""New values of some settings."""


ON_A_CPU = "peak of a step on a CPU: [memory, measured](memory.md#measured)"
ON_A_GPU = "not yet: it needs a GPU"
"""Words of the manual for the places of the figures."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """Context in which a strategy is judged."""

    asked: SourcedRecipe
    facts: PlannerInputs

    @property
    def recipe(self) -> Recipe:
        """The recipe without its sources."""
        return self.asked.recipe


def no_forms(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """Of strategies that are decided by rule before the search."""
    return ()


def no_keys(recipe: Recipe) -> Mapping[str, object]:
    """Of strategies that no key switches off."""
    return {}


def never_refused(case: StrategyContext) -> str | None:
    """Of strategies that run everywhere."""
    return None


@dataclass(frozen=True, slots=True)
class Conflict:
    """A thing that no run has together with a strategy."""

    other: str
    """The thing in words, or the name of another strategy."""
    reason: str
    when: Callable[[Settings], bool] | None = None
    """Settings that have it; None: settings that use the strategy named in `other`."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to spend less memory."""

    name: str
    """Name in `memory.use` and `memory.never`."""
    axis: StrategyGroup
    summary: str
    """Effect of the strategy, in a clause without a full stop."""
    saves: str
    costs: str
    measured: str
    """The place of its figures, as the manual links it."""
    is_exact: bool
    """The same numbers as without the strategy, up to the order of sums; else another result."""
    is_used: Callable[[Settings], bool]
    wish: Callable[[Recipe], StrategyRequest]
    """Request that the recipe's own keys make for it."""
    use_keys: Callable[[Recipe], Mapping[str, object]]
    """The recipe's keys that switch it on: what `memory.use` stands for."""
    never_keys: Callable[[Recipe], Mapping[str, object]] = no_keys
    """The recipe's keys that switch it off: what `memory.never` stands for."""
    changes: Callable[[Settings, StrategyContext], tuple[Updates, ...]] = no_forms
    """The ways to switch it on in the search, over settings without it."""
    without: Updates = field(default_factory=dict[str, object])
    """The settings of the run without it."""
    padded: Updates = field(default_factory=dict[str, object])
    """The settings of the run without it where that has other sequences: they alone price nothing."""
    refusal: Callable[[StrategyContext], str | None] = never_refused
    """Reason against the strategy here, whatever else is chosen; None when it can be used."""
    recovery: RecoveryStep | None = None
    """The step that a run out of memory takes towards it."""
    evidence: Evidence | None = None
    """The mark that it leaves in a step on any device; None: no step shows it."""
    conflicts: tuple[Conflict, ...] = ()
    """The things that it cannot be with."""

    @property
    def plain(self) -> Updates:
        """The settings of the plain run in place of its own; none where both train or step alike."""
        return {} if self.axis in TRAINED and not self.is_exact else {**self.without, **self.padded}


def on_off(value: object) -> StrategyRequest:
    """The wish of a key that says `on`, `off` or `auto`."""
    return "on" if value == "on" else "auto" if value == "auto" else "off"
