"""`memtrain serve RUN`: the exact command that serves the trained model with vLLM."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from memtrain.errors import LaunchError


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    port: Annotated[int, typer.Option(help="Port of the server.")] = 8000,
    start: Annotated[bool, typer.Option("--start", help="Start it, where vLLM is installed.")] = False,
) -> None:
    """Print the `vllm serve` command for a trained model, its adapter beside the base; --start runs it."""
    from memtrain.trainers.tools.trained_model import serve_words, text_model

    words = serve_words(text_model(run), port=port)
    typer.echo(shlex.join(words))
    if not start:
        return
    if shutil.which(words[0]) is None:
        raise LaunchError(
            "vLLM is not installed in this environment",
            "--start",
            "pip install vllm, or run the line elsewhere",
        )
    os.execvp(words[0], words)
