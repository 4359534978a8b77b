"""The recipe as JSON Schema, by which editors complete and check, and as the page docs/recipe.md."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from memtrain.recipes.formats import detect
from memtrain.recipes.reading.error_messages import default_words
from memtrain.recipes.reading.field_docs import sentences_of
from memtrain.recipes.reading.field_types import describe, field_types, item_of, section_of
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section, one_or_many, parse_bytes
from memtrain.recipes.sections.data import held_out_sources, source_of
from memtrain.recipes.sections.rewards import environment_of, functions_of, model_of

SCHEMA_FILE = "recipe.schema.json"
"""Name of the schema among the shipped recipes, which name it relative to themselves."""

_INTERPOLATION: JsonSchemaValue = {"type": "string", "pattern": r"\$\{"}
_SIZE: JsonSchemaValue = {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGT]i?)?B\s*$|\$\{"}


class _Generator(GenerateJsonSchema):
    """Pydantic's schema, widened to the forms that the readers take: sizes with units, single items,
    `${...}`."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        reader = schema["function"]["function"]
        if reader is parse_bytes:
            return {"anyOf": [inner, _SIZE]}
        if reader is one_or_many:
            return {"anyOf": [inner["items"], inner]}
        if reader in (model_of, environment_of):
            return {"anyOf": [{"type": "string"}, inner]}
        if reader in (source_of, functions_of):
            one: list[JsonSchemaValue] = [{"type": "string"}, inner["items"]]
            return {"anyOf": [*one, {**inner, "items": {"anyOf": one}}]}
        if reader is held_out_sources:
            one = [{"type": "string"}, inner["items"]]
            several: JsonSchemaValue = {**inner, "items": {"anyOf": one}}
            sets = {"type": "object", "additionalProperties": {"anyOf": [*one, several]}}
            return {"anyOf": [*one, several, sets]}
        return inner

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made, section = super().model_schema(schema), schema["cls"]
        for name, value in made.get("properties", {}).items():
            if issubclass(section, Section) and (text := sentences_of(section, name)):
                value["description"] = text
        return made

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        return {"anyOf": [super().int_schema(schema), _INTERPOLATION]}

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), _INTERPOLATION]}

    def bool_schema(self, schema: core_schema.BoolSchema) -> JsonSchemaValue:
        return {"anyOf": [super().bool_schema(schema), _INTERPOLATION]}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        return {"anyOf": [super().literal_schema(schema), _INTERPOLATION]}


def recipe_schema() -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of a recipe file, with the sentence under each field as description."""
    schema = cast(dict[str, object], _without_noise(Recipe.model_json_schema(schema_generator=_Generator)))
    properties = cast(dict[str, object], schema["properties"])
    properties["extends"] = {
        "description": "A recipe, or a list of them, that this one is laid over: a path beside this file, "
        "or the name of a shipped recipe.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    # A file that extends another may leave out whatever that one says.
    schema["if"] = {"required": ["extends"]}
    schema["then"] = {}
    schema["else"] = {"required": schema.pop("required")}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "memtrain recipe", **schema}


def _without_noise(schema: Any) -> Any:
    """Titles and the defaults of whole sections say nothing an editor can show."""
    if isinstance(schema, list):
        return [_without_noise(one) for one in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in cast(dict[str, Any], schema).items():
        if (key == "title" and isinstance(value, str)) or (key == "default" and isinstance(value, dict)):
            continue
        if key == "description" and isinstance(value, str):
            value = " ".join(value.split())
        kept[key] = _without_noise(value)
    return kept


def schema_text() -> str:
    """The JSON Schema as the text of a file."""
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"


_PREFACE = """# Recipe reference

Written by `make docs-reference` from the fields themselves; do not edit.

A recipe is a YAML 1.2 file: `1e-5` is a number, `on` and `yes` are text, only `true` and `false` are
switches. Tags, merge keys and doubled keys are refused; so is an unknown key, with the nearest legal one.

- `extends: other.yaml` lays this file over another (a path beside it, or the name of a shipped recipe), key
  by key; lists and single values are replaced.
- On the command line `section.key=value` overrides the file; `data.train.0.weight=2` reaches into a list.
- `${...}` is read by OmegaConf's grammar: `${optim.lr}` is the value of another key, `${.lr}` of one beside
  it, `${oc.select:key,default}` of one that may be absent, `${oc.env:NAME,default}` an environment variable
  (read as if it stood in the file), `${oc.decode:text}` what a text spells; `\\${` is a plain `${`.
- A path in a recipe is taken from the folder in which the command runs.
"""


def reference_page() -> str:
    """docs/recipe.md: every key with its values, default and effect."""
    blocks = [_PREFACE, _table("", Recipe)]
    blocks += [*_sections(Recipe, ""), _formats()]
    return "\n".join(blocks)


def _formats() -> str:
    """The rule of `data.format: auto`, and a sentence on each format, from their modules."""
    rule = (detect.__doc__ or "").strip().split("\n\n", 1)[1]
    lines = ["## Formats of a row", "", rule, "", "| format | what a row is |", "|---|---|"]
    for name, form in detect.FORMS.items():
        summary = (sys.modules[form.parse.__module__].__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{name}` | {summary} |")
    return "\n".join(lines) + "\n"


def _sections(above: type[Section], prefix: str) -> list[str]:
    blocks: list[str] = []
    for name, annotation in field_types(above).items():
        section = section_of(annotation) or section_of(item_of(annotation))
        if section is None or (prefix == "data." and name == "eval") or prefix == "data.train.":
            continue
        key = f"{prefix}{name}"
        summary = " ".join((section.__doc__ or "").split())
        blocks.append(f"## `{key}:`\n\n{summary}\n\n{_table(f'{key}.', section)}")
        blocks += _sections(section, f"{key}.")
    return blocks


def _table(prefix: str, section: type[Section]) -> str:
    lines = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    for name, annotation in field_types(section).items():
        field = section.model_fields[name]
        inner = section_of(annotation)
        summary = sentences_of(section, name)
        if inner is not None:
            takes = "a section, or null" if field.default is None else "a section"
            summary = summary or " ".join((inner.__doc__ or "").split())
        else:
            takes = describe(annotation)
        default = default_words(section, name).removeprefix(" to take the default, ").removeprefix(" to ")
        default = {"leave it unset": "not set", "take the defaults": "its defaults", "": "required"}.get(
            default, f"`{default}`"
        )
        cells = (f"`{prefix}{name}`", takes, default, summary)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
