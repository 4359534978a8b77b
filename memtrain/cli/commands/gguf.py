"""`memtrain gguf RUN`: the trained model as a GGUF file, with the Modelfile that Ollama takes."""

from __future__ import annotations

import shlex
import subprocess
from contextlib import suppress
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

    Every tensor of the file is compared with the model, where the Python package gguf is installed; a file
    that is another model is refused. Where the converter is not installed, its exact command is printed.
    """
    from memtrain.trainers.tools.trained_model import (
        GGUF_TYPES,
        convert_words,
        converter_is_here,
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
    unchecked = target.with_name(f".unchecked-{target.name}")
    is_here = converter_is_here()
    words, _ = convert_words(folder, unchecked if is_here else target, kind)
    file = target.with_name("Modelfile")
    text = modelfile(folder, target, _system(run) if system is None else system)
    if is_here:
        print_text(_convert(words, folder, unchecked, target))
        print_text(f"The model is in {whole(target)}.")
    else:
        print_text("convert_hf_to_gguf.py of llama.cpp is not installed here. These commands write the file:")
        for line in (*get_converter(), shlex.join(words)):
            typer.echo(f"  {line}")
        print_text("Where it is installed, memtrain gguf runs it, and compares the file with the model.")
    _write(file, text)
    print_text(f"Wrote {whole(file)}. With Ollama:")
    name = ollama_name(model.name)
    for words in (["ollama", "create", name, "-f", str(file)], ["ollama", "run", name]):
        typer.echo(f"  {shlex.join(words)}")


def _convert(words: list[str], folder: Path, unchecked: Path, target: Path) -> str:
    """Let the converter write `unchecked`, compare it with the model and give it its name; what was compared.

    Raises: LaunchError where the converter failed, or the file is not the model: it keeps another name.
    """
    from memtrain.trainers.tools.gguf_check import NotTheModel, can_compare, compare

    if target.exists() and not target.is_file():
        what = "a folder" if target.is_dir() else "no regular file"
        raise LaunchError(f"{target} is {what}", str(target), "choose another --output")
    _write(unchecked, "")
    try:
        try:
            ended = subprocess.run(words, check=False)
        except OSError as error:
            raise LaunchError(
                f"llama.cpp's converter cannot be started: {error.strerror}",
                words[0],
                "install it again: it must be a program (a first line such as #!/usr/bin/env python3)",
            ) from None
        if ended.returncode:
            raise LaunchError("llama.cpp's converter failed", str(folder), "read its message above")
        if not unchecked.is_file() or not unchecked.stat().st_size:
            raise LaunchError(
                f"llama.cpp's converter ended without an error and wrote no {target.name}",
                str(folder),
                f"run it yourself: {shlex.join([*words[:3], str(target), *words[4:]])}",
            )
        if not can_compare():
            unchecked.replace(target)
            return (
                f"Not compared with {folder}: the Python package gguf is not installed here. "
                "Install it to have that done: pip install gguf"
            )
        try:
            found = compare(unchecked, folder).words(folder)
        except NotTheModel as error:
            refused = target.with_name(f"{target.stem}.refused{target.suffix}")
            unchecked.replace(refused)
            raise LaunchError(
                f"the GGUF file is not the model: {error}",
                str(refused),
                "update llama.cpp, whose converter wrote it, or take another --type; the file was kept under "
                "this name, to look at",
            ) from None
        unchecked.replace(target)
        return found
    finally:
        if unchecked.is_file():
            unchecked.unlink()
        else:
            # A folder in its place is the converter's: it goes only where it holds nothing.
            with suppress(OSError):
                unchecked.rmdir()


def _write(file: Path, text: str) -> None:
    """Raises: LaunchError."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"{file} cannot be written: {error.strerror}", str(file), "choose another --output"
        ) from None


def _system(run: Path) -> str | None:
    """The system prompt of the run's recipe; None where there is no plan."""
    from memtrain.memory.plan.plan import PLAN_FILE, read_plan

    path = run / PLAN_FILE
    return read_plan(path, reveals=False).recipe.data.system_prompt if path.is_file() else None
