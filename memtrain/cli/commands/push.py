"""`memtrain push RUN NAME`: the trained model with its card to the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text, whole
from memtrain.errors import LaunchError, RecipeError


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files to upload; no network.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Upload without asking.")] = False,
) -> None:
    """Upload a trained model and its card to the hub, after showing the files and asking.

    The model's own files go, and no others: links, hidden files and what memtrain did not write are left out,
    and named. --dry-run shows the files and needs no network.
    """
    from memtrain.memory.plan.units import count_of, gib
    from memtrain.trainers.run_folder.report.public_words import is_hub_id
    from memtrain.trainers.tools.push import CARD, upload, upload_of
    from memtrain.trainers.tools.trained_model import trained_model

    if not is_hub_id(name):
        raise RecipeError(f"'{name}' is not the name of a repository", "NAME", "write owner/name")
    trained = trained_model(run)
    made = upload_of(trained)
    folder, address = made.folder, f"https://huggingface.co/{name}"
    print_table(("file", "size"), [(file, gib(size)) for file, size in made.files])
    if made.left_out:
        print_text("Left out: " + "; ".join(f"{whole(file)} ({why})" for file, why in made.left_out) + ".")
    if CARD not in [file for file, _ in made.files]:
        print_text(f"There is no {CARD} in it: the repository will have no model card.")
    if trained.is_adapter and not is_hub_id(trained.base):
        print_text(
            f"Nobody else can load this adapter: its base, {trained.base or 'made by memtrain'}, is not on "
            f"the hub. Merge it (memtrain merge {whole(run)}), and push RUN/merged."
        )
    for line in made.local:
        print_text(f"{line}: everybody who can see the repository will read it.")
    if dry_run:
        print_text(f"Nothing was uploaded. It would go to {address}.")
        return
    seen_by = "private, if it is a new one" if private else "for everybody to see, if it is a new one"
    files = count_of(len(made.files), "file")
    if not yes and not _is_wanted(f"Upload {files} ({gib(made.num_bytes)}) to {address} ({seen_by})?"):
        print_text("Nothing was uploaded.")
        return
    url = upload(made, name, is_private=private)
    print_text(f"{whole(folder)} is at {url}.")


def _is_wanted(question: str) -> bool:
    """The answer of whoever sits at the terminal. Raises: LaunchError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise LaunchError(
            "nothing was uploaded: there is no terminal to ask at",
            "memtrain push",
            "read the list of files above (--dry-run shows it alone), then add --yes",
        )
    return typer.confirm(question)
