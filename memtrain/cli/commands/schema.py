"""`memtrain schema`: the keys of a recipe, for editors and for readers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import write_text


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; else it is printed.")
    ] = None,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Print the reference page (Markdown) instead of the JSON Schema."),
    ] = False,
    strategies: Annotated[
        bool, typer.Option("--strategies", help="Print the page of memory strategies (Markdown) instead.")
    ] = False,
    trl: Annotated[
        bool, typer.Option("--trl", help="Print the page of TRL's keys (Markdown) instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a recipe; or, with --reference, every key with what it does.

    An editor with a YAML language server completes and checks a recipe whose first line is
    `# yaml-language-server: $schema=FILE`.
    """
    if trl:
        from memtrain.recipes.trl.page import trl_page

        write_text(trl_page(), output)
        return
    if strategies:
        from memtrain.memory.explain.strategies_page import strategies_page

        write_text(strategies_page(), output)
        return
    from memtrain.recipes.reference.json_schema import reference_page, schema_text

    write_text(reference_page() if reference else schema_text(), output)
