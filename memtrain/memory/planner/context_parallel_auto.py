"""`cluster.context_parallel: auto`: how many processes hold a row together, by bytes and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs, Priced
from memtrain.memory.plan.plan import Decision
from memtrain.memory.planner.search import TIE
from memtrain.memory.rules.context_parallel import PATH, SETTING
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key

MOST = 64
"""Most processes that are tried for one row."""


class Chosen(Protocol):
    """The resolver's answer."""

    @property
    def chosen(self) -> Priced:
        """The plan with its time."""
        ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Reasons of the plan's settings."""
        ...

    @property
    def tried(self) -> tuple[Priced, ...]:
        """Plans that were weighed."""
        ...


Found = TypeVar("Found", bound=Chosen)


def sizes(asked: SourcedRecipe, facts: PlannerInputs) -> Iterator[int]:
    """1, 2, 4, ... as far as they divide the processes of a run."""
    hardware, wanted = facts.hardware, asked.recipe.cluster.processes
    here = hardware.num_nodes * hardware.num_devices if hardware.device == "cuda" else 1
    processes = here if wanted == "auto" else wanted
    size = 1
    while size <= min(processes, MOST) and processes % size == 0:
        yield size
        size *= 2


def by_context(
    asked: SourcedRecipe, facts: PlannerInputs, act: Callable[[SourcedRecipe, PlannerInputs], Found]
) -> tuple[Found, str, tuple[Priced, ...]]:
    """(the fastest plan that fits over all sizes, the smallest of equally fast ones; why; all weighed).

    Raises: RecipeError and DoesNotFit as for single processes, where no size fits.
    """
    found: list[tuple[int, Found]] = []
    first: DoesNotFit | None = None
    for size in sizes(asked, facts):
        try:
            found.append((size, act(SourcedRecipe(with_key(asked.recipe, PATH, size), asked.where), facts)))
        except DoesNotFit as fault:
            first = first or fault
        except RecipeError:
            if size == 1:
                raise
            break
    if not found:
        assert first is not None, "One process a row is always tried."
        raise first
    limit = min(one.chosen.token_s for _, one in found) * (1 + TIE)
    size, best = next((size, one) for size, one in found if one.chosen.token_s <= limit)
    tried = tuple(priced for _, one in found for priced in one.tried)
    return best, _words(size, found, first), tried


def _words(size: int, found: Sequence[tuple[int, Chosen]], first: DoesNotFit | None) -> str:
    if size == 1:
        others = [other for other, _ in found if other > 1]
        return (
            f"whole rows fit, and {others[-1]} processes a row are not faster" if others else "whole rows fit"
        )
    if found[0][0] > 1:
        why = first.faults[0].what if first is not None else "whole rows do not fit"
        return f"{why} with fewer processes a row"
    return "faster than whole rows"


def with_reason(decisions: tuple[Decision, ...], size: int, words: str) -> tuple[Decision, ...]:
    """The decisions, with why so many processes hold a row together."""
    mine = Decision(setting=SETTING, value=str(size), reason=words, source="rule")
    others = tuple(one for one in decisions if one.setting != SETTING)
    before = next((one for one in decisions if one.setting == SETTING), None)
    if before is not None:
        mine = mine.model_copy(update={"reason": f"{words}; {before.reason}"})
    return (*others, mine)
