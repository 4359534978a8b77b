"""`memtrain plan`: what a run will do and need, before anything is started, for this machine or another."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument
from memtrain.cli.printing import print_table, say

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="Plan for this card (h100, a100-40, l4, 4090, ...), not for this machine."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Memory of one device that may be used, such as 24GiB."),
]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", min=1, help="Plan for so many cards.")]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Trace every layer too: owners by phase, the allocator, the plain run."),
]
Quick = Annotated[bool, typer.Option("--quick", help="The arithmetic alone; nothing is traced.")]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")]


def plan(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    gpu: Gpu = None,
    budget: Budget = None,
    num_gpus: NumGpus = None,
    explain: Explain = False,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Show what a run will do and need: every setting with its reason, and the peak of every phase.

    Nothing is started, and no GPU is needed. The peak comes from arithmetic, then from a trace of the run's
    own step on tensors without data.
    """
    from memtrain.cli.planning import make_plan
    from memtrain.cli.showing import print_plan, reading_progress
    from memtrain.memory.explain import owner_table, verdict
    from memtrain.memory.units import read_size
    from memtrain.recipes.load import load_recipe

    words = list(overrides or [])
    num_bytes = None if budget is None else read_size(budget, "--budget")
    if num_bytes is not None:
        words.append(f"memory.budget={num_bytes}B")
    loaded = load_recipe(recipe, words)
    hardware = _hardware(gpu, num_gpus, num_bytes, loaded.recipe.cluster.device)
    with reading_progress() as progress:
        planned = make_plan(loaded, hardware=hardware, progress=progress)
    made = planned.plan
    if as_json:
        traced, why_not = (None, "--quick") if quick else _trace(planned, is_whole=explain)
        typer.echo(json.dumps(_as_json(made, hardware, traced, why_not), indent=1))
        return
    print_plan(planned)
    say(f"On {hardware.words()}. {verdict(made.settings, made.prediction)}")
    typer.echo()
    print_table(*owner_table(made.prediction, made.plain))
    if quick:
        return
    typer.echo()
    traced, why_not = _trace(planned, is_whole=explain)
    _print_traced(made, traced, why_not, explain=explain)


def _hardware(gpu: str | None, num_gpus: int | None, budget: int | None, device: Any) -> Any:
    from memtrain.cli.pricing import card_of
    from memtrain.memory.hardware import Hardware, detect

    if gpu is not None:
        return Hardware.named(gpu, num_gpus or 1)
    found = detect(device)
    if found.device == "cpu" and device == "auto" and (budget is not None or num_gpus is not None):
        found = card_of(budget or 80 * 2**30)
    return found if num_gpus is None else found.with_devices(num_gpus)


def _trace(planned: Any, *, is_whole: bool) -> tuple[Any, str | None]:
    """(what the trace found, None), or (None, why there is none)."""
    from memtrain.cli.planning import model_config
    from memtrain.errors import LaunchError
    from memtrain.memory.activations import HeaviestBatch
    from memtrain.memory.traced import can_trace, job_of, traced

    made, profile = planned.plan, planned.profile
    why_not = can_trace(made.recipe, made.settings)
    if why_not is not None:
        return None, why_not
    rows, tokens = profile.heaviest(made.settings.micro_rows, made.settings.micro_tokens)
    batch = HeaviestBatch(rows, tokens, tokens, profile.longest[0] if profile.longest else 1)
    config = model_config(made.recipe.model)
    job = job_of(made.recipe, made.settings, config, batch, accumulates=True, is_whole=is_whole)
    try:
        return traced(job), None
    except LaunchError as error:
        return None, error.faults[0].what


def _print_traced(made: Any, traced: Any, why_not: str | None, *, explain: bool) -> None:
    from memtrain.memory.explain import difference, owner_table, verdict
    from memtrain.memory.units import gib

    if traced is None:
        say(f"The arithmetic stands alone: {why_not}.")
        return
    found = traced.prediction.model_copy(update={"budget_bytes": made.prediction.budget_bytes})
    say(f"Checked on the run's own step: {difference(made.prediction, found)} ({traced.seconds:.1f} s).")
    if not explain:
        return
    typer.echo()
    print_table(*owner_table(found, made.plain))
    typer.echo()
    say(verdict(made.settings, found))
    if traced.reserved_bytes is not None:
        peak = found.peak.num_bytes
        say(
            f"Replayed through the model of CUDA's caching allocator: {gib(traced.reserved_bytes)} reserved "
            f"({traced.reserved_bytes / peak - 1:+.1%})."
        )


def _as_json(made: Any, hardware: Any, traced: Any, why_not: str | None) -> dict[str, Any]:
    from memtrain.memory.budget import needed

    return {
        "plan": json.loads(made.model_dump_json()),
        "device": {
            "name": hardware.name,
            "memory_bytes": hardware.memory_bytes,
            "count": hardware.num_devices,
        },
        "needed_bytes": needed(made.prediction.peak.num_bytes, made.settings),
        "traced": None if traced is None else json.loads(traced.model_dump_json()),
        "not_traced": why_not,
    }
