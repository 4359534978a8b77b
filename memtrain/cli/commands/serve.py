"""`memtrain serve RUN`: the exact command that serves the trained model with vLLM."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from memtrain.errors import LaunchError, RecipeError

LOOPBACK = "127.0.0.1"
KEY = "VLLM_API_KEY"
"""Environment variable in which vLLM looks for its key. A command line, which every user of a machine can
read, does not hold it."""


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 8000,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any but this machine's own (0.0.0.0: every one) needs a key in the "
            "environment variable VLLM_API_KEY."
        ),
    ] = LOOPBACK,
    start: Annotated[bool, typer.Option("--start", help="Start it, where vLLM is installed.")] = False,
) -> None:
    """Print the `vllm serve` command for a trained model, its adapter beside the base; --start runs it.

    The server listens on this machine alone, unless --host and a key open it.
    """
    from memtrain.trainers.tools.trained_model import serve_words, text_model

    said = _listening(host)
    words = serve_words(text_model(run), port=port, host=host)
    typer.echo(shlex.join(words))
    typer.echo(said, err=True)
    if not start:
        return
    if shutil.which(words[0]) is None:
        raise LaunchError(
            "vLLM is not installed in this environment",
            "--start",
            "pip install vllm, or run the line elsewhere",
        )
    os.execvp(words[0], words)


def _listening(host: str) -> str:
    """Who can reach the server. Raises: RecipeError for no address; LaunchError for an open one without a
    key."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?|::1?", host):
        raise RecipeError(f"'{host}' is no address", "--host", "write an address of this machine, or 0.0.0.0")
    if _is_loopback(host):
        return f"It listens on this machine alone ({host}); --host 0.0.0.0 opens it, with a key in {KEY}."
    if not os.environ.get(KEY, "").strip():
        raise LaunchError(
            f"a server on {host} answers everybody who reaches this machine, and {KEY} holds no key",
            "--host",
            f"export {KEY}=... with a key of your own, which clients send; or leave --host out",
        )
    return f"It listens on {host}: whoever sends the key in {KEY}, which must be set where this line runs."


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
