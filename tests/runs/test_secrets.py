"""A secret of the environment is in no file that a run leaves."""

import pytest

SECRET = "hf_s3cret-t0ken"


@pytest.fixture
def recipe(runs, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe of `runs` with a project, a cache and a base model that the environment names."""
    cache = runs.folder / SECRET
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("MY_FOLDER", str(runs.folder))
    path = runs.folder / "secret.yaml"
    text = runs.recipe.read_text().replace(
        "eval_fraction: 0.1", "eval_fraction: 0.1\n  cache_dir: ${oc.env:MY_FOLDER}/cache"
    )
    path.write_text(text + "log: {project: 'mine-${oc.env:MY_SECRET}'}\nsave: {every_steps: 1}\n")
    assert not cache.exists()
    return str(path)


def files_with(folder, word: str) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and word.encode() in path.read_bytes()
    )


def test_no_file_of_a_run_holds_it_and_the_run_goes_on_with_it(runs, recipe: str, monkeypatch):
    folder = runs.done("run", "train.max_steps=2", "optim.schedule=constant", recipe=recipe)
    assert files_with(folder, SECRET) == []
    reference = "mine-${oc.env:MY_SECRET}"
    for name in ("recipe.yaml", "plan.json", "checkpoints/step-000002/manifest.json"):
        assert reference in (folder / name).read_text(), name
    ended = runs.run("run", "train.max_steps=3", "optim.schedule=constant", recipe=recipe)
    assert ended.code == 0, ended.err
    assert files_with(folder, SECRET) == []
    again = runs.run("again", recipe=str(folder / "recipe.yaml"))
    assert again.code == 0, again.err
    monkeypatch.delenv("MY_SECRET")
    refused = runs.run("refused", recipe=str(folder / "recipe.yaml"))
    assert refused.code == 2
    assert "MY_SECRET is not set" in refused.err


def test_a_plan_is_run_where_its_variables_are_set(runs, recipe: str, monkeypatch):
    from memtrain.errors import LaunchError
    from memtrain.memory.plan.plan import read_plan

    ended = runs.run("run", "--dry-run", recipe=recipe)
    assert ended.code == 0, ended.err
    file = runs.folder / "run" / "plan.json"
    assert SECRET not in file.read_text()
    assert read_plan(file).recipe.log.project == f"mine-{SECRET}"
    monkeypatch.delenv("MY_SECRET")
    with pytest.raises(
        LaunchError, match="MY_SECRET is not set here, and log.project of the recipe reads it"
    ):
        read_plan(file)
    assert read_plan(file, reveals=False).recipe.log.project == "mine-${oc.env:MY_SECRET}"


def test_a_secret_with_the_signs_of_a_reference_is_in_no_file_and_text_stays_text(runs, monkeypatch):
    """`${` in a variable's value left it in recipe.yaml as it was."""
    odd = "s3cret${model.path}x"
    monkeypatch.setenv("MY_SECRET", odd)
    path = runs.folder / "odd.yaml"
    text = "log: {project: '\\${x} ${oc.env:MY_SECRET}'}\n"
    path.write_text(runs.recipe.read_text() + text)
    ended = runs.run("odd", "--dry-run", recipe=str(path))
    assert ended.code == 0, ended.err
    folder = runs.folder / "odd"
    assert files_with(folder, "s3cret") == []
    from memtrain.recipes.reading.load import load_recipe

    again = load_recipe(str(folder / "recipe.yaml"))
    assert again.recipe.log.project == f"${{x}} {odd}"
