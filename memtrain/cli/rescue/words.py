"""The words of `memtrain rescue`: on a terminal, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from memtrain.cli.output.terminal import print_table, print_text
from memtrain.cli.plan.tables import seconds, settings_words
from memtrain.cli.rescue.find import Rescue
from memtrain.cli.rescue.own_tool import Way
from memtrain.memory.estimate.host_phases import STEPS
from memtrain.memory.estimate.pricing import Priced, fits_host, phases_on_host
from memtrain.memory.estimate.static import slack_share
from memtrain.memory.plan.plan import PhasePeak
from memtrain.memory.plan.units import gib
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.trl.writing import inline

DIFFERENT = "What else differs in the recipe:"
SAME = "The result of training stays the same, up to rounding."


def verdict(found: Rescue) -> str:
    """The need of the run beside the memory that there is."""
    cards, _, _ = found.hardware.words().rpartition(", ")
    place = f"the {gib(found.budget_bytes)} of {cards}" + " each" * (found.hardware.num_devices > 1)
    if found.was is None:
        return f"{found.name}, {found.method}, on {place}."
    need = found.was.need_bytes
    holds = f"does not fit {place}" if need > found.budget_bytes else f"fits {place} by arithmetic"
    return f"{found.name}, {found.title}'s {found.method}: it needs {gib(need)} as it was, and {holds}."


def held_words(held: PhasePeak) -> str:
    """The heading of the owners."""
    return (
        f"What held the memory, in the {held.phase} ({gib(held.num_bytes)} of live tensors on each device):"
    )


def rest_words(found: Rescue) -> str:
    """The part of the run's need that no tensor has."""
    if found.was is None:
        return ""
    priced = found.was.priced
    rest, slack = priced.need_bytes - priced.prediction.peak.num_bytes, slack_share(priced.settings)
    return (
        f"Its need counts {gib(rest)} more at its peak: the CUDA context, {slack:.0%} of the tensors for "
        "what the allocator cannot fill, and a margin."
    )


def key_lines(way: Way) -> list[str]:
    """The keys to change in the run's own tool, as its files write them."""
    lines = [f"{key}: {inline(value)}{_accelerates(key, value)}" for key, value in way.keys.items()]
    return [*lines, *(f"export {one}" for one in way.environment)]


_ACCELERATES = {
    "zero2": "distributed_type: DEEPSPEED, zero_stage: 2",
    "zero3": "distributed_type: DEEPSPEED, zero_stage: 3",
    "zero3_offload": "zero_stage: 3, offload_optimizer_device: cpu, offload_param_device: cpu",
    "fsdp2": "distributed_type: FSDP, fsdp_version: 2",
}
"""Lines of accelerate's file by the engine's name, which only the command of TRL knows."""


def _accelerates(key: str, value: object) -> str:
    told = _ACCELERATES.get(str(value)) if key == "accelerate_config" else None
    return "" if told is None else f"  # in accelerate's file {told}"


def way_words(way: Way, found: Rescue) -> str:
    """The need of the changed run, its time, and the difference in learning."""
    needs = f"It then needs {gib(way.need_bytes)} of {gib(found.budget_bytes)}"
    return f"{needs}, {time_words(way.priced, found)}. {learns_words(way.learns)}"


def learns_words(learns: tuple[str, ...]) -> str:
    """The difference in learning, in a sentence."""
    return SAME if not learns else f"The result of training changes: {'; '.join(learns)}."


def time_words(priced: Priced, found: Rescue) -> str:
    """A step's time beside that of the run as it was, both predicted."""
    writes = found.plan is not None and found.plan.case.recipe.writes_completions
    text = f"{seconds(priced.step_s)} {'an update, completions not counted' if writes else 'a step'}"
    if found.was is None:
        return text
    return f"{text}, {speed_words(priced.step_s / found.was.priced.step_s)} the original run (predicted)"


def speed_words(share: float) -> str:
    """A step's time as a share of another's: `3.9 times as slow as`, `20% faster than`."""
    if share >= 2:
        return f"{share:.1f} times as slow as"
    if share <= 0.5:
        return f"{1 / share:.1f} times as fast as"
    way = "slower" if share > 1 else "faster"
    return "as fast as" if abs(share - 1) < 0.02 else f"{abs(share - 1):.0%} {way} than"


def plan_learns(found: Rescue) -> tuple[str, ...]:
    """Differences in learning of memtrain's plan: strategies that are not exact, and shorter rows."""
    if found.plan is None:
        return ()
    settings, recipe = found.plan.settings, found.plan.case.recipe
    before = None if found.was is None else found.was.priced.settings
    named = [
        one
        for one in STRATEGIES.values()
        if not one.is_exact
        and one.name in found.allowed
        and one.is_used(settings)
        and (before is None or not one.is_used(before))
    ]
    changes = [f"{one.name} ({one.summary})" for one in named]
    asked = found.was.recipe.length.max_length if found.was is not None else recipe.length.max_length
    if settings.max_length is not None and asked is not None and settings.max_length < asked:
        changes.append(f"rows are cut at {settings.max_length:,} tokens instead of {asked:,}")
    return tuple(changes)


def host_words(found: Rescue) -> str:
    """The host's memory that the plan leans on."""
    if found.plan is None or found.facts is None:
        return ""
    waiting = phases_on_host(found.plan.chosen, found.plan.case.facts)[STEPS]
    leaning = {name: size for name, size in waiting.items() if name not in ("processes", "dataset index")}
    if not leaning:
        return ""
    largest = ", ".join(f"{name} {gib(size)}" for name, size in leaning.items())
    return f"In host memory meanwhile: {largest}."


def headroom_words(found: Rescue) -> str:
    """The plan that leaves room on the card, where the chosen one does not."""
    if found.plan is None:
        return ""
    shares = [
        one
        for one in found.plan.decisions
        if one.setting == "headroom" and one.reason.startswith("not kept free")
    ]
    if not shares:
        return ""
    return f"A headroom of {shares[0].value} is {shares[0].reason} (memory.budget asks for it)."


def sentences(found: Rescue) -> tuple[str, ...]:
    """The verdict, clues and notes; first that nothing can be started, where that is so."""
    starts_none = found.facts is not None and found.facts.shape.starts_no_run
    first, notes = (found.notes[:1], found.notes[1:]) if starts_none else ((), found.notes)
    return (*first, verdict(found), *found.clues, *notes)


def print_rescue(found: Rescue, output: Path | None) -> None:
    """The answer on the terminal."""
    for line in sentences(found):
        print_text(line)
    if found.held is not None:
        typer.echo()
        print_text(held_words(found.held))
        rows = [(one.owner, gib(one.num_bytes)) for one in found.held.owners]
        print_table(("owner", "bytes"), rows)
        print_text(rest_words(found))
    if found.title != "memtrain":
        _print_own(found)
    _print_plan(found, output)
    for heading, lines in (("Not carried over into the recipe:", found.lost), (DIFFERENT, found.differences)):
        if lines:
            typer.echo()
            print_text(heading)
            for line in lines:
                print_text(f"- {line}")


def no_change_words(found: Rescue) -> str:
    """Reason why no key of the run's own tool changes; nothing for a recipe of memtrain."""
    if found.was is None:
        return ""
    if found.was.need_bytes > found.budget_bytes:
        return f"No change of keys in {found.title} that memtrain knows makes it fit."
    if not fits_host(found.was.priced, found.was.facts):
        return f"No change of keys in {found.title} that memtrain knows makes it fit the host's memory."
    place = " for the card" if found.died.on_host else ""
    return f"By arithmetic nothing has to change in {found.title}{place}."


def _print_own(found: Rescue) -> None:
    typer.echo()
    if found.own is None:
        print_text(no_change_words(found))
        return
    print_text(f"The smallest change in {found.title} (keys of {found.version}):")
    for line in key_lines(found.own):
        typer.echo(f"  {line}")
    print_text(way_words(found.own, found))


def _print_plan(found: Rescue, output: Path | None) -> None:
    typer.echo()
    if found.plan is None:
        print_text(
            "memtrain has no plan that fits either, even if the result of training may change: the cards and "
            f"the host's memory ({gib(found.hardware.host_bytes)}; --host-memory sets another) are too small "
            "together. memtrain plan --solve num_gpus says how many cards are enough."
        )
        return
    plan = found.plan
    need = plan.chosen.need_bytes
    print_text(
        f"As a memtrain recipe: {settings_words(plan.settings)}. Needs {gib(need)} of "
        f"{gib(found.budget_bytes)}, {time_words(plan.chosen, found)}."
    )
    print_text(learns_words(plan_learns(found)))
    for words in (headroom_words(found), host_words(found)):
        if words:
            print_text(words)
    if output is not None:
        checks = "checks the peak on the run's own step"
        print_text(f"Next: memtrain check {output}; memtrain plan {output} --trace {checks}.")
    elif found.recipe_text:
        print_text(
            "-o my.yaml writes it. memtrain plan my.yaml --trace checks the peak on the run's own step."
        )


def as_json(found: Rescue) -> dict[str, Any]:
    """The answer as JSON values."""
    plan, own, was = found.plan, found.own, found.was
    return {
        "run": found.name,
        "tool": found.title,
        "tool_version": found.version,
        "method": found.method,
        "device": found.hardware.words(),
        "budget_bytes": found.budget_bytes,
        "traceback": {name: getattr(found.died, name) for name in found.died.__dataclass_fields__},
        "as_it_was": None
        if was is None
        else {
            "need_bytes": was.need_bytes,
            "step_s": was.priced.step_s,
            "settings": was.priced.settings.model_dump(mode="json"),
            "prediction": was.priced.prediction.model_dump(mode="json"),
        },
        "held": None if found.held is None else found.held.model_dump(mode="json"),
        "clues": list(found.clues),
        "own_tool": None
        if own is None
        else {
            "keys": own.keys,
            "environment": list(own.environment),
            "need_bytes": own.need_bytes,
            "step_s": own.priced.step_s,
            "learns_differently": list(own.learns),
        },
        "memtrain": None
        if plan is None
        else {
            "need_bytes": plan.chosen.need_bytes,
            "step_s": plan.chosen.step_s,
            "settings": plan.settings.model_dump(mode="json"),
            "learns_differently": list(plan_learns(found)),
            "recipe": found.recipe_text,
        },
        "not_carried_over": list(found.lost),
        "notes": list(found.notes),
        "differences": list(found.differences),
    }
