"""A run that began with all turns of conversations in its loss goes on so; the new default is said once."""

import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.__main__ import main
from memtrain.cli.output.once import first_time
from memtrain.cli.plan.keep_plan import Begun, at_its_turns
from memtrain.recipes.recipe import Recipe

TURNS = [("user", "Hello?"), ("assistant", "Yes."), ("user", "Bye."), ("assistant", "Ciao.")]
ROW = {"messages": [{"role": role, "content": content} for role, content in TURNS]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    (tmp_path / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: chat.jsonl}\nlength: {max_length: 256}\n"
        "train: {max_steps: 2, batch_size: 4}\n"
    )
    return tmp_path


def recipe(**data: Any) -> Recipe:
    said = {"method": "sft", "model": {"path": "builtin:tiny"}, "data": {"train": "chat.jsonl", **data}}
    return Recipe.model_validate(said)


def asked(made: Recipe) -> bool | None:
    return made.data.assistant_only_loss


@pytest.mark.parametrize(("saved", "kept"), [(False, False), (True, None), (None, None)])
def test_a_recipe_that_leaves_it_open_keeps_all_turns_of_its_run(folder: Path, saved, kept):
    run = folder / "run"
    begun = Begun(1, {"data": {"assistant_only_loss": saved}}, {})
    assert asked(at_its_turns(recipe(), run, begun)) is kept
    assert asked(at_its_turns(recipe(assistant_only_loss=True), run, begun)) is True
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"recipe": {"data": {"assistant_only_loss": saved}}}))
    assert asked(at_its_turns(recipe(), run, None)) is kept


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"recipe": 1}', '{"recipe": {"data": []}}', "\0"])
def test_a_plan_that_says_nothing_keeps_nothing(folder: Path, text):
    if text is not None:
        (folder / "plan.json").write_text(text)
    assert asked(at_its_turns(recipe(), folder, None)) is None


def test_the_turns_of_the_plan_are_kept_and_told_and_a_new_run_has_the_default(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["sft", "my.yaml", "--dry-run", "data.assistant_only_loss=false"]) == 0
    assert "New default" not in capsys.readouterr().out
    assert main(["sft", "my.yaml", "--dry-run"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Trained: all turns (data.assistant_only_loss: false)" in told
    assert "trained turns all as the run began" in told
    assert (
        json.loads((folder / "runs/my/plan.json").read_text())["recipe"]["data"]["assistant_only_loss"]
        is False
    )
    new = ["sft", "my.yaml", "--dry-run", "--no-resume"]
    for is_first in (True, False):
        assert main(new) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "Trained: the assistant's turns (data.assistant_only_loss: false trains on all)" in told
        assert "as the run began" not in told
        assert ("New default: conversations are trained on the assistant's turns" in told) is is_first


def test_a_sentence_that_cannot_be_remembered_is_said_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("MEMTRAIN_CACHE", str(folder / "file"))
    assert [first_time("x"), first_time("x")] == [True, True]
