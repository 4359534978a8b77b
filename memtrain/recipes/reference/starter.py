"""The commented recipe that `memtrain init` writes; its comments are the sentences under the fields."""

from __future__ import annotations

import textwrap

from memtrain.recipes.formats.detect import METHOD_FORMATS
from memtrain.recipes.reading.field_docs import sentences_of
from memtrain.recipes.reading.field_types import field_types, section_of
from memtrain.recipes.reading.shipped import configs_dir
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.reference.json_schema import SCHEMA_FILE
from memtrain.recipes.registry import METHODS

_COMMON: tuple[tuple[str, str], ...] = (
    ("model.path", "builtin:tiny"),
    ("#model.dtype", "auto"),
    ("#model.adapter", "{r: 16, alpha: 32}"),
    ("#model.quantize", "none"),
    ("data.train", "builtin:arithmetic"),
    ("data.eval_fraction", "0.05"),
    ("#data.columns", "{question: ask, answer: reply}"),
    ("#data.strings_are", "turns"),
    ("length.max_length", "1024"),
    ("#length.truncation", "keep_start"),
    ("#length.packing", "bfd"),
    ("#memory.budget", "auto"),
    ("optim.lr", "2e-5"),
    ("#optim.kind", "adamw"),
    ("#optim.schedule", "cosine"),
    ("train.batch_size", "32"),
    ("train.epochs", "1"),
    ("#train.seed", "0"),
    ("#save.every_steps", "500"),
    ("#log.trackers", "[tensorboard]"),
)


def starter_recipe(method: str, file_name: str = "recipe.yaml") -> str:
    """A valid recipe for a method (a key of METHODS): each key with its sentence, options commented out."""
    schema = (configs_dir() / SCHEMA_FILE).as_posix()
    lines = [
        f"# yaml-language-server: $schema={schema}",
        f"# {METHODS[method].summary}",
        "# It runs unchanged, on a built-in model and built-in data; replace them with yours.",
        "# A line that starts with # is an option. Every other key: memtrain schema --reference",
        f"# Check it: memtrain check {file_name}",
        f"# Run it:   memtrain {METHODS[method].command} {file_name}",
        f"method: {method}",
    ]
    section = ""
    for marked, value in (*_COMMON, *METHODS[method].starter):
        mark, key = ("#", marked[1:]) if marked.startswith("#") else ("", marked)
        if key == "data.columns" and "question_answer" not in METHOD_FORMATS[method]:
            value = "{prompt: ask}"
        above, name = key.split(".")
        if above != section:
            section = above
            lines += ["", f"{section}:"]
        lines += textwrap.wrap(_comment(above, name), 96, initial_indent="  # ", subsequent_indent="  # ")
        lines.append(f"  {mark}{name}: {value}")
    return "\n".join(lines) + "\n"


def _comment(above: str, name: str) -> str:
    section = section_of(field_types(Recipe)[above])
    return sentences_of(section, name) if section else ""
