"""Recipes made to break the reading: each is refused with its place, in time that grows with its length."""

import time
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.yaml_tree import MOST_FAULTS, visible

GOOD = "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\n"


def refused(folder: Path, text: str) -> RecipeError:
    (folder / "r.yaml").write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(str(folder / "r.yaml"))
    assert all(fault.what and fault.where and fault.fix for fault in error.value.faults[:MOST_FAULTS])
    return error.value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            GOOD + "run_dir: '" + "${" * 2000 + "a" + "}" * 2000 + "'\n",
            "more than 20 ${...} inside each other",
        ),
        (GOOD + f"run_dir: {'x' * 300}\n", "run_dir: 'xxx"),
        (GOOD.replace("builtin:tiny", "./" + "x" * 300), "model.path: './xxx"),
        (GOOD.replace("builtin:arithmetic", f"[{'x' * 300}.jsonl]"), "data.train.0: 'xxx"),
        (f"extends: {'y' * 300}\n{GOOD}", "is not a file name"),
        (GOOD + 'run_dir: "a\\0b"\n', "run_dir: holds U+0000"),
        (GOOD + 'log: {project: "\\ud800"}\n', "log.project: holds U+D800, half of a surrogate pair"),
    ],
)
def test_texts_that_nothing_can_hold_are_refused(text: str, said: str, tmp_path: Path):
    assert said in refused(tmp_path, text).text()


def test_letters_that_nobody_sees_are_reported_as_escapes(tmp_path: Path):
    text = refused(tmp_path, GOOD + "opt\u200bim: {lr: 1}\n\u202emodel2: 3\n").text()
    assert "opt\\u200bim: unknown key" in text
    assert "\\u202emodel2: unknown key" in text
    assert text.replace("\n", "").isprintable()
    assert visible("a\x1b[31m\x00\u2028b\nc") == "a\\x1b[31m\\x00\\u2028b\nc"


def test_fifteen_thousand_unknown_keys_are_reported_in_short(tmp_path: Path):
    """9 s when each was compared with every key of every tool; now 50 are."""
    text = GOOD + "".join(f"key_{i}: {i}\n" for i in range(15_000))
    start = time.process_time()
    error = refused(tmp_path, text)
    assert time.process_time() - start < 6
    assert len(error.faults) == MOST_FAULTS + 1
    assert "14,950 more faults are not shown" in error.faults[-1].what


def test_one_weight_of_one_loss_is_a_number(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(GOOD.replace("sft", "dpo") + "dpo: {loss_weights: 2.0}\n")
    recipe = load_recipe(str(tmp_path / "r.yaml")).recipe
    assert recipe.dpo is not None
    assert recipe.dpo.loss_weights == (2.0,)


@pytest.mark.parametrize(
    "words", [["sft", "smoke/sft", "--run-dir", "x" * 300], ["check", "x" * 300 + ".yaml"]]
)
def test_a_name_on_the_command_line_that_no_file_system_takes_is_reported(words: list[str], capsys):
    from memtrain.__main__ import main

    assert main(words) in (2, 5)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.startswith("error: ")
