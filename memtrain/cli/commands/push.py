"""`memtrain push RUN NAME`: the trained model with its card to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memtrain.cli.output.terminal import print_table, print_text, whole
from memtrain.errors import LaunchError, RecipeError, words_of


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Repository on the hub: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files to upload; no network.")] = False,
) -> None:
    """Upload a trained model and its card to the hub; --dry-run shows the files and needs no network."""
    from memtrain.memory.plan.units import gib
    from memtrain.trainers.run_folder.report.model_card import is_hub_id
    from memtrain.trainers.tools.trained_model import trained_model

    if not is_hub_id(name):
        raise RecipeError(f"'{name}' is not the name of a repository", "NAME", "write owner/name")
    trained = trained_model(run)
    folder = trained.folder
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    print_table(
        ("file", "size"), [(str(path.relative_to(folder)), gib(path.stat().st_size)) for path in files]
    )
    if not (folder / "README.md").is_file():
        print_text("There is no README.md in it: the repository will have no model card.")
    if trained.is_adapter and not is_hub_id(trained.base):
        print_text(
            f"Nobody else can load this adapter: its base, {trained.base or 'made by memtrain'}, is not on "
            f"the hub. Merge it (memtrain merge {whole(run)}), and push RUN/merged."
        )
    if dry_run:
        print_text(f"Nothing was uploaded. It would go to https://huggingface.co/{name}.")
        return
    url = _uploaded(folder, name, is_private=private)
    print_text(f"{whole(folder)} is at {url}.")


def _uploaded(folder: Path, name: str, *, is_private: bool) -> str:
    """The address of the repository after the upload.

    Raises: LaunchError with the hub's own words.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        made = api.create_repo(name, private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=str(folder), commit_message="Upload a model trained with memtrain"
        )
    except Exception as error:  # each version of the hub's client has errors of its own
        raise LaunchError(
            f"{name} was not uploaded: {words_of(error)}",
            "the Hugging Face hub",
            "log in with `hf auth login`, check the name and the network, or use --dry-run",
        ) from None
    return str(made)
