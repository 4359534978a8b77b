"""Benchmarks of lm-evaluation-harness: its command, its results, and what fails."""

import json
import sys
from pathlib import Path

import pytest

from memtrain.errors import LaunchError
from memtrain.recipes.sections.evaluation import LmEval
from memtrain.trainers.tools import lm_eval
from memtrain.trainers.tools.trained_model import TrainedModel

ASKED = LmEval(tasks=("gsm8k", "mine"), limit=5, include_path="tasks", apply_chat_template=True)


def model(folder: Path, *, is_adapter: bool = False) -> TrainedModel:
    config = {"base_model_name_or_path": "me/base"} if is_adapter else {}
    return TrainedModel(folder, folder / "final", "run", config, is_adapter)


@pytest.mark.parametrize(("is_adapter", "place"), [(False, "final"), (True, "me/base,peft=")])
def test_the_command_names_the_model_and_what_is_asked(is_adapter: bool, place: str):
    words = lm_eval.lm_eval_words(model(Path("runs/a"), is_adapter=is_adapter), ASKED, Path("out"), "cpu")
    assert words[:6] == [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
    assert place in words[7]
    assert words[7].endswith("runs/a/final,dtype=auto")
    assert " ".join(words[8:]) == (
        "--tasks gsm8k,mine --batch_size 8 --device cpu --output_path out --limit 5 --include_path tasks "
        "--apply_chat_template"
    )


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
    assert lm_eval.rows_of(scores) == [
        ("gsm8k", "exact_match, strict-match", "0.25 ±0.013"),
        ("mine", "acc", "1"),
    ]
    kept = json.loads((tmp_path / lm_eval.RESULT_FILE).read_text())
    assert kept["results"] == RESULTS
    assert kept["command"][3] == "run"


def test_a_failure_is_reported_by_the_end_of_its_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    harness(monkeypatch, tmp_path, "sys.exit('no task mine')")
    with pytest.raises(LaunchError, match="failed: no task mine"):
        lm_eval.run_lm_eval(model(tmp_path), ASKED, "cpu", lambda text: None)
    assert not (tmp_path / lm_eval.RESULT_FILE).exists()


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
