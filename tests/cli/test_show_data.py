"""`memtrain show-data`: what is trained and what is not, as the store has it."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: rows.jsonl}\n"
        "length: {max_length: 256, packing: bfd}\n"
    )
    return tmp_path


def test_trained_text_and_packed_rows_are_marked(capsys: pytest.CaptureFixture[str]):
    assert main(["show-data", "my.yaml", "-n", "1"]) == 0
    reported = capsys.readouterr().out
    assert "Sequence 1: 3 packed rows, " in reported
    for n in range(3):
        assert f"<|im_start|>user\nWhat is {n} + 1?<|im_end|>\n<|im_start|>assistant\n" in reported
        assert f"[[It is {n + 1}.<|im_end|>\n]]" in reported
        assert f"--- rows.jsonl:{n + 1}: " in reported
    assert reported.count("[[") == reported.count("]]") == 3


def test_the_parts_of_a_pair_are_named(capsys: pytest.CaptureFixture[str]):
    assert main(["show-data", "my.yaml", "method=dpo", "data.train=builtin:arithmetic", "length=null"]) == 2
    capsys.readouterr()
    words = ["data.train={source: builtin:arithmetic, limit: 2}", "length.packing=none", "-n", "5"]
    assert main(["show-data", "my.yaml", "method=dpo", *words]) == 0
    reported = capsys.readouterr().out
    assert "builtin:arithmetic:1, prompt: " in reported
    assert "builtin:arithmetic:2, rejected: " in reported
    assert reported.count("Sequence ") == 2


def test_rows_that_are_not_held_out_cannot_be_shown(capsys: pytest.CaptureFixture[str]):
    assert main(["show-data", "my.yaml", "--eval"]) == 2
    assert "the recipe holds out no rows" in capsys.readouterr().err
    assert main(["show-data", "my.yaml", "--eval", "data.eval_fraction=0.4", "-n", "9"]) == 0
    assert capsys.readouterr().out.count("--- rows.jsonl:") == 1


def test_a_dataset_is_shown_without_a_recipe_as_the_method_of_its_columns(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["show-data", "rows.jsonl", "-n", "1"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("Rows of rows.jsonl, as sft has them")
    assert "[[It is 1.<|im_end|>\n]]" in reported
    (folder / "pairs").mkdir()
    (folder / "pairs" / "a.jsonl").write_text('{"prompt": "p", "chosen": "yes", "rejected": "no"}\n')
    assert main(["show-data", "pairs", "--model", "builtin:tiny"]) == 0
    reported = capsys.readouterr().out
    assert reported.startswith("Rows of pairs, as dpo has them")
    assert "Encoded with" not in reported
    assert main(["show-data", "pairs", "model.path=builtin:tiny"]) == 0
    assert capsys.readouterr().out == reported
    assert "a.jsonl:1, chosen: " in reported


def test_prompts_alone_lead_to_a_recipe_with_rewards(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n')
    assert main(["show-data", "prompts.jsonl"]) == 2
    reported = capsys.readouterr().err
    assert "the rows of prompts.jsonl are prompts without answers" in reported
    assert "memtrain show-data my.yaml data.train=prompts.jsonl" in reported
