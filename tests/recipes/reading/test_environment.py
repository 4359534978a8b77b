"""What a recipe reads from the environment is known to the run and written only by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import LaunchError
from memtrain.recipes.reading.environment import hidden, read_again, revealed
from memtrain.recipes.reading.load import LoadedRecipe, load_recipe

SECRET = "hf_s3cret-t0ken"
RECIPE = """
method: grpo
model: {path: builtin:tiny}
data: {train: "${oc.env:FOLDER}/rows.jsonl", eval: ["${data.train}", other.jsonl]}
rewards:
  functions:
    - function: exact_answer
      args: {key: "${oc.env:TOKEN}", again: "${.key}", plain: "x", where: "at-${oc.env:TOKEN}"}
train: {seed: "${oc.env:SEED}", max_steps: 2}
log: {project: "${oc.env:PROJECT,none}"}
run_dir: "${oc.env:NOT_SET,runs/x}"
"""


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedRecipe:
    for name, value in {"FOLDER": "/data/mine", "TOKEN": SECRET, "SEED": "7", "PROJECT": "p"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return load_recipe(str(tmp_path / "r.yaml"))


def dump(loaded: LoadedRecipe) -> dict[str, Any]:
    return loaded.recipe.model_dump(mode="json")


def test_the_run_knows_the_value_and_the_written_form_only_the_name(loaded: LoadedRecipe):
    args = dump(loaded)["rewards"]["functions"][0]["args"]
    assert args == {"key": SECRET, "again": SECRET, "plain": "x", "where": f"at-{SECRET}"}
    written: dict[str, Any] = hidden(dump(loaded), loaded.environment)
    assert SECRET not in json.dumps(written)
    assert "/data/mine" not in json.dumps(written)
    assert written["rewards"]["functions"][0]["args"] == {
        "key": "${oc.env:TOKEN}",
        "again": "${oc.env:TOKEN}",
        "plain": "x",
        "where": "at-${oc.env:TOKEN}",
    }
    assert written["data"]["train"][0]["source"] == "${oc.env:FOLDER}/rows.jsonl"
    assert [one["source"] for one in written["data"]["eval"]] == [
        "${oc.env:FOLDER}/rows.jsonl",
        "other.jsonl",
    ]


def test_numbers_and_defaults_stay_what_they_are(loaded: LoadedRecipe):
    written: dict[str, Any] = hidden(dump(loaded), loaded.environment)
    assert written["train"]["seed"] == 7
    assert written["run_dir"] == "runs/x"


def test_the_written_form_is_read_again_from_the_environment(loaded: LoadedRecipe):
    bare = [one.model_copy(update={"value": ""}) for one in loaded.environment]
    texts = read_again(bare, "plan.json")
    assert revealed(hidden(dump(loaded), loaded.environment), texts) == dump(loaded)


def test_a_variable_that_is_not_set_is_named(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKEN")
    with pytest.raises(
        LaunchError, match="TOKEN is not set here, and rewards.functions.0.args.key of the recipe"
    ):
        read_again(loaded.environment, "plan.json")


def test_digests_tell_values_apart_without_saying_them(loaded: LoadedRecipe):
    saved = hidden(dump(loaded), loaded.environment, with_digest=True)
    assert SECRET not in json.dumps(saved)
    assert revealed(saved, loaded.environment, with_digest=True) == dump(loaded)
    moved = [
        one.model_copy(update={"value": one.value.replace(SECRET, "other")}) for one in loaded.environment
    ]
    assert revealed(saved, moved, with_digest=True) != dump(loaded)
    assert "other" not in json.dumps(revealed(saved, moved, with_digest=True)["rewards"])


def test_words_that_a_key_must_hold_are_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("METHOD", "sft")
    (tmp_path / "r.yaml").write_text(
        "method: ${oc.env:METHOD}\nmodel: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\n"
    )
    loaded = load_recipe(str(tmp_path / "r.yaml"))
    assert loaded.environment == ()
    assert hidden(dump(loaded), loaded.environment)["method"] == "sft"
