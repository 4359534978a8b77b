"""`memtrain rescue`: from a configuration and a traceback to changes that make the run fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from memtrain import __version__
from memtrain.cli.rescue.as_it_was import AsItWas, as_it_was, died_in, facts_of, with_a_length
from memtrain.cli.rescue.clues import clues
from memtrain.cli.rescue.engine import with_cards
from memtrain.cli.rescue.model import with_model, with_modules_that_are_there
from memtrain.cli.rescue.own_tool import Way, own_way
from memtrain.cli.rescue.traceback import NOTHING, OomReport, read_traceback
from memtrain.errors import DoesNotFit, RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.explain.own_layers import activations_words
from memtrain.memory.hardware.devices import Hardware, known_names
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.units import MIB, read_size
from memtrain.memory.planner.resolve import LENGTH_STEP, Resolved, resolved_if_it_fits
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.edit import with_key
from memtrain.recipes.importers.engines import UNREAD_STAGE
from memtrain.recipes.importers.guess import is_recipe
from memtrain.recipes.importers.importing import Foreign, import_config, read_foreign, unset_words
from memtrain.recipes.reading.load import load_recipe, read_mapping
from memtrain.recipes.reading.yaml_tree import plain
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.memory import Changing

GIVEN_UP: tuple[tuple[str, ...], ...] = (("optimizer", "copies", "moments"), ("adapter",), ("length",))
"""Groups of strategies that change the result, the group that changes least first."""


def allowed_in_turn() -> list[tuple[str, ...]]:
    """Names for `memory.allow`: none, then more and more, the least change of learning first.

    Of the adapters the one on whole weights goes before the one on rounded weights.
    """
    turns: list[tuple[str, ...]] = [()]
    for groups in GIVEN_UP:
        names = [name for name in get_args(Changing) if STRATEGIES[name].axis in groups]
        steps = [(name,) for name in names] if groups == ("adapter",) else [tuple(names)]
        for step in steps:
            turns.append((*turns[-1], *step))
    return turns


ROUNDED = 64 * MIB
"""Bytes of other processes that are none: the rounding of a message's sizes."""

NEAR = 0.04
"""A card of the table whose memory is this near to the traceback's is taken to be it."""


@dataclass(frozen=True, slots=True)
class RescueQuestion:
    """The command's words."""

    config: str
    traceback: str = ""
    gpu: str | None = None
    budget: str | None = None
    num_gpus: int | None = None
    tool: str | None = None
    method: str | None = None
    max_length: int | None = None
    host_memory: str | None = None
    model: str | None = None
    trainer: int | None = None


@dataclass(frozen=True, slots=True)
class Rescue:
    """The answer."""

    name: str
    title: str
    """The tool, as people write it."""
    version: str
    """Version of the tool that its keys are known of."""
    method: str
    hardware: Hardware
    budget_bytes: int
    died: OomReport
    was: AsItWas | None
    """None for a recipe of memtrain."""
    held: PhasePeak | None
    """Owners at the moment of the death."""
    clues: tuple[str, ...]
    own: Way | None
    """The smallest change in the run's own tool; None where there is none."""
    plan: Resolved | None
    """The plan of memtrain; None where nothing fits."""
    allowed: tuple[str, ...]
    """Names that it needs in `memory.allow`."""
    facts: PlannerInputs | None
    recipe_text: str
    lost: tuple[str, ...]
    """Keys that are not carried over."""
    notes: tuple[str, ...]
    """Assumptions about the run as it was."""
    differences: tuple[str, ...] = ()
    """Notes on keys that mean something else in the recipe."""


def rescued(asked: RescueQuestion) -> Rescue:
    """The answer: the owners of the memory, and the changes that make the run fit.

    Raises: RecipeError for a configuration or a card that cannot be read; LaunchError for a model that is
    nowhere.
    """
    own = _own_recipe(asked)
    if own is not None:
        return _of_recipe(asked, own, _died(asked))
    foreign = read_foreign(asked.config, asked.tool, asked.method, asked.num_gpus, asked.trainer)
    return rescued_foreign(with_model(foreign, asked.model), asked)


def _died(asked: RescueQuestion) -> OomReport:
    return read_traceback(asked.traceback) if asked.traceback.strip() else NOTHING


def rescued_foreign(foreign: Foreign, asked: RescueQuestion) -> Rescue:
    """The same for a configuration that was read already.

    Raises: RecipeError, LaunchError.
    """
    died = _died(asked)
    imported = import_config(foreign, has_stand_ins=True)
    # verl says its devices in its own keys.
    foreign = replace(foreign, processes=int(str(imported.pins["cluster.processes"])))
    foreign, assumed = with_cards(foreign, asked.num_gpus, died)
    assumed += [unset_words(foreign.unset)] if foreign.unset else []
    foreign, missing = with_modules_that_are_there(foreign, imported.whole().model)
    assumed += missing
    wrote = imported.whole().model.dtype
    is_half = "float16" in (wrote, imported.pins.get("model.dtype"))
    is_open = imported.precision_is_open or is_half
    hardware, budget = devices(asked, died, foreign.processes, may_lack_bfloat16=is_open)
    pins: dict[str, object] = {}
    if not hardware.has_bfloat16 and wrote == "bfloat16":
        pins["model.dtype"] = "float16"
        assumed.append(f"{hardware.name} has no bfloat16: the run is planned in float16.")
    was = as_it_was(foreign, hardware, budget, asked.max_length, pins)
    assumed += was.notes
    if asked.max_length is None and was.recipe.online is None:
        longest = was.recipe.length.max_length
        assumed.append(f"Rows are assumed to have {longest:,} tokens, the maximum (--max-length changes it).")
    assumed = [*_doubts(was.facts), *assumed]
    way = None
    if was.need_bytes > budget or died.asked_bytes is not None:
        way = own_way(foreign, was, hardware, budget, asked.max_length, pins)
    text, recipe = _free_recipe(foreign, asked.max_length, pins)
    plan, allowed, facts = _planned(recipe, hardware, budget)
    assumed += [line for line in was.imported.notes if UNREAD_STAGE in line]
    listed = [line for line in was.imported.notes if line not in assumed]
    return Rescue(
        name=foreign.name,
        title=foreign.tool.title,
        version=foreign.tool.version,
        method=was.imported.method,
        hardware=hardware,
        budget_bytes=budget,
        died=died,
        was=was,
        held=died_in(was, died.moment),
        clues=tuple(clues(died, was, budget)),
        own=way,
        plan=plan,
        allowed=allowed,
        facts=facts,
        recipe_text="" if plan is None else _text(text, plan, recipe, allowed, was, asked.budget),
        lost=tuple(line for line in listed if not line.startswith("note: ")),
        notes=tuple(assumed),
        differences=tuple(line.removeprefix("note: ") for line in listed if line.startswith("note: ")),
    )


def _doubts(facts: PlannerInputs | None) -> tuple[str, ...]:
    """The remarks about an uncertain shape and about activations, where there are any."""
    if facts is None:
        return ()
    note, layers = facts.shape.note, activations_words(facts.shape)
    return tuple(one for one in (f"{note[:1].upper()}{note[1:]}." * bool(note), layers) if one)


def _own_recipe(asked: RescueQuestion) -> Recipe | None:
    """The recipe of memtrain that is asked for; None for a configuration of another tool."""
    path = Path(asked.config) if len(asked.config) < 4096 and "\n" not in asked.config else None
    if asked.tool is not None or path is None or path.suffix not in (".yaml", ".yml") or not path.is_file():
        return None
    if not is_recipe({str(key): value for key, value in dict(plain(read_mapping(path))).items()}):  # pyright: ignore[reportArgumentType,reportUnknownVariableType,reportCallIssue]
        return None
    return load_recipe(str(path)).recipe


def _of_recipe(asked: RescueQuestion, recipe: Recipe, died: OomReport) -> Rescue:
    """A run of memtrain's own: its plan as of now, and changes that fit."""
    processes = recipe.cluster.processes
    hardware, budget = devices(asked, died, asked.num_gpus or (processes if processes != "auto" else 1))
    recipe, notes = with_a_length(recipe, asked.max_length)
    plan, allowed, facts = _planned(recipe, hardware, budget)
    return Rescue(
        name=Path(asked.config).name,
        title="memtrain",
        version=__version__,
        method=recipe.method,
        hardware=hardware,
        budget_bytes=budget,
        died=died,
        was=None,
        held=None if plan is None else plan.plain.peak,
        clues=tuple(clues(died, None, budget)),
        own=None,
        plan=plan,
        allowed=allowed,
        facts=facts,
        recipe_text="",
        lost=(),
        notes=(*_doubts(facts), *notes),
    )


def devices(
    asked: RescueQuestion, died: OomReport, processes: int, *, may_lack_bfloat16: bool = False
) -> tuple[Hardware, int]:
    """(the cards, usable bytes of each): the named cards, or the traceback's.

    `may_lack_bfloat16`: the run computed in float16, or in what its card has.

    Raises: RecipeError where neither says them.
    """
    wanted = None if asked.budget is None else read_size(asked.budget, "--budget")
    size = died.capacity_bytes or wanted
    if asked.gpu is not None:
        hardware = Hardware.named(asked.gpu, processes)
    elif size is not None:
        hardware = _card_of(size, processes, may_lack_bfloat16=may_lack_bfloat16)
        if died.is_of_amd:
            hardware = replace(hardware, name="AMD's card", memory_bytes=size, free_bytes=size)
    else:
        raise RecipeError(
            "the card of the run is unknown",
            "--gpu",
            "add --gpu 4090 (or another), --budget 24GiB, or --traceback FILE",
        )
    if wanted is not None and hardware.memory_bytes < wanted <= hardware.sold_bytes:
        wanted = hardware.memory_bytes  # A card sold with so much keeps a part for its driver.
    if wanted is None:
        wanted = died.capacity_bytes or hardware.memory_bytes
        # Less is rounding: messages say two digits.
        wanted -= 0 if (died.others_bytes or 0) < ROUNDED else died.others_bytes or 0
    # A card that torch says more of than the table is a larger one of its name.
    memory = max(hardware.memory_bytes, wanted)
    host = hardware.host_bytes if asked.host_memory is None else read_size(asked.host_memory, "--host-memory")
    return replace(hardware, memory_bytes=memory, free_bytes=wanted, host_bytes=host), wanted


def _card_of(size: int, processes: int, *, may_lack_bfloat16: bool) -> Hardware:
    """The card of a size: the nearest of the table, or one like it that is as large."""
    cards = [Hardware.named(name, processes) for name in known_names()]
    cards = [card for card in cards if card.has_bfloat16 or may_lack_bfloat16]
    best = min(cards, key=lambda card: abs(card.memory_bytes - size))
    if abs(best.memory_bytes - size) > NEAR * size:
        return replace(best, name=f"a card like {best.name}", memory_bytes=size, free_bytes=size)
    return best


def _free_recipe(foreign: Foreign, max_length: int | None, pins: Mapping[str, object]) -> tuple[str, Recipe]:
    """The imported recipe with every choice of memory left to the planner."""
    imported = import_config(foreign, has_stand_ins=True, frees=True)
    text, recipe = imported.text, imported.whole()
    for key, value in pins.items():
        text, recipe = (
            recipe_with(text, {key: value}, "the card has no bfloat16"),
            with_key(recipe, key, value),
        )
    return text, with_a_length(recipe, max_length)[0]


def _planned(
    recipe: Recipe, hardware: Hardware, budget: int
) -> tuple[Resolved | None, tuple[str, ...], PlannerInputs | None]:
    """(the plan with the same result, else the least different; the strategies allowed in it)."""
    recipe = with_key(recipe, "memory.budget", budget)
    facts = facts_of(recipe, hardware)
    for number, (allowed, one) in enumerate(_wishes(recipe)):
        if number == 1 and not _is_reached(one, facts):
            break
        found = _fitting(one, facts)
        if found is not None:
            return found, allowed, found.case.facts
    return None, (), facts


def _fitting(recipe: Recipe, facts: PlannerInputs) -> Resolved | None:
    try:
        return resolved_if_it_fits(SourcedRecipe(recipe, lambda key: "default"), facts)
    except DoesNotFit:
        return None


def _is_reached(recipe: Recipe, facts: PlannerInputs) -> bool:
    """Whether anything fits: rows of one step of the search, with everything allowed that changes learning.

    Every other search is in vain where this one finds nothing, and there are dozens.
    """
    if facts.at_length is None:
        return True
    # Rows that short gain nothing from more processes.
    recipe = with_key(recipe, "cluster.context_parallel", 1)
    allowed = [name for name in allowed_in_turn()[-1] if name != "shorter_sequences"]
    least = with_key(recipe, "memory.allow", tuple(dict.fromkeys((*recipe.memory.allow, *allowed))))
    least = without_engine(with_key(least, "length.max_length", LENGTH_STEP))
    return _fitting(least, facts.at_length(LENGTH_STEP)) is not None


def _wishes(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Recipe]]:
    for allowed in allowed_in_turn():
        one = with_key(recipe, "memory.allow", tuple(dict.fromkeys((*recipe.memory.allow, *allowed))))
        yield allowed, one
        if allowed:
            continue
        is_one = recipe.cluster.processes == 1
        if not is_one and OPTIMIZERS[recipe.optim.kind].is_bitsandbytes:
            # States in shards are of AdamW alone: whole ones in place of rounded ones.
            one = with_key(one, "optim.kind", "adamw")
            yield allowed, one
        if recipe.online is None and not is_one:
            yield allowed, with_key(one, "cluster.context_parallel", "auto")
        elif (native := without_engine(one)) != one:
            yield allowed, native


def without_engine(recipe: Recipe) -> Recipe:
    """The same, with no vLLM that somebody asked for."""
    if recipe.online is None or recipe.generation.backend != "vllm":
        return recipe
    return with_key(with_key(recipe, "generate.backend", "auto"), "generate.vllm", None)


def _text(
    text: str, plan: Resolved, recipe: Recipe, allowed: tuple[str, ...], was: AsItWas, budget: str | None
) -> str:
    """The recipe that fits, with its allowed strategies, and the lengths and budget that it was planned
    for."""
    keys: dict[str, object] = {} if budget is None else {"memory.budget": budget}
    if recipe.online is not None and plan.case.recipe.generation.backend != recipe.generation.backend:
        keys["generate.backend"] = plan.case.recipe.generation.backend
    if plan.case.recipe.optim.kind != recipe.optim.kind:
        keys["optim.kind"] = plan.case.recipe.optim.kind
    used = [name for name in allowed if name in _changes(plan)]
    if used:
        keys["memory.allow"] = used
    if plan.settings.context_parallel > 1:
        keys["cluster.context_parallel"] = plan.settings.context_parallel
    if (
        plan.settings.max_length != recipe.length.max_length
        or recipe.length.max_length != was.recipe.length.max_length
    ):
        keys["length.max_length"] = plan.settings.max_length
    if not keys:
        return text
    return recipe_with(text, keys)


def recipe_with(text: str, keys: dict[str, object], why: str = "makes it fit") -> str:
    """The text of a recipe with some keys more, each under its section, in place of a present key."""
    lines = text.splitlines()
    for key, value in keys.items():
        section, _, name = key.partition(".")
        shown = f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        line = f"  {name}: {shown}  # {why}"
        if f"{section}:" not in lines:
            lines += ["", f"{section}:", line]
            continue
        start = lines.index(f"{section}:") + 1
        end = next((at for at in range(start, len(lines)) if lines[at][:1].strip()), len(lines))
        kept = [one for one in lines[start:end] if not one.startswith(f"  {name}:")]
        lines[start:end] = [line, *kept]
    return "\n".join(lines) + "\n"


def _changes(plan: Resolved) -> set[str]:
    """Strategies of a plan that change the result."""
    return {one.name for one in STRATEGIES.values() if not one.is_exact and one.is_used(plan.settings)} | {
        "shorter_sequences"
    }
