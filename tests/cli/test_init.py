from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.commands.quickstart import _print_sample
from memtrain.recipes.registry import METHODS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_the_recipe_it_writes_is_valid(method: str, capsys: pytest.CaptureFixture[str]):
    assert main(["init", method, "-o", "my.yaml"]) == 0
    assert capsys.readouterr().out == "wrote my.yaml\n"
    assert main(["check", "my.yaml"]) == 0


def test_without_a_file_the_recipe_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "sft"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("# yaml-language-server: $schema=")
    assert reported.endswith("\n")
    assert max(map(len, reported.splitlines()[1:])) <= 100


def test_a_file_that_exists_is_kept(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "my.yaml").write_text("mine")
    assert main(["init", "sft", "-o", "my.yaml"]) == 2
    assert "my.yaml exists already" in capsys.readouterr().err
    assert (folder / "my.yaml").read_text() == "mine"
    assert main(["init", "sft", "-o", "my.yaml", "--force"]) == 0
    assert (folder / "my.yaml").read_text() != "mine"


def test_an_unknown_method_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "sftt"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown method 'sftt'\n   at: the command line\n  try: did you mean sft?\n"
    )


def test_a_loss_that_others_call_a_method_is_named_as_a_loss(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["init", "ORPO"]) == 2
    assert "orpo is a loss of dpo: memtrain init dpo, and dpo.loss: orpo" in capsys.readouterr().err
    (folder / "my.yaml").write_text("method: orpo\nmodel: {path: builtin:tiny}\ndata: {train: x.jsonl}\n")
    assert main(["check", "my.yaml"]) == 2
    assert "write method: dpo, and dpo.loss: orpo" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_reported(capsys: pytest.CaptureFixture[str]):
    assert main(["init", "sft", "-o", "nowhere/my.yaml"]) == 2
    assert "nowhere/my.yaml cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["online-dpo", "online_dpo", "Online DPO", "OnlineDPO"])
def test_every_spelling_of_a_method_is_known(spelling: str, capsys: pytest.CaptureFixture[str]):
    assert main(["init", spelling]) == 0
    assert "method: online_dpo" in capsys.readouterr().out


@pytest.mark.parametrize("spelling", ["reward-model", "Reward Modeling", "rm", "reward_modelling"])
def test_words_of_other_trainers_for_a_reward_model_are_known(
    spelling: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["init", spelling]) == 0
    assert "method: reward\n" in capsys.readouterr().out


@pytest.mark.parametrize("spelling", ["distillation", "GKD", "Distil"])
def test_distillation_is_known_by_the_words_of_others(spelling: str, capsys: pytest.CaptureFixture[str]):
    assert main(["init", spelling]) == 0
    assert "\nmethod: distill\n" in capsys.readouterr().out


def test_a_misspelled_dpo_is_not_taken_for_ppo(capsys: pytest.CaptureFixture[str]):
    for words in (["init", "dppo"], ["dppo", "rows.jsonl"]):
        assert main(words) == 2
        assert "did you mean dpo or ppo?" in capsys.readouterr().err
    assert main(["check", "quickstart", "method=dppo"]) == 2
    assert "did you mean 'dpo' or 'ppo'?" in capsys.readouterr().err


def test_the_sample_of_the_quickstart_keeps_its_lines(capsys: pytest.CaptureFixture[str]):
    _print_sample([("sample: given", "1 + 1?\n"), ("sample: written", "1 + 1 = 2\n#### 2")])
    assert capsys.readouterr().out == "\nsample: given\n1 + 1?\n\nsample: written\n1 + 1 = 2\n#### 2\n"
