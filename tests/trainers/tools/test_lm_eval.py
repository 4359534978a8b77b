"""Benchmarks of lm-evaluation-harness: its command, its results, and what fails."""

import json
import os
import sys
from pathlib import Path

import pytest

from memtrain.errors import LaunchError
from memtrain.recipes.sections.evaluation import LmEval
from memtrain.recipes.sections.model import Model
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.report.benchmarks import RESULT_FILE, read_scores, rows_of
from memtrain.trainers.tools import lm_eval, trained_model
from memtrain.trainers.tools.trained_model import TrainedModel

ASKED = LmEval(tasks=("gsm8k", "mine"), limit=5, include_path="tasks", apply_chat_template=True)


def model(folder: Path, *, is_adapter: bool = False) -> TrainedModel:
    config = {"base_model_name_or_path": "me/base"} if is_adapter else {}
    return TrainedModel(folder, folder / "final", "run", config, is_adapter)


def test_the_command_names_the_model_and_what_is_asked():
    words = lm_eval.lm_eval_words(model(Path("runs/a")), ASKED, Path("out"), "cpu")
    assert words[:6] == [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
    assert words[7] == "pretrained=runs/a/final,dtype=auto"
    assert " ".join(words[8:]) == (
        "--tasks gsm8k,mine --batch_size 8 --device cpu --output_path out --limit 5 --include_path tasks "
        "--apply_chat_template"
    )


def test_an_adapter_is_put_on_its_base_at_its_revision_with_its_own_tokenizer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The base's own tokenizer has neither the chat template of the recipe nor its end of turns."""
    recipe = Model(path="me/base", revision="v2")
    monkeypatch.setattr(trained_model, "recipe_of", lambda _: recipe)
    given = model(tmp_path, is_adapter=True)
    given.folder.mkdir()
    (given.folder / "tokenizer_config.json").write_text("{}")
    words = lm_eval.lm_eval_words(given, ASKED, Path("out"), "cpu")
    final = tmp_path / "final"
    assert words[7] == f"pretrained=me/base,peft={final},tokenizer={final},revision=v2,dtype=auto"


def test_an_adapter_that_no_other_program_puts_on_its_base_is_merged_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    merged: list[Path] = []

    def merge(run: Path) -> None:
        merged.append(run)
        (run / "merged").mkdir()
        (run / "merged" / "config.json").write_text("{}")

    monkeypatch.setattr("memtrain.trainers.tools.merge.merge_run", merge)
    final = tmp_path / "final"
    final.mkdir()
    (final / "adapter_config.json").write_text("{}")
    said: list[str] = []
    asked = TrainedModel(tmp_path, final, "run", {"base_model_name_or_path": None}, True)
    for _ in range(2):
        found = lm_eval.beside_base_or_merged(asked, said.append)
        assert (found.folder, found.is_adapter) == (tmp_path / "merged", False)
    assert merged == [tmp_path]
    assert "the harness takes no adapter of a base that is neither a folder nor on the hub" in said[0]


def test_an_adapter_that_learned_another_end_of_turns_is_merged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The harness generates with the base's configuration: answers would go on to their limit."""
    base, final = tmp_path / "base", tmp_path / "final"
    for folder, file, text in (
        (base, "config.json", '{"eos_token_id": 2}'),
        (final, "generation_config.json", '{"eos_token_id": [2, 7]}'),
        (final, "adapter_config.json", "{}"),
        (tmp_path / "merged", "config.json", "{}"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    asked = TrainedModel(tmp_path, final, "run", {"base_model_name_or_path": str(base)}, True)
    assert lm_eval.beside_base_or_merged(asked, print).folder == tmp_path / "merged"
    (base / "config.json").write_text('{"eos_token_id": [2, 7]}')
    assert lm_eval.beside_base_or_merged(asked, print) == asked


RESULTS = {
    "gsm8k": {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.0125,
        "sample_len": 5,
    },
    "mine": {"acc,none": 1, "acc_stderr,none": "N/A"},
}


def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str) -> None:
    """A module of that name that does `body` with the folder for its results."""
    (tmp_path / "lm_eval.py").write_text(
        "import json, pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--output_path') + 1]) / 'm'\n"
        f"out.mkdir(parents=True)\n{body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(lm_eval, "check_installed", lambda: None)


def test_its_scores_are_read_and_its_results_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {"results": RESULTS, "lm_eval_version": "0.4"}
    harness(monkeypatch, tmp_path, f"(out / 'results_1.json').write_text({json.dumps(given)!r})")
    scores = lm_eval.run_lm_eval(model(tmp_path), ASKED, "cpu", lambda text: None)
    assert rows_of(scores) == [
        ("gsm8k", "exact_match, strict-match", "0.25 ±0.013", "5"),
        ("mine", "acc", "1", ""),
    ]
    kept = json.loads((tmp_path / RESULT_FILE).read_text())
    assert kept["results"] == RESULTS
    assert kept["command"][3] == "run"


def test_a_failure_is_reported_by_the_end_of_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    harness(monkeypatch, tmp_path, "sys.exit('no task mine')")
    with pytest.raises(LaunchError, match="failed: no task mine"):
        lm_eval.run_lm_eval(model(tmp_path), ASKED, "cpu", lambda text: None)
    harness(monkeypatch, tmp_path, "raise ValueError('no task mine')")
    with pytest.raises(LaunchError, match="failed: ValueError: no task mine\n"):
        lm_eval.run_lm_eval(model(tmp_path), ASKED, "cpu", lambda text: None)
    assert not (tmp_path / RESULT_FILE).exists()


def test_without_the_package_a_run_is_refused_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    from memtrain.__main__ import main

    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "smoke/sft", "eval.lm_eval.tasks=[gsm8k]", "--run-dir", "run"]) == 5
    reported = capsys.readouterr().err
    assert "lm-evaluation-harness (lm_eval) is asked for but not installed" in reported
    assert "pip install 'memtrain[lm-eval]'" in reported
    assert not (tmp_path / "run").exists()


def test_a_benchmark_that_the_harness_does_not_know_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It was found when the training was over."""
    (tmp_path / "lm_eval.py").write_text("print('Validating tasks'); print('Tasks not found: gsm9k, mine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(lm_eval, "check_installed", lambda: None)
    asked = LmEval(tasks=("gsm9k", "mine", "gone.yaml"))
    with pytest.raises(LaunchError, match="has no benchmark gone.yaml and no gsm9k and no mine") as caught:
        lm_eval.check_asked(asked)
    assert caught.value.faults[0].where == "eval.lm_eval.tasks"


def test_the_report_and_the_card_have_the_scores_until_the_run_goes_on(tmp_path: Path):
    folder = RunFolder(tmp_path)
    (tmp_path / RESULT_FILE).write_text(json.dumps({"results": RESULTS}))
    assert [one.value for one in read_scores(folder)] == [0.25, 1.0]
    os.utime(tmp_path / RESULT_FILE, (1, 1))
    folder.status.write_text("{}")
    assert read_scores(folder) == ()
