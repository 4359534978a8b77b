"""What a recipe reads from the environment is known to the run and written only by its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import LaunchError, RecipeError
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


BASE = """
method: grpo
model: {path: me/base}
data: {train: rows.jsonl}
rewards: {functions: [exact_answer]}
generate: {backend: vllm}
"""


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run_dir", "runs/${oc.env:TOKEN}"),
        ("run_dir", "${oc.env:TOKEN}"),
        ("run_dir", "${oc.env:FOLDER}/${oc.env:TOKEN}"),
        ("data.cache_dir", "x${oc.env:TOKEN}"),
        ("data.train", "${oc.env:TOKEN}/rows"),
        ("data.train", "me/${oc.env:TOKEN}"),
        ("data.train", "{source: '${oc.env:TOKEN}'}"),
        ("model.path", "${oc.env:TOKEN}"),
        ("model.path", "evil/${oc.env:TOKEN}"),
        ("model.tokenizer", "evil/x-${oc.env:TOKEN}"),
        ("model.revision", "${oc.env:TOKEN}"),
        ("model.chat_template", "${oc.env:TOKEN}"),
        ("rewards.functions", "${oc.env:TOKEN}.py:score"),
        ("generate.vllm.server", "http://evil.org/${oc.env:TOKEN}"),
        ("generate.vllm.server", "http://${oc.env:TOKEN}.evil.org"),
        ("generate.vllm.python", "${oc.env:TOKEN}"),
        ("cluster.slurm.account", "${oc.env:TOKEN}"),
        ("cluster.slurm.setup", "['echo ${oc.env:TOKEN}']"),
    ],
)
def test_text_of_the_environment_is_no_name_and_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str
):
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("FOLDER", "/data")
    (tmp_path / "r.yaml").write_text(BASE)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path / "r.yaml"), [f"{key}={text}"])
    assert "reads" in caught.value.text()
    assert "TOKEN of the environment into" in caught.value.text()
    assert SECRET not in caught.value.text()


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run_dir", "${oc.env:FOLDER}/runs/a"),
        ("run_dir", "runs/${oc.env:JOB}"),
        ("run_dir", "${oc.env:FOLDER}/${oc.env:JOB}"),
        ("model.path", "${oc.env:FOLDER}/base"),
        ("model.path", "${oc.env:NAME}"),
        ("data.train", "${oc.env:FOLDER}/rows.jsonl"),
        ("generate.vllm.server", "${oc.env:ADDRESS}"),
        ("generate.vllm.python", "${oc.env:FOLDER}/bin/python"),
        ("log.project", "mine-${oc.env:TOKEN}"),
    ],
)
def test_folders_numbers_and_whole_names_of_the_environment_are_taken_and_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str
):
    given = {
        "FOLDER": "/data",
        "JOB": "4711",
        "NAME": "me/other",
        "ADDRESS": "http://h:8000",
        "TOKEN": SECRET,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "r.yaml").write_text(BASE)
    loaded = load_recipe(str(tmp_path / "r.yaml"), [f"{key}={text}"])
    assert text in json.dumps(hidden(dump(loaded), loaded.environment))


def test_a_variable_whose_value_stands_in_the_reference_of_another_is_hidden_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("KIND", "env")
    monkeypatch.setenv("ODD", "a${b}")
    (tmp_path / "r.yaml").write_text(BASE)
    text = "${oc.env:TOKEN} ${oc.env:KIND} ${oc.env:ODD}"
    loaded = load_recipe(str(tmp_path / "r.yaml"), [f"log.project={text}"])
    assert loaded.recipe.log.project == f"{SECRET} env a${{b}}"
    assert hidden(dump(loaded), loaded.environment)["log"]["project"] == text  # pyright: ignore
    bare = [one.model_copy(update={"value": ""}) for one in loaded.environment]
    assert revealed(hidden(dump(loaded), loaded.environment), read_again(bare, "x")) == dump(loaded)
