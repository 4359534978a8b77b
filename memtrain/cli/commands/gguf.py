"""`memtrain gguf RUN`: the trained model as a GGUF file, with the Modelfile that Ollama takes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_text, whole
from memtrain.errors import LaunchError


def gguf(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The GGUF file; RUN/NAME.gguf if not given.")
    ] = None,
    kind: Annotated[str, typer.Option("--type", help="f32, f16, bf16 or q8_0.")] = "f16",
    system: Annotated[
        str | None,
        typer.Option(help="System prompt of the Modelfile; the recipe's data.system_prompt if not given."),
    ] = None,
) -> None:
    """Convert a trained model to GGUF with llama.cpp's converter, and write a Modelfile for Ollama beside it.

    Where the converter is not installed, its exact command is printed.
    """
    from memtrain.trainers.tools.trained_model import (
        GGUF_TYPES,
        convert_words,
        get_converter,
        modelfile,
        ollama_name,
        text_model,
        whole_model,
    )

    if kind not in GGUF_TYPES:
        raise LaunchError(
            f"unknown type of GGUF file: {kind}", "--type", f"give one of {', '.join(GGUF_TYPES)}"
        )
    model = text_model(run)
    folder = whole_model(model, "a GGUF file")
    target = output or run / f"{model.name}.gguf"
    words, is_here = convert_words(folder, target, kind)
    file = target.with_name("Modelfile")
    try:
        file.write_text(
            modelfile(folder, target, _system(run) if system is None else system), encoding="utf-8"
        )
    except OSError as error:
        raise LaunchError(
            f"{file} cannot be written: {error.strerror}", str(file), "choose another --output"
        ) from None
    if is_here:
        if subprocess.run(words, check=False).returncode:
            raise LaunchError("llama.cpp's converter failed", str(folder), "read its message above")
        print_text(f"The model is in {whole(target)}.")
    else:
        print_text("convert_hf_to_gguf.py of llama.cpp is not installed here. These commands write the file:")
        for line in (*get_converter(), shlex.join(words)):
            typer.echo(f"  {line}")
    print_text(f"Wrote {whole(file)}. With Ollama:")
    name = ollama_name(model.name)
    for words in (["ollama", "create", name, "-f", str(file)], ["ollama", "run", name]):
        typer.echo(f"  {shlex.join(words)}")


def _system(run: Path) -> str | None:
    """The system prompt of the run's recipe; None where there is no plan."""
    from memtrain.memory.plan.plan import PLAN_FILE, read_plan

    path = run / PLAN_FILE
    return read_plan(path, reveals=False).recipe.data.system_prompt if path.is_file() else None
