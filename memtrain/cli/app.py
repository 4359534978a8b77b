"""The commands of the command line: a line for each, imported only when called."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from memtrain import __version__
from memtrain.cli.examples import examples_of
from memtrain.errors import RecipeError
from memtrain.recipes.registry import METHODS, nearest_methods, spelled_method


@dataclass(frozen=True, slots=True)
class Command:
    """A command of memtrain. `target`: `module:function` below memtrain.cli.commands, `module:app` (a Typer
    app), or `module:table` with the `key` of a function in it."""

    name: str
    target: str
    summary: str
    key: str | None = None


COMMANDS: tuple[Command, ...] = (
    Command(
        "quickstart",
        "quickstart:quickstart",
        "Train a tiny model on built-in data: a first look at a run.",
    ),
    *(Command(one.command, "train:BY_METHOD", one.summary, one.name) for one in METHODS.values()),
    Command("score", "score:score", "Score answers with a reward model."),
    Command(
        "score-teacher",
        "score_teacher:score_teacher",
        "Write a teacher's top-k tokens for the data of a distillation run.",
    ),
    Command("train", "train:train", "Train with the method that the recipe names."),
    Command("plan", "plan:plan", "Predict the memory and speed of a run, for any GPU, without starting it."),
    Command(
        "calibrate", "calibrate:calibrate", "Measure the speed of this machine once; later plans use it."
    ),
    Command(
        "verify", "verify:verify", "Test that the plan of a recipe gives the same numbers as the plain run."
    ),
    Command("bench", "bench:bench", "Measure what each memory strategy of a plan saves and costs."),
    Command("slurm", "slurm:slurm", "Write a run as a SLURM job; --submit submits it."),
    Command("status", "status:status", "Show the state of a run: step, loss, job."),
    Command("logs", "status:logs", "Print the log of a run; -f follows it."),
    Command(
        "check",
        "check:check",
        "Check a recipe, its model and its data: every fault at once, each with its line.",
    ),
    Command("show-data", "show_data:show_data", "Show encoded rows: trained text, special tokens, packing."),
    Command(
        "inspect-lengths",
        "inspect_lengths:inspect_lengths",
        "Show the lengths of a dataset, and what each max_length loses and costs.",
    ),
    Command("init", "init:init", "Write a commented starter recipe."),
    Command(
        "import",
        "import_config:import_config",
        "Translate another trainer's configuration into a recipe, and list keys without a counterpart.",
    ),
    Command(
        "rescue", "rescue:rescue", "Diagnose a run that ran out of memory, and find changes that make it fit."
    ),
    Command(
        "import-trl", "import_config:import_trl", "Translate a TRL configuration, with its method given."
    ),
    Command("recipes", "recipes:app", "List the shipped recipes; `recipes show NAME` prints one."),
    Command("methods", "methods:methods", "List the training methods, or the memory strategies."),
    Command("schema", "schema:schema", "Print the JSON Schema of a recipe, or the reference page."),
    Command("merge", "merge:merge", "Merge the adapter of a run into its base model."),
    Command("export", "export:export", "Export a checkpoint as a Hugging Face model."),
    Command("chat", "chat:chat", "Chat with the model of a finished run."),
    Command("lm-eval", "lm_eval:lm_eval", "Run benchmarks of lm-evaluation-harness on a trained model."),
    Command("serve", "serve:serve", "Print the `vllm serve` command for a trained model, or start it."),
    Command("gguf", "gguf:gguf", "Write a trained model as a GGUF file, with a Modelfile for Ollama."),
    Command("push", "push:push", "Upload a trained model and its card to the Hugging Face hub."),
    Command("clean", "clean:clean", "Remove half-written files of killed processes from a run folder."),
    Command("doctor", "doctor:doctor", "Test which installed packages and devices really work here."),
)
"""Every command, in the order of `memtrain --help`."""

_ABOUT = "Fine-tune language models on scarce GPU memory, from a YAML recipe to a trained model."


class _Commands(TyperGroup):
    """A command group that knows its commands from the table, and imports one only to run it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = [entry for entry in COMMANDS if entry.name == cmd_name]
        return _command(found[0]) if found else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if (spelled := re.sub(r"[\s_]+", "-", args[0].strip().lower())) in names:
            args = [spelled, *args[1:]]
        elif (method := spelled_method(args[0])) in METHODS:
            args = [METHODS[method].command, *args[1:]]
        if args[0] not in names and not ctx.resilient_parsing:
            near = nearest_methods(args[0], names)
            raise RecipeError(
                f"'{args[0]}' is not a memtrain command",
                where="the command line",
                fix=f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(names)}",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS])


def _command(entry: Command) -> Any:
    module_name, _, attribute = entry.target.partition(":")
    target = getattr(importlib.import_module(f"memtrain.cli.commands.{module_name}"), attribute)
    if entry.key is not None:
        target = target[entry.key]
    if isinstance(target, typer.Typer):
        own = target
    else:
        own = typer.Typer(add_completion=False, rich_markup_mode=None)
        own.command(entry.name)(cast(Callable[..., Any], target))
    command = typer.main.get_command(own)
    command.name = entry.name
    # A line of its own for each: the formatter of help texts keeps a block that begins with \b as it is.
    command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples_of(entry.name))])
    return command


app = typer.Typer(
    cls=_Commands,
    help=_ABOUT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    epilog="\b\nExamples:\n  memtrain quickstart\n  memtrain plan Qwen/Qwen3-8B\n"
    "  memtrain sft rows.jsonl --model Qwen/Qwen3-0.6B\n  memtrain init dpo -o my.yaml\n"
    "  memtrain check my.yaml\n  memtrain train my.yaml\n\n"
    "`memtrain COMMAND --help` explains a command, with examples. Every key of a recipe: `memtrain schema "
    "--reference`.",
)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"memtrain {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])
"""Typer's own error of a wrong option or argument."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` when nothing is given); its exit code.

    Raises: MemtrainError for everything that the user can mend, wrong options included.
    """
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="memtrain")
    except _UsageError as error:
        raise _usage_fault(error) from None
    return code if isinstance(code, int) else 0


def _usage_fault(error: Any) -> RecipeError:
    """A wrong option in the form of every other error."""
    message = str(error.format_message()).rstrip(".")
    wrong = str(getattr(error, "option_name", ""))
    if wrong.startswith("--") and "." in wrong:
        key, _, value = wrong[2:].partition("=")
        word = f"{key}={value or 'VALUE'}"
        return RecipeError(
            f"{wrong} is a key of the recipe, not an option", "the command line", f"write {word}"
        )
    path = error.ctx.command_path if error.ctx is not None else "memtrain"
    return RecipeError(message[:1].lower() + message[1:], path, f"see {path} --help")
