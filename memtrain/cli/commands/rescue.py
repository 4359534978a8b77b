"""`memtrain rescue`: a run out of memory, the owners of its memory, and the smallest change that fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.arguments import HostMemory

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The run that failed: a recipe, or another trainer's configuration, script or command line.",
    ),
]
Traceback = Annotated[
    str | None,
    typer.Option(
        "--traceback", "-b", metavar="FILE", help="File with what it printed when it failed; - reads stdin."
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option("--gpu", help="The GPU it ran on (a100-40, 4090, ...). Default: read from the traceback."),
]
Budget = Annotated[str | None, typer.Option("--budget", help="Memory limit of one device, such as 24GiB.")]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--num-gpus", "--processes", min=1, help="Number of GPUs it ran on, if the file does not say it."
    ),
]
Tool = Annotated[
    str | None,
    typer.Option("--tool", "-t", help="trl, axolotl, llamafactory, unsloth or verl; else it is guessed."),
]
Method = Annotated[
    str | None,
    typer.Option("--method", "-m", help="Method, if the file does not say it: sft, dpo, ..."),
]
MaxLength = Annotated[
    int | None,
    typer.Option("--max-length", min=1, help="Longest row in tokens, if the configuration does not say it."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model to plan in place of the configuration's, whose folder is on another machine."
    ),
]
Trainer = Annotated[
    int | None,
    typer.Option("--trainer", min=1, help="Which trainer of a script that trains more than once: 1, 2, ..."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the recipe that fits.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, and nothing else.")]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the answer as an HTML page.", show_default=False),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a recipe that exists.")]


def rescue(
    config: Config,
    traceback: Traceback = None,
    gpu: Gpu = None,
    budget: Budget = None,
    host_memory: HostMemory = None,
    num_gpus: NumGpus = None,
    tool: Tool = None,
    method: Method = None,
    max_length: MaxLength = None,
    model: ModelName = None,
    trainer: Trainer = None,
    output: Output = None,
    as_json: Json = False,
    html: Html = None,
    force: Force = False,
) -> None:
    """Show what held the memory when a run failed, and the smallest change that makes it fit on the same GPU.

    The change is shown first as keys of the run's own tool, then as a memtrain recipe with its prediction,
    its cost in time, and any change to the result. No data is read: rows are assumed to have the maximum
    length. Nothing is started, and no GPU is needed.
    """
    from memtrain.cli.output.terminal import write_text
    from memtrain.cli.rescue.find import RescueQuestion, rescued
    from memtrain.cli.rescue.page import page
    from memtrain.cli.rescue.words import as_json as json_of
    from memtrain.cli.rescue.words import print_rescue
    from memtrain.recipes.reading.shipped import find_recipe, shipped_names
    from memtrain.recipes.registry import spelled_method

    if config in shipped_names() and not Path(config).exists():
        config = str(find_recipe(config))
    text = "" if traceback is None else sys.stdin.read() if traceback == "-" else _read(traceback)
    method = None if method is None else spelled_method(method)
    found = rescued(
        RescueQuestion(
            config, text, gpu, budget, num_gpus, tool, method, max_length, host_memory, model, trainer
        )
    )
    if output is not None and found.recipe_text:
        write_text(found.recipe_text, output, replace=force, confirm_on_stderr=True)
    if html is not None:
        write_text(page(found), html, confirm_on_stderr=as_json)
    if as_json:
        typer.echo(json.dumps(json_of(found), indent=1))
    elif html is None:
        print_rescue(found, output)


def _read(name: str) -> str:
    from memtrain.errors import RecipeError
    from memtrain.recipes.reading.regular_file import read_regular

    try:
        return read_regular(name, errors="replace")
    except OSError as error:
        raise RecipeError(
            f"{name} cannot be read: {error.strerror}", "--traceback", "name the file of the traceback"
        ) from None
