"""`memtrain plan MODEL` and `memtrain sft DATASET --model MODEL`: the shortest words that mean something."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.plan.model_table import WAYS, is_model, rows_of, table_of
from memtrain.cli.plan.recipe_of_dataset import write_recipe
from memtrain.recipes.reading.load import load_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n' * 4)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", True),
        ("Qwen/Qwen3-8B", True),
        ("my.yaml", False),
        ("sft/qwen3", False),
        ("rows.jsonl", False),
    ],
)
def test_a_model_is_no_recipe(folder: Path, name: str, expected: bool):
    assert is_model(name) is expected


def test_every_way_is_planned_on_every_card(folder: Path):
    cells = table_of("tiny", ["length.max_length=256"], cards=("t4",))
    assert [cell.way for cell in cells] == list(WAYS)
    needs = [cell.answer.chosen.need_bytes for cell in cells if cell.answer is not None]
    assert len(needs) == 3
    assert all(0 < need < 16 * 2**30 for need in needs)
    assert all(cell.answer.question.asked.recipe.length.max_length == 256 for cell in cells if cell.answer)
    assert [row[1] for row in rows_of(cells)] == ["T4"] * 3


def test_a_model_that_is_too_large_says_its_least_need(folder: Path):
    (full,) = [cell for cell in table_of("Qwen/Qwen3-8B", [], cards=("t4",)) if cell.way == "full"]
    assert full.answer is None
    assert full.why_not.startswith("needs ")
    assert full.why_not.endswith("GiB at least")


def test_options_of_one_plan_are_refused_for_a_model(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "tiny", "--gpu", "t4"]) == 2
    assert "a model is planned for common cards" in capsys.readouterr().err


def test_a_dataset_and_a_model_write_the_recipe_that_runs(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["sft", "rows.jsonl", "--model", "builtin:tiny", "train.max_steps=2", "--dry-run"]
    assert main(words) == 0
    assert "Wrote rows-sft.yaml: the recipe of this run." in capsys.readouterr().out
    recipe = load_recipe("rows-sft.yaml").recipe
    assert (recipe.method, recipe.model.path, recipe.train.max_steps) == ("sft", "builtin:tiny", 2)
    assert (folder / "runs" / "rows-sft" / "plan.json").is_file()
    assert main(words) == 0
    capsys.readouterr()
    (folder / "runs" / "rows-sft" / "metrics.jsonl").touch()  # as a run leaves it
    assert main([*words, "train.seed=3"]) == 0
    assert "Wrote rows-sft-2.yaml: the recipe of this run." in capsys.readouterr().out


def test_a_dataset_alone_asks_for_its_model(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["sft", "rows.jsonl"]) == 2
    assert "memtrain sft rows.jsonl --model MODEL" in capsys.readouterr().err
    assert main(["train", "rows.jsonl", "--model", "builtin:tiny", "method=sft"]) == 2
    assert "a dataset alone does not say the method" in capsys.readouterr().err


def test_train_takes_the_method_of_the_columns(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "yes", "rejected": "no"}\n')
    assert main(["train", "pairs.jsonl", "--model", "builtin:tiny", "train.max_steps=1", "--dry-run"]) == 0
    assert "Wrote pairs-dpo.yaml: the recipe of this run." in capsys.readouterr().out
    assert main(["plan", "runs/pairs-dpo"]) == 2
    (folder / "runs" / "pairs-dpo" / "final").mkdir()
    assert main(["plan", "runs/pairs-dpo"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        "give the recipe of the run (runs/pairs-dpo/recipe.yaml), or its model (runs/pairs-dpo/final)"
        in shown
    )


def test_a_file_of_ones_own_is_left_as_it_is(folder: Path):
    (folder / "rows-online_dpo.yaml").write_bytes(b"method: sft\n\xff")
    words = ["rewards.functions=[exact_answer]"]
    assert write_recipe("online_dpo", "rows.jsonl", "builtin:tiny", words).name == "rows-online_dpo-2.yaml"
    assert (folder / "rows-online_dpo.yaml").read_bytes() == b"method: sft\n\xff"


def test_the_recipe_of_a_refused_command_is_not_in_the_way(folder: Path, capsys: pytest.CaptureFixture[str]):
    write_recipe("sft", "rows.jsonl", "builtin:tiny", ["optim.lr=1"])
    path = write_recipe("sft", "rows.jsonl", "builtin:tiny", [])
    assert "kept as rows-sft.yaml.bak" in " ".join(capsys.readouterr().out.split())
    assert "lr: 1" in Path(f"{path}.bak").read_text()
    assert "lr: 1" not in path.read_text()
    (folder / "runs" / "rows-sft").mkdir(parents=True)  # as a dry run leaves it
    write_recipe("sft", "rows.jsonl", "builtin:tiny", ["optim.lr=2"])
    (folder / "runs" / "rows-sft" / "metrics.jsonl").touch()
    other = write_recipe("sft", "rows.jsonl", "builtin:tiny", ["optim.lr=1"])
    assert other.name == "rows-sft-2.yaml"
    assert write_recipe("sft", "rows.jsonl", "builtin:tiny", ["optim.lr=1"]) == other
    assert write_recipe("sft", "rows.jsonl", "builtin:tiny", ["optim.lr=2"]).name == "rows-sft.yaml"


def test_the_folder_of_a_run_stands_for_its_model(folder: Path, capsys: pytest.CaptureFixture[str]):
    final = folder / "runs" / "one" / "final"
    final.mkdir(parents=True)
    (final.parent / "plan.json").write_text("{}")
    path = write_recipe("sft", "rows.jsonl", "runs/one", [])
    assert load_recipe(str(path)).recipe.model.path == "runs/one/final"
    assert main(["check", str(path), "model.path=runs/one"]) == 5
    shown = capsys.readouterr().err
    assert "runs/one is the folder of a run, not a model" in shown
    assert "give its model: runs/one/final" in shown


def test_an_adapter_is_no_model_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "run/final").mkdir(parents=True)
    own = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "r": 8, "lora_alpha": 16}
    for place, file in (("run", "plan.json"), ("run/final", "adapter_config.json")):
        (folder / place / file).write_text(json.dumps(own))
    for model in ("run", "run/final"):
        assert main(["sft", "rows.jsonl", "--model", model]) == 2
        said = capsys.readouterr().err
        assert said.count("error: ") == 1
        assert "is an adapter of Qwen/Qwen3-8B, not a model" in said
        assert f"--model Qwen/Qwen3-8B model.adapter.path={model}" in said
    assert not list(folder.glob("*.yaml"))


def test_the_console_says_what_is_trained_and_that_a_step_is_all_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["sft", "rows.jsonl", "--model", "builtin:tiny", "train.batch_size=6400", "--dry-run"]
    assert main([*words, "train.max_steps=1", "model.adapter={r: 4}"]) == 0
    plan = json.loads((folder / "runs/rows-sft/plan.json").read_text())
    said = capsys.readouterr().out
    assert 0 < plan["num_trained"] < plan["num_parameters"]
    assert f"Trained parameters: {plan['num_trained']:,} of {plan['num_parameters']:,} (" in said
    reasons = {one["setting"]: one["reason"] for one in plan["decisions"]}
    assert "there are: every step is all of them" in reasons["batch_size"]


def test_a_json_list_of_rows_is_no_recipe(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "mine.json").write_text('[{"prompt": "2 + 2", "completion": "4"}]')
    assert main(["check", "mine.json"]) == 2
    assert "memtrain sft mine.json --model MODEL" in " ".join(capsys.readouterr().err.split())


def test_a_dataset_and_a_model_are_planned_as_the_run_that_they_mean(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", "rows.jsonl", "--model", "tiny", "--gpu", "t4", "--without-data"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The plan of `memtrain sft rows.jsonl --model tiny`: full fine-tuning" in shown
    assert "rows.jsonl on T4" in shown
    pair = {"prompt": "p", "chosen": "yes", "rejected": "no"}
    (folder / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    assert main(["plan", "pairs.jsonl", "--model", "builtin:tiny", "model.adapter={r: 4}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["recipe"] == "pairs.jsonl"
    assert shown["data_was_read"]
    assert list(folder.glob("*.yaml")) == []  # Nothing is written by a plan.
    (folder / "my.yaml").write_text("method: sft\nmodel: {path: nowhere}\ndata: {train: rows.jsonl}\n")
    assert main(["plan", "my.yaml", "--model", "builtin:tiny"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rows.jsonl", "--model", "./nowhere"], "at: the command line"),
        (["nosuch.jsonl", "--model", "tiny"], "at: the command line"),
        (["tiny", "--model", "tiny"], "tiny is a model, and --model names another"),
        (["rows.jsonl"], "memtrain plan rows.jsonl --model MODEL"),
        (["prompts.jsonl", "--model", "tiny"], "then memtrain plan my.yaml data.train=prompts.jsonl"),
        (["odd.jsonl", "--model", "tiny"], "'data.columns={question: frage, answer: antwort}'"),
        (["nested.jsonl", "--model", "tiny"], "write the fields of column 'qa' as separate columns"),
    ],
)
def test_a_plan_of_a_dataset_is_refused_with_the_words_that_work(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
):
    (folder / "prompts.jsonl").write_text('{"prompt": "p"}\n')
    (folder / "odd.jsonl").write_text('{"frage": "wie?", "antwort": "so.", "nr": 1, "note": null}\n')
    (folder / "nested.jsonl").write_text('{"qa": {"question": "a", "answer": "b"}, "id": 1}\n')
    assert main(["plan", *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())
