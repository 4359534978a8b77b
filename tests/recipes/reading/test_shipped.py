import re
from pathlib import Path

import pytest

import memtrain
from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.shipped import configs_dir, find_recipe, header, shipped_names
from memtrain.recipes.registry import METHODS

NAMES = shipped_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_is_valid_and_its_folder_names_its_method(name: str):
    recipe = load_recipe(name).recipe
    assert recipe.method in METHODS
    folder, _, file = name.rpartition("/")
    verb = METHODS[recipe.method].command
    assert folder in (verb, "") or (folder == "smoke" and f"{file}-".startswith(f"{verb}-"))


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_says_what_it_trains_needs_runs_and_leads_to(name: str):
    path = configs_dir() / f"{name}.yaml"
    lines = header(path)
    verb = METHODS[load_recipe(name).recipe.method].command
    assert lines[0].endswith((".", "?"))
    needs = next(line for line in lines if line.startswith("needs:"))
    assert re.search(r"predicted|measured|CPU core", needs)
    assert "GiB" not in needs or "/" not in name or re.search(r"predicted|measured", needs)
    command = next(line for line in lines if line.startswith("run:"))
    assert command == (f"run:    memtrain {verb} {name}" if "/" in name else f"run:    memtrain {name}")
    assert next(line for line in lines if line.startswith("expect:"))


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_is_short_and_names_its_schema(name: str):
    lines = (configs_dir() / f"{name}.yaml").read_text().splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 110
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(.*)", lines[0])
    assert schema is not None
    assert ((configs_dir() / f"{name}.yaml").parent / schema[1]).is_file()


@pytest.mark.parametrize("name", NAMES)
def test_shipped_recipes_write_only_what_differs_from_the_defaults(name: str):
    loaded = load_recipe(name)
    differs = loaded.recipe.model_dump(exclude_defaults=True)
    for section, keys in loaded.resolved.items():
        if isinstance(keys, dict) and section not in ("data", "model"):
            assert set(keys) == set(differs[section]), section


def test_small_models_come_before_large_ones():
    assert NAMES.index("sft/qwen3-8b-lora") < NAMES.index("sft/qwen3-14b-lora")


def test_a_file_goes_before_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "sft.yaml").write_text("")
    assert find_recipe("smoke/sft.yaml") == Path("smoke/sft.yaml")
    assert find_recipe("smoke/sft") == configs_dir() / "smoke" / "sft.yaml"


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("qwen3-0.6b-lorra", "did you mean sft/qwen3-0.6b-lora"),
        ("sft/Qwen3-8B-lora", "did you mean sft/qwen3-8b-lora"),
        ("zzz", "`memtrain recipes` lists the shipped recipes"),
        ("configs/smoke/sft.yaml", "take the shipped recipe by its name: smoke/sft"),
        ("mine.yaml", "did you mean mine2.yaml?"),
    ],
)
def test_a_miss_names_the_nearest(word: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine2.yaml").write_text("")
    with pytest.raises(RecipeError) as caught:
        find_recipe(word)
    assert caught.value.faults[0].fix.startswith(advice)


def test_recipes_inside_the_package_are_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "memtrain" / "configs").mkdir(parents=True)
    monkeypatch.setattr(memtrain, "__file__", str(tmp_path / "memtrain" / "__init__.py"))
    assert configs_dir() == tmp_path / "memtrain" / "configs"
