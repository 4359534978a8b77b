"""`memtrain doctor`: installed parts, and the parts that really work here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run every attention back end, quantizer and kernel once; exit 1 when one is broken."""
    from memtrain.trainers.tools.doctor import examine

    found = examine()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1))
    else:
        print_table(("package", "version"), [(name, of or "-") for name, of in found.versions.items()])
        print_text()
        rows = [(one.area, one.name, one.outcome.value, one.words) for one in found.findings]
        print_table(("part", "name", "", "found"), rows)
        if found.broken:
            print_text()
            names = ", ".join(f"{one.area} {one.name}" for one in found.broken)
            print_text(f"Broken here: {names}. Repair or uninstall these packages.")
    if found.broken:
        raise typer.Exit(1)
