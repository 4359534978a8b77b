"""`memtrain chat RUN`: a prompt at the terminal with the trained model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import hide_progress_bars, print_text

COMMANDS = "/reset forgets the turns, Ctrl-C stops an answer, /quit or Ctrl-D ends."
_IS_COMMAND = re.compile(r"/[a-z]+")


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this one prompt, then exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy decoding.")] = 0.7,
    as_text: Annotated[
        bool | None,
        typer.Option(
            "--text/--template",
            help="Continue the prompt as plain text, or put it through the chat template. Default: as in "
            "the run's rows.",
        ),
    ] = None,
) -> None:
    """Chat with the model of a finished run.

    Ctrl-C stops an answer, /reset forgets the turns, /quit or Ctrl-D ends.
    """
    from memtrain.errors import printable
    from memtrain.trainers.tools.trained_model import text_model

    trained = text_model(run)
    hide_progress_bars()
    from memtrain.trainers.tools.chat import Chat, is_trained_on_text

    is_text = as_text if as_text is not None else system is None and is_trained_on_text(run)
    talk = Chat(trained, system, as_text=is_text)
    if as_text is None and is_text:
        print_text(
            "The run was trained on plain text: each prompt is continued as text (--template: as a chat)."
        )
    elif not talk.has_template and not is_text:
        print_text("The tokenizer has no chat template: each prompt is continued as plain text.")
    for text in [prompt] if prompt is not None else _turns():
        if text == "/reset":
            talk.reset()
            continue
        try:
            talk.answer(
                text,
                lambda piece: typer.echo(printable(piece), nl=False),
                max_tokens=max_tokens,
                temperature=temperature,
            )
        except KeyboardInterrupt:
            if prompt is not None or not sys.stdin.isatty():
                raise
            typer.echo("\n[stopped]", err=True)
            continue
        typer.echo()
        if talk.is_cut:
            typer.echo(
                f"[cut at {max_tokens:,} tokens, before the model ended its turn (--max-tokens)]", err=True
            )


def _turns() -> Iterator[str]:
    """Lines of the user, until /quit or the end of the input; empty ones are passed over.

    On a terminal lines can be edited, and earlier ones come back with the arrow keys.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):  # Python is built without it on some systems
            import readline  # noqa: F401
        typer.echo(COMMANDS, err=True)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            typer.echo(f"\n{COMMANDS}", err=True)
            continue
        if line == "/quit":
            return
        if is_terminal and line != "/reset" and _IS_COMMAND.fullmatch(line):
            typer.echo(COMMANDS, err=True)
        elif line:
            yield line
