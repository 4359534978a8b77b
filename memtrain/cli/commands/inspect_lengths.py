"""`memtrain inspect-lengths`: lengths of the rows, and the losses and costs of each max_length."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import complete_override, complete_recipe
from memtrain.cli.output.terminal import columns, write_text
from memtrain.errors import RecipeError, printable

if TYPE_CHECKING:
    from memtrain.cli.plan.price_lengths import Pricing
    from memtrain.recipes.reading.load import LoadedRecipe
    from memtrain.trainers.data.length_report.result import Inspection

EXIT_INTERRUPTED = 130
RECIPE_ENDINGS = (".yaml", ".yml")
EVERY_S = 0.5

DatasetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="DATASET",
        help="A file, a folder, a glob, a hub id or a recipe. With --recipe, it replaces data.train.",
        show_default=False,
    ),
]
KeysArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of a recipe, such as data.columns.question=ask or train.batch_size=64.",
        autocompletion=complete_override,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model whose tokenizer is used and whose memory is predicted.", show_default=False
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Tokenizer to count with. Default: that of a recipe nearby, the one last used, or built in.",
        show_default=False,
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", help="Training method. Default: one that takes the format of the rows."),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A recipe to take the data, tokenizer, lengths and batch from.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option("--max-length", help="Lengths to compare, such as 512,1024. Default: chosen by the rows."),
]
BudgetOption = Annotated[
    str | None,
    typer.Option("--budget", help="Memory of one device, such as 24GiB, to see which lengths fit."),
]
SampleOption = Annotated[
    int | None,
    typer.Option(
        "--sample", min=1, help="Tokenize a random sample of this many rows, with confidence intervals."
    ),
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write an HTML page.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON (docs/inspect-lengths.md).")]


@dataclass(frozen=True, slots=True)
class Words:
    """The command line."""

    dataset: str | None
    overrides: tuple[str, ...]
    model: str | None
    tokenizer: str | None
    method: str | None
    recipe: str | None


def inspect_lengths(
    dataset: DatasetArgument = None,
    overrides: KeysArgument = None,
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    method: MethodOption = None,
    recipe: RecipeOption = None,
    max_length: LengthsOption = None,
    budget: BudgetOption = None,
    sample: SampleOption = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the lengths of a dataset's rows, and what each max_length loses and costs, to choose
    length.max_length."""
    given = Words(dataset, tuple(overrides or ()), model, tokenizer, method, recipe)
    from memtrain.cli.output.length_report import screen_lines
    from memtrain.trainers.data.length_report.html import page

    found = inspected(given, read_lengths(max_length), budget, sample)
    if as_json:
        typer.echo(printable(json.dumps(found.model_dump(mode="json"), indent=1, ensure_ascii=False)))
    else:
        can_draw = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        for line, is_heading in screen_lines(found, columns(), block="\u2588" if can_draw else "#"):
            shown = printable(line)
            typer.echo(typer.style(shown, bold=True) if is_heading else shown)
    if html is not None:
        write_text(page(found), html, confirm_on_stderr=as_json)
    if found.extent.is_partial:
        raise typer.Exit(EXIT_INTERRUPTED)


def inspected(given: Words, lengths: tuple[int, ...], budget: str | None, sample: int | None) -> Inspection:
    """The lengths of the rows that the words name, as the command shows them.

    Raises: RecipeError, DataError.
    """
    words, counted_by = _with_tokenizer(_sorted_words(given))
    loaded = _loaded(words)

    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.cli.plan.usual_tokenizer import keep_last
    from memtrain.trainers.data.length_report.inspect import Question, inspect
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    planner = _pricing(loaded, words, budget)
    written = loaded.recipe
    question = Question(
        dataset=words.dataset or str(loaded.path),
        data=written.data,
        length=written.length,
        train=written.train,
        method=words.method or (written.method if words.recipe is not None else None),
        tokenizer_name=written.model.tokenizer or written.model.path or "",
        max_lengths=lengths,
        sample=sample,
        counted_by=counted_by,
    )
    price = planner.price if planner is not None else None
    with _progress() as progress, at_their_lines(loaded):
        found = inspect(question, tokenizer_of(written.model), price=price, progress=progress)
    keep_last(question.tokenizer_name)
    if planner is None:
        return found
    note = _priced_note(planner, found, written.method, has_recipe=words.recipe is not None)
    return found.model_copy(update={"notes": (*found.notes, note)})


def _priced_note(planner: Pricing, found: Inspection, method: str, *, has_recipe: bool) -> str:
    """The device that was planned for; or why nothing was predicted."""
    from memtrain.recipes.registry import METHODS

    if any(one.cost is not None for one in found.candidates):
        return f"Memory and time are predicted for {planner.device}."
    if found.method != method and not has_recipe:
        return f"Memory and time are not predicted: --method {found.method} predicts them for these rows."
    if found.method != method:
        return (
            f"Memory and time are not predicted: the rows are of {found.method}, and the recipe is of "
            f"{method}; --method {found.method} predicts them."
        )
    if METHODS[method].is_online:
        return (
            f"Memory and time are not predicted: a run of {method} writes completions, which are not in the "
            "data; `memtrain plan` predicts it."
        )
    return "Memory and time are not predicted: no row is long enough."


def read_lengths(text: str | None) -> tuple[int, ...]:
    """The candidates of `512,1024`.

    Raises: RecipeError when one is no number above zero.
    """
    if text is None:
        return ()
    words = [word.strip().replace("_", "") for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(
            f"'{text}' is not a list of lengths",
            "--max-length",
            "give numbers above zero, such as 512,1024,2048",
        )
    return tuple(int(word) for word in words)


def _sorted_words(words: Words) -> Words:
    """The words where they belong: `key=value` is no dataset, and a recipe as a dataset is a recipe."""
    dataset, overrides, recipe = words.dataset, words.overrides, words.recipe
    if dataset is not None and re.match(r"[a-z_]+(\.[\w.\[\]]+)+=", dataset) and not Path(dataset).exists():
        dataset, overrides = None, (dataset, *overrides)
    if dataset is not None and (dataset.endswith(RECIPE_ENDINGS) or _is_shipped(dataset)):
        if recipe is not None:
            raise RecipeError(
                f"both DATASET and --recipe name a recipe: {dataset} and {recipe}",
                "the command line",
                "give one of them",
            )
        dataset, recipe = None, dataset
    from memtrain.recipes.registry import spelled_method

    method = None if words.method is None else spelled_method(words.method)
    return Words(dataset, overrides, words.model, words.tokenizer, method, recipe)


def _is_shipped(name: str) -> bool:
    """Whether the word is a shipped recipe: no file or folder has the name."""
    from memtrain.recipes.reading.shipped import shipped_names

    return name in shipped_names() and not Path(name).exists()


def _with_tokenizer(words: Words) -> tuple[Words, str]:
    """The words with a tokenizer, and the sentence about it; empty where the words or a recipe name one."""
    has_own = any(word.startswith(("model.path=", "model.tokenizer=")) for word in words.overrides)
    if words.dataset is None or words.recipe or words.model or words.tokenizer or has_own:
        return words, ""
    from memtrain.cli.plan.usual_tokenizer import usual_tokenizer

    usual = usual_tokenizer(words.dataset)
    return replace(words, tokenizer=usual.name), usual.summary


def _loaded(words: Words) -> LoadedRecipe:
    """The recipe that is asked about; without one, a recipe made of the words.

    Raises: RecipeError when no data is named, or a key is wrong.
    """
    from memtrain.recipes.formats.detect import METHOD_FORMATS
    from memtrain.recipes.reading.load import load_recipe, recipe_of_words
    from memtrain.recipes.registry import METHODS

    if words.method is not None and words.method not in METHOD_FORMATS:
        raise RecipeError(
            f"unknown method '{words.method}'", "--method", f"give one of {', '.join(METHOD_FORMATS)}"
        )
    given: list[str] = []
    if words.dataset is not None:
        given.append(f"data.train={json.dumps(words.dataset, ensure_ascii=False)}")
    if words.model is not None:
        given += [f"model.path={json.dumps(words.model)}", "model.config=null", "model.tokenizer=null"]
    if words.tokenizer is not None:
        given.append(f"model.tokenizer={json.dumps(words.tokenizer)}")
    asked = METHODS.get(words.method or "")
    is_planned = asked is not None and not asked.is_online and not asked.has_teacher
    if is_planned:
        given.append(f"method={words.method}")
    if words.recipe is not None:
        return load_recipe(words.recipe, [*given, *words.overrides])
    if words.dataset is None:
        raise RecipeError(
            "no dataset is given",
            "the command line",
            "memtrain inspect-lengths DATASET, or --recipe RECIPE for its data",
        )
    if words.model is None and words.tokenizer is not None:
        given.append(f"model.path={json.dumps(words.tokenizer)}")
    base = [] if is_planned else ["method=sft"]  # Other methods need sections that no length depends on.
    loaded = recipe_of_words([*base, *given, *words.overrides])
    return loaded


def _pricing(loaded: LoadedRecipe, words: Words, budget: str | None) -> Pricing | None:
    """The planner, where there is a model to plan for and a method that is planned.

    Raises: RecipeError for a budget that nothing can be held against.
    """
    from memtrain.memory.plan.units import read_size
    from memtrain.recipes.registry import METHODS

    has_model = words.model is not None or words.recipe is not None
    if budget is not None and not has_model:
        raise RecipeError(
            "--budget needs a model whose memory can be predicted",
            "--budget",
            "give --model or --recipe as well",
        )
    if not has_model or (words.method is not None and words.method not in METHODS):
        return None
    from memtrain.cli.plan.price_lengths import pricing

    return pricing(loaded, read_size(budget, "--budget") if budget is not None else None)


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int | None], None] | None]:
    """Tells rows, speed and time left on a terminal, in one line that is written over; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    started = printed_at = time.monotonic()

    def progress(rows: int, tokens: int, total: int | None) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if now - printed_at < EVERY_S:
            return
        printed_at = now
        speed = rows / max(now - started, 1e-9)
        of, left = "", ""
        if total is not None and total > rows:
            of, left = f" of {total:,}", f", {(total - rows) / max(speed, 1e-9):,.0f} s left"
        done = f"{rows:,}{of} rows, {tokens:,} tokens, {speed:,.0f} rows/s{left}"
        line = f"tokenizing: {done} (Ctrl-C: show these)"
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()

    try:
        yield progress
    finally:
        sys.stderr.write("\r\x1b[K")
