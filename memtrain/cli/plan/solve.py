"""`memtrain plan --solve`: the plan the other way round, the longest or the smallest that fits."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from memtrain.cli.output.terminal import columns
from memtrain.cli.plan.answer import Question
from memtrain.cli.plan.tables import settings_words
from memtrain.errors import DoesNotFit, RecipeError, printable
from memtrain.memory.estimate.host_memory import host_shortage
from memtrain.memory.estimate.pricing import PlannerInputs, Priced, budget_of, host_need
from memtrain.memory.hardware.devices import Hardware, known_names
from memtrain.memory.model_shape.config_names import canonical
from memtrain.memory.model_shape.rope_scaling import suggested
from memtrain.memory.plan.units import count_of, gib
from memtrain.memory.planner.loss_tile import with_small_tiles
from memtrain.memory.planner.resolve import (
    LENGTH_STEP,
    Resolved,
    longest_that_fits,
    open_space,
    resolve,
    resolved_if_it_fits,
)
from memtrain.memory.planner.search import price_all, with_room_on_host
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key
from memtrain.recipes.recipe import Recipe

MOST_LENGTH = 2**23
"""Longest sequence that is tried for a model without a table of positions. Taste."""

SIZE_STEP = 128 * 2**20
"""Devices that differ by less are taken to be as large."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer to one question."""

    what: str
    value: int | str | None
    """None: nothing fits, whatever the value."""
    words: tuple[str, ...]
    keys: Mapping[str, object] = field(default_factory=dict[str, object])
    """The recipe's keys that say it."""

    def text(self) -> str:
        """The printed form."""
        lines = [line for words in self.words for line in textwrap.wrap(words, columns())]
        return "\n".join([*map(printable, lines), *(f"  {key}: {value}" for key, value in self.keys.items())])

    def as_json(self) -> dict[str, Any]:
        """JSON values of the answer."""
        return {"solved": self.what, "value": self.value, "words": list(self.words), "keys": dict(self.keys)}


def solution(what: str, question: Question, facts: PlannerInputs) -> Solution:
    """The answer for `max_length`, `micro_batch`, `budget` or `num_gpus`.

    Raises: RecipeError for anything else, and with what cannot be planned at all; DoesNotFit where nothing
    fits whatever the answer is.
    """
    if what not in SOLVERS:
        raise RecipeError(f"'{what}' cannot be solved for", "--solve", f"give one of {', '.join(SOLVERS)}")
    return SOLVERS[what](question, facts)


def _max_length(question: Question, facts: PlannerInputs) -> Solution:
    asked, recipe = question.asked, question.asked.recipe
    table = facts.shape.num_positions
    most = table or MOST_LENGTH
    found = longest_that_fits(asked, facts, most)
    if found is None:
        resolve(_at_length(asked, LENGTH_STEP), _laid_out(facts, LENGTH_STEP))
        raise AssertionError("The shortest length fits, and no length was found.")
    length = found.settings.max_length or 0
    words = [f"The longest max_length that fits {_place(question)} is {length:,} tokens{_how(found)}."]
    if table is not None and length + LENGTH_STEP > table:
        words.append(f"The model has a table of {table:,} positions, and no more.")
    words += _beyond_training(question, length)
    if recipe.length.max_length is not None and length < recipe.length.max_length:
        words.append(f"The recipe asks for {recipe.length.max_length:,}, which does not fit.")
    if not facts.is_guessed:
        words.append("The longest row of the data bounds the search: a larger max_length changes nothing.")
    return Solution("max_length", length, tuple(words), {"length.max_length": length})


def _beyond_training(question: Question, length: int) -> list[str]:
    """Remark about rows that are longer than those the model was trained on."""
    trained = canonical(question.looked.config).get("max_position_embeddings")
    if not isinstance(trained, int) or length <= trained:
        return []
    words = suggested(question.looked.config, length)
    how = f"model.rope_scaling: {words}" if words else "a scaling in its config.json"
    return [
        f"The model was trained with rows of up to {trained:,} tokens (max_position_embeddings); longer "
        f"rows need scaled positions: {how}."
    ]


def _micro_batch(question: Question, facts: PlannerInputs) -> Solution:
    asked = question.asked
    _, _, choices = open_space(_with_open_micro_batch(asked), facts)
    flat = choices.groups[0][0].padding_free
    longest = facts.rows_of(choices.groups[0][0]).longest[0]
    replicas = choices.groups[0][0].num_replicas
    rows = choices.groups[0][0].batch_size or 0
    most = max(1, -(-rows // replicas)) if rows else MOST_LENGTH // longest
    key = "train.micro_tokens" if flat else "train.micro_batch_size"
    # A step of one micro-batch keeps no float32 sums: the whole batch may fit where half of it does not.
    low, high, best, middle = 0, most, None, most
    while low < high:
        recipe = with_key(_with_open_micro_batch(asked).recipe, key, middle * longest if flat else middle)
        try:
            best = resolved_if_it_fits(SourcedRecipe(recipe, asked.where), facts)
            low = middle
        except DoesNotFit:
            high = middle - 1
        middle = (low + high + 1) // 2
    if best is None:
        resolve(asked, facts)
        raise AssertionError("The recipe fits, and no micro-batch was found.")
    value = low * longest if flat else low
    unit = (
        f"{value:,} tokens ({count_of(low, 'sequence')} of {longest:,})" if flat else count_of(value, "row")
    )
    words = [f"The largest micro-batch that fits {_place(question)} is {unit}{_how(best)}."]
    if low == most:
        words.append("It is the whole step of one device.")
    return Solution("micro_batch", value, tuple(words), {key: value})


def _budget(question: Question, facts: PlannerInputs) -> Solution:
    _, case, choices = open_space(question.asked, facts)
    exact = (*choices.exact, *choices.stepping, *choices.waiting)
    priced = price_all(exact or choices.groups[0], case.facts)
    roomy = with_room_on_host(priced, case.facts)
    if not roomy:
        least = min(priced, key=lambda one: sum(host_need(one, case.facts).values()))
        shortage = host_shortage(host_need(least, case.facts), case.facts.hardware)
        assert shortage is not None, "No plan has room on the host, and the least of them fits it."
        raise shortage
    roomy += with_small_tiles(roomy, case.facts, 0, case.recipe)
    smallest = min(roomy, key=lambda one: (one.need_bytes // SIZE_STEP, one.token_s))
    size = gib(smallest.need_bytes)
    words = [
        f"The smallest device that this recipe fits, as it is, has {size}{_plan(smallest, case.recipe)}."
    ]
    cards = sorted((Hardware.named(name) for name in known_names()), key=lambda card: card.memory_bytes)
    card = next((one for one in cards if one.has_bfloat16 and one.memory_bytes >= smallest.need_bytes), None)
    if facts.hardware.device == "cuda":
        words.append(
            f"The smallest known card with as much: {card.name}, {gib(card.memory_bytes)}."
            if card is not None
            else "No known card has as much."
        )
    rounded = ceil(smallest.need_bytes / 2**30 * 100) / 100
    return Solution("budget", smallest.need_bytes, tuple(words), {"memory.budget": f"{rounded:.2f}GiB"})


def _num_gpus(question: Question, facts: PlannerInputs) -> Solution:
    if facts.hardware.device != "cuda":
        raise RecipeError(
            "--solve num_gpus counts GPUs, but the plan is for a CPU", "--solve", "add --gpu h100"
        )
    name = question.hardware.name
    for count in GPU_COUNTS:
        try:
            machine = _so_many(facts.hardware, count)
            found = resolved_if_it_fits(question.asked, replace(facts, hardware=machine))
        except DoesNotFit:
            continue
        if count == 1:
            more = "More GPUs would share the rows of a step, and weights and states where that is faster."
            return Solution("num_gpus", 1, (f"One {name} is enough{_how(found)}.", more))
        engine = found.settings.engine
        held = f"They share weights, gradients and moments ({engine})." if engine != "ddp" else ""
        return Solution(
            "num_gpus", count, (f"{count} {name} are enough, and fewer are not{_how(found)}.", held)
        )
    resolve(question.asked, replace(facts, hardware=_so_many(facts.hardware, 1)))
    raise AssertionError("One GPU is enough, and was not found.")


GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that are tried: nodes come in powers of two."""

SOLVERS: dict[str, Callable[[Question, PlannerInputs], Solution]] = {
    "max_length": _max_length,
    "micro_batch": _micro_batch,
    "budget": _budget,
    "num_gpus": _num_gpus,
}
"""Quantities that can be solved for, each with its solver."""


def _place(question: Question) -> str:
    budget = budget_of(question.asked.recipe, question.hardware)
    return f"{gib(budget)} of {question.hardware.name}"


def _how(found: Resolved) -> str:
    return _plan(found.chosen, found.case.recipe)


def _plan(priced: Priced, recipe: Recipe) -> str:
    part = " in the update, completions not counted" if recipe.writes_completions else ""
    return f": {settings_words(priced.settings)}, {1 / priced.token_s:,.0f} tokens/s a device{part}"


def _so_many(hardware: Hardware, count: int) -> Hardware:
    """The node with so many devices; a node known by name only has the usual host memory."""
    if hardware.name.lower() in known_names():
        named = Hardware.named(hardware.name, hardware.num_devices)
        if hardware == named:
            return Hardware.named(hardware.name, count)
    return hardware.with_devices(count)


def _at_length(asked: SourcedRecipe, length: int) -> SourcedRecipe:
    return SourcedRecipe(with_key(asked.recipe, "length.max_length", length), asked.where)


def _laid_out(facts: PlannerInputs, length: int) -> PlannerInputs:
    assert facts.at_length is not None, "Facts of a question can be laid out again."
    return facts.at_length(length)


def _with_open_micro_batch(asked: SourcedRecipe) -> SourcedRecipe:
    recipe = with_key(with_key(asked.recipe, "train.micro_batch_size", "auto"), "train.micro_tokens", "auto")
    return SourcedRecipe(recipe, asked.where)
