from pathlib import Path

import pytest

from memtrain.__main__ import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata:\n  train:\n    - {source: a.jsonl, weight: 2}\n"
        "    - {source: b.jsonl, weight: 1}\nmemory: {budget: 24GiB}\n"
    )
    return tmp_path


def test_a_valid_recipe_is_shown_with_where_each_key_was_said(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "optim.lr=1e-4"]) == 0
    assert capsys.readouterr().out == (
        "my.yaml is a valid sft recipe.\n"
        "\n"
        "key            value                                         written at\n"
        "method         sft                                           my.yaml:1:1\n"
        "model.path     builtin:tiny                                  my.yaml:2:9\n"
        "data.train     a.jsonl (weight: 2.0); b.jsonl (weight: 1.0)  my.yaml:4:3\n"
        "memory.budget  24GiB                                         my.yaml:7:10\n"
        "optim.lr       0.0001                                        override `optim.lr=1e-4`\n"
        "\n"
        "Every other key has its default; --all shows them.\n"
    )


def test_all_shows_the_defaults_too(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "my.yaml", "--all"]) == 0
    told = capsys.readouterr().out
    assert "memory.loss_chunk_size " in told
    assert "64MiB" in told
    assert "default\n" in told


def test_a_wrong_recipe_ends_with_2_and_every_fault_on_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    (folder / "my.yaml").write_text(
        "method: sft\nmodel: {path: builtin:tiny}\ndata: {trian: x}\nlenght: {}\n"
    )
    assert main(["check", "my.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: data.trian: unknown key\n"
        "   at: my.yaml:3:8\n"
        "  try: did you mean 'train'?\n"
        "error: lenght: unknown key\n"
        "   at: my.yaml:4:1\n"
        "  try: did you mean 'length'?\n"
    )


def test_a_shipped_recipe_is_checked_by_its_name(capsys: pytest.CaptureFixture[str]):
    assert main(["check", "sft/qwen3-0.6b-lora"]) == 0
    assert "is a valid sft recipe." in capsys.readouterr().out
