"""`memtrain plan`: settings and memory of a run before anything is started, for this machine or another."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import HostMemory, OverridesArgument, complete_recipe
from memtrain.errors import RecipeError

if TYPE_CHECKING:
    from memtrain.cli.plan.answer import Answer, Question
    from memtrain.recipes.reading.load import LoadedRecipe
    from memtrain.trainers.tools.trace.client import Traced

GC_THRESHOLD = 100_000
"""New objects after which the collector looks for cycles (700 of itself): a tenth of a plan's time."""

Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="Plan for this GPU (h100, a100-40, l4, 4090, ...) instead of this machine."),
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="Memory limit of one device, such as 24GiB."),
]
NumGpus = Annotated[int | None, typer.Option("--num-gpus", min=1, help="Number of cards to plan for.")]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Also show why other strategies were left out, the best plan of each "
        "size, and the lines that pin the plan.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="Check the peak by tracing a step of the run, on tensors without data."),
]
WithoutData = Annotated[
    bool,
    typer.Option("--without-data", help="Do not read the data: plan for sequences of full length."),
]
Solve = Annotated[
    str | None,
    typer.Option(
        "--solve",
        metavar="WHAT",
        help="Find the largest max_length or micro_batch, or the smallest budget or num_gpus, that fits.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and nothing else.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the plan as an HTML page.", show_default=False),
]


RecipeOrModel = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|MODEL|DATASET",
        help="A recipe file, the name of a shipped recipe, or a model (a folder or a hub id); with --model a "
        "dataset (file, folder, hub id).",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model that DATASET would be trained on, or in place of the recipe's: a folder or a hub id.",
        show_default=False,
    ),
]


def plan(
    recipe: RecipeOrModel,
    overrides: OverridesArgument = None,
    model: ModelOption = None,
    gpu: Gpu = None,
    budget: Budget = None,
    num_gpus: NumGpus = None,
    host_memory: HostMemory = None,
    explain: Explain = False,
    trace: Trace = False,
    without_data: WithoutData = False,
    solve: Solve = None,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Show what a run will do and need: the fastest plan that fits, what each choice buys, and why.

    Nothing is started, and no GPU is needed. The numbers come from arithmetic; --trace checks them on the
    run's own step. Of a model: a table of LoRA, QLoRA and full fine-tuning on common cards. Of a dataset with
    --model: the run that `memtrain sft DATASET --model MODEL` would start (dpo of pairs, kto of verdicts).
    """
    # A plan makes many small objects and few cycles: the collector would look through all of them often.
    gc.set_threshold(GC_THRESHOLD)
    from memtrain.cli.plan.model_table import is_model

    if model is None and is_model(recipe):
        _refuse_for_a_model(gpu, budget, num_gpus, solve, html, is_asked=explain or trace)
        _print_model(recipe, overrides or [], as_json=as_json)
        return
    from memtrain.cli.launch.summary import reading_progress
    from memtrain.cli.plan.answer import answer, facts_of_question, trace_answer
    from memtrain.cli.plan.answer import as_json as json_of

    loaded, sentence = _loaded(recipe, [*(overrides or ()), *_budget_word(budget)], model)
    question = _question(loaded, gpu, num_gpus, budget, host_memory)
    with reading_progress() as progress:
        facts, note = facts_of_question(question, reads_data=not without_data, progress=progress)
    if solve is not None:
        from memtrain.cli.plan.solve import solution

        solved = solution(solve, question, facts)
        typer.echo(json.dumps(solved.as_json(), indent=1) if as_json else solved.text())
        return
    made = answer(question, facts, note)
    traced, why_not = trace_answer(made, is_whole=explain or None) if trace else (None, "")
    if html is not None:
        from memtrain.cli.output.terminal import write_text
        from memtrain.cli.plan.html import page

        write_text(page(made, traced), html, confirm_on_stderr=as_json)
    if as_json:
        typer.echo(json.dumps(json_of(made, traced, why_not), indent=1))
    if as_json or html is not None:
        return
    _print_plan(made, traced, why_not, sentence, explain=explain, trace=trace)


def _budget_word(budget: str | None) -> list[str]:
    """`--budget` as a word of the recipe, where it can be read."""
    from memtrain.memory.plan.units import read_size

    if budget is None:
        return []
    num_bytes = read_size(budget, "--budget")  # A fault of it is one of the option, not of the key.
    return [f"memory.budget={num_bytes if budget.strip()[-1].isdigit() else budget}"]


def _question(
    loaded: LoadedRecipe, gpu: str | None, num_gpus: int | None, budget: str | None, host_memory: str | None
) -> Question:
    """The recipe, its model and the devices; faults stand at their lines."""
    from memtrain.cli.plan.answer import ask
    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.memory.plan.units import read_size

    num_bytes = None if budget is None else read_size(budget, "--budget")
    host_bytes = None if host_memory is None else read_size(host_memory, "--host-memory")
    with at_their_lines(loaded):
        return ask(loaded, gpu, num_gpus, num_bytes, host_bytes)


def _loaded(recipe: str, words: list[str], model: str | None) -> tuple[LoadedRecipe, str]:
    """The recipe that is asked about, its model that of `--model`; of a dataset, the sentence about it."""
    from memtrain.cli.plan.dataset_alone import is_recipe, recipe_to_plan
    from memtrain.cli.plan.recipe_of_dataset import model_word
    from memtrain.recipes.reading.load import load_recipe

    if model is None:
        return load_recipe(recipe, words), ""
    if is_recipe(recipe):
        return load_recipe(recipe, [model_word(model), *words]), ""
    loaded, sentence = recipe_to_plan(recipe, model, words)
    return loaded, sentence


def _print_plan(
    made: Answer, traced: Traced | None, why_not: str, sentence: str, *, explain: bool, trace: bool
) -> None:
    from memtrain.cli.output.terminal import print_text
    from memtrain.cli.plan.tables import print_answer, print_traced

    if sentence:
        print_text(sentence)
    print_answer(made, explain=explain)
    if trace:
        print_traced(made, traced, why_not, explain=explain)


def _refuse_for_a_model(*options: object, is_asked: bool) -> None:
    """Raise RecipeError where an option of one plan is given for the table of a model."""
    if is_asked or any(option is not None for option in options):
        raise RecipeError(
            "a model is planned for common cards: --gpu, --budget, --num-gpus, --solve, --html, --explain "
            "and --trace are for recipes",
            "the command line",
            "remove them, or write a recipe: `memtrain init sft -o my.yaml`",
        )


def _print_model(model: str, overrides: list[str], *, as_json: bool) -> None:
    from memtrain.cli.output.terminal import print_table, print_text, whole
    from memtrain.cli.plan.model_table import LENGTH, rows_of, table_of
    from memtrain.cli.plan.model_table import as_json as json_of

    cells = table_of(model, overrides)
    if as_json:
        typer.echo(json.dumps(json_of(cells), indent=1))
        return
    notes = [note for cell in cells if cell.answer is not None for note in cell.answer.notes]
    print_text(
        f"{whole(model)}: supervised fine-tuning, rows of {LENGTH:,} tokens (length.max_length=N changes it)."
    )
    for note in dict.fromkeys(one for one in notes if not one.startswith("The data was not read")):
        print_text(note)
    typer.echo()
    print_table(("way", "card", "needs", "tokens/s", "how"), rows_of(cells))
    typer.echo()
    print_text(
        "The fastest plan that fits each card, margin included; speeds are computed, not measured. A dataset "
        f"and a model make a run: memtrain sft DATASET --model {whole(model)} (LoRA: model.adapter={{}})."
    )
