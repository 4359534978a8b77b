import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.shipped import configs_dir, shipped_names
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.reference.json_schema import SCHEMA_FILE, recipe_schema, reference_page, schema_text
from memtrain.recipes.reference.starter import starter_recipe

ROOT = Path(__file__).parents[3]
OF_SOURCES = re.compile(r"\.columns\.|^data\.train\.prompt_format\.")
"""Keys of a source that are listed once, with `data`'s own."""


def test_the_reference_page_is_up_to_date():
    assert (ROOT / "docs" / "recipe.md").read_text() == reference_page(), "run make docs-reference"


def test_the_schema_beside_the_shipped_recipes_is_up_to_date():
    assert (configs_dir() / SCHEMA_FILE).read_text() == schema_text(), "run make docs-reference"


def test_the_reference_page_has_every_key():
    page = reference_page()
    listed_with_train = [key for key in every_key(Recipe) if not key.startswith("data.eval.")]
    missing = [key for key in listed_with_train if f"| `{key}` |" not in page and not OF_SOURCES.search(key)]
    assert not missing


def test_every_key_has_a_sentence_for_the_reader():
    for line in reference_page().splitlines():
        if line.startswith("| `"):
            assert len(line.split(" | ")[-1].strip(" |")) > 10, line


def allowed(schema: dict[str, Any], value: Any, top: dict[str, Any]) -> bool:
    """An independent reading of the few words of JSON Schema that ours uses."""
    if "$ref" in schema:
        return allowed(top["$defs"][schema["$ref"].split("/")[-1]], value, top)
    if "anyOf" in schema:
        return any(allowed(one, value, top) for one in schema["anyOf"])
    if "const" in schema:
        return value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema.get("type")
    if kind == "object":
        return isinstance(value, dict) and all(
            allowed(schema["properties"][key], inner, top) if key in schema.get("properties", {}) else False
            for key, inner in value.items()
            if schema.get("additionalProperties") is False
        )
    if kind == "array":
        return isinstance(value, list) and all(allowed(schema["items"], one, top) for one in value)
    kinds: dict[str, tuple[type, ...]] = {
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    return kind is None or (
        isinstance(value, kinds[kind]) and (kind == "boolean" or not isinstance(value, bool))
    )


@pytest.mark.parametrize("name", shipped_names())
def test_the_schema_allows_every_shipped_recipe(name: str):
    schema: dict[str, Any] = json.loads(schema_text())
    written = dict(load_recipe(name).resolved)
    assert allowed(schema, written, schema)
    assert not allowed(schema, {**written, "lenght": {}}, schema)


@pytest.mark.parametrize("value", ["24GiB", "auto", 1024, "${oc.env:BUDGET}"])
def test_the_schema_takes_sizes_as_people_write_them(value: object):
    schema: dict[str, Any] = json.loads(schema_text())
    assert allowed(schema, {"memory": {"budget": value}}, schema)


def test_every_field_of_the_schema_says_what_it_does():
    definitions: dict[str, Any] = recipe_schema()["$defs"]  # pyright: ignore[reportAssignmentType]
    silent = [
        f"{name}.{key}"
        for name, section in definitions.items()
        for key, inner in section.get("properties", {}).items()
        if "description" not in inner and "$ref" not in inner
    ]
    assert not silent


def test_the_starter_is_a_valid_recipe_and_its_options_too(tmp_path: Path):
    text = starter_recipe("sft")
    (tmp_path / "a.yaml").write_text(text)
    assert load_recipe(str(tmp_path / "a.yaml"), method="sft").recipe.data.eval_fraction == 0.05
    opened = text.replace("  #quantize: none\n", "").replace("  #", "  #").splitlines()
    lines = [
        line.replace("#", "", 1) if line.startswith("  #") and line[3] != " " else line for line in opened
    ]
    (tmp_path / "b.yaml").write_text("\n".join(lines))
    recipe = load_recipe(str(tmp_path / "b.yaml")).recipe
    assert recipe.length.packing == "bfd"
    assert recipe.model.adapter is not None
    assert yaml.safe_load(text)["method"] == "sft"
