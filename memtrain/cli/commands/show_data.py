"""`memtrain show-data RECIPE_OR_DATASET`: encoded rows as the model sees them, trained text marked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, complete_recipe

if TYPE_CHECKING:
    from memtrain.trainers.data.store.shown_rows import Piece, ShownSequence

RecipeOrDataset = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE_OR_DATASET",
        help="A recipe, or a data file or folder, whose method follows from its columns.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
OfModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model whose tokenizer and chat template encode the rows. Default: the recipe's; for a dataset, "
        "the last one used, else the built-in one.",
        show_default=False,
    ),
]
Rows = Annotated[int, typer.Option("-n", "--rows", min=1, help="Number of sequences to show.")]
Held = Annotated[bool, typer.Option("--eval", help="Show held-out rows instead of training rows.")]


def show_data(
    recipe: RecipeOrDataset,
    overrides: OverridesArgument = None,
    rows: Rows = 3,
    held_out: Held = False,
    model: OfModel = None,
) -> None:
    """Show encoded rows: trained text, special tokens, and where one packed row ends and the next begins.

    On a terminal trained text is green and the rest is dim; elsewhere trained text stands in [[double
    brackets]].
    """
    from memtrain.cli.launch.summary import reading_progress
    from memtrain.cli.output.terminal import print_text
    from memtrain.cli.plan.dataset_alone import is_dataset_alone, recipe_to_show
    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.cli.plan.recipe_of_dataset import model_word
    from memtrain.errors import RecipeError
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.recipes.recipe import HAS_ANSWERS
    from memtrain.trainers.data.packing.by_method import held_out_of
    from memtrain.trainers.data.sources.splits import choose_rows
    from memtrain.trainers.data.store.prepare import prepare
    from memtrain.trainers.data.store.shown_rows import shown_sequences
    from memtrain.trainers.data.store.token_store import TokenStore
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    words = [*([model_word(model)] if model else ()), *(overrides or ())]
    if is_dataset_alone(recipe):
        loaded, sentence = recipe_to_show(recipe, words)
        print_text(sentence)
    else:
        loaded = load_recipe(recipe, words)
    asked = loaded.recipe
    with reading_progress() as progress, at_their_lines(loaded):
        data = prepare(asked, progress=progress)
    store = TokenStore.open(data.train.folder)
    chosen = choose_rows(asked.data, store, asked.train.seed)
    numbers = chosen.train
    if held_out:
        held = held_out_of(asked, data, store, chosen)
        if held is None:
            raise RecipeError(
                "the recipe holds out no rows",
                loaded.nearest("data.eval"),
                "set data.eval or data.eval_fraction, or show the training rows (without --eval)",
            )
        store, numbers = held.store, held.rows
    has_parts = asked.method in HAS_ANSWERS or asked.online is not None
    limits = None if has_parts else asked.row_limits
    shown = shown_sequences(limits, store, numbers, tokenizer_of(asked.model), rows)
    for number, sequence in enumerate(shown, start=1):
        print_sequence(number, sequence, has_parts=has_parts)
    for sentence in data.words(shows_boundaries=True):
        print_text(sentence)


def print_sequence(number: int, sequence: ShownSequence, *, has_parts: bool) -> None:
    """The length of a sequence and its pieces; `has_parts`: a prompt and its answers."""
    from memtrain.cli.output.terminal import print_text

    is_packed = len(sequence.pieces) > 1 and not has_parts
    what = f"{len(sequence.pieces)} packed rows, " if is_packed else ""
    print_text(f"Sequence {number}: {what}{sequence.num_tokens:,} tokens.")
    for piece in sequence.pieces:
        print_piece(piece)
    typer.echo()


def print_piece(piece: Piece) -> None:
    """The name of a piece with its counts, and its text with the trained parts marked."""
    from memtrain.errors import printable

    typer.secho(
        printable(
            f"--- {piece.name}: {piece.num_tokens:,} tokens, {piece.num_loss_tokens:,} loss tokens ---",
            is_line=True,
        ),
        bold=True,
    )
    is_terminal = sys.stdout.isatty()
    parts: list[str] = []
    was_trained = False
    for run in piece.runs:
        text = printable(run.text)
        if is_terminal:
            colour = "green" if run.is_trained else None
            parts.append(typer.style(text, fg=colour, dim=not run.is_trained, bold=run.is_special))
            continue
        if run.is_trained != was_trained:
            parts.append("[[" if run.is_trained else "]]")
        was_trained = run.is_trained
        parts.append(text)
    if was_trained:
        parts.append("]]")
    typer.echo("".join(parts))
