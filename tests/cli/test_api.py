"""The Python API: errors of the command line, no torch at import, and the example notebook as it stands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memtrain
from memtrain.__main__ import main
from memtrain.api import of_python
from memtrain.errors import DataError, RecipeError
from memtrain.trainers.protocols.events import StepEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.report.report import load_report
from memtrain.trainers.tools.chat import Chat
from memtrain.trainers.tools.trained_model import text_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_importing_the_api_and_loading_a_recipe_needs_no_torch():
    code = (
        "import os, sys, memtrain; memtrain.load_recipe('quickstart'); memtrain.plan; memtrain.train\n"
        "sys.exit('torch' in sys.modules or os.environ['OMP_WAIT_POLICY'] != 'PASSIVE')"
    )
    free = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    assert subprocess.run([sys.executable, "-c", code], env=free, check=False).returncode == 0


def test_errors_are_those_of_the_command_line():
    with pytest.raises(RecipeError) as caught:
        memtrain.load_recipe("quickstart", {"optim.lrr": 1e-4})
    fault = caught.value.faults[0]
    assert fault.what == "optim.lrr: unknown key"
    assert fault.where == "from Python: `optim.lrr=0.0001`"
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = getattr(memtrain, "pl" + "ann")


def test_a_notebook_shows_the_faults_and_no_code_of_memtrain():
    """IPython asks an exception for the lines of its cell by this name."""
    with pytest.raises(RecipeError) as error:
        memtrain.load_recipe("quickstart", {"optim.lrr": 1e-4})
    error.value.add_note("note: a note")
    assert error.value._render_traceback_() == [*error.value.text().splitlines(), "note: a note"]


def test_a_dict_is_no_recipe_and_the_error_says_what_is():
    """Its repr was looked for among the shipped recipes."""
    with pytest.raises(RecipeError, match="a dict was given") as caught:
        memtrain.load_recipe({"method": "sft", "model": {"path": "builtin:tiny"}})  # pyright: ignore
    assert "safe_dump" in caught.value.faults[0].fix


def test_overrides_may_be_the_words_of_the_command_line():
    for given in (["train.max_steps=3"], "train.max_steps=3", ("train.max_steps=3",), {"train.max_steps": 3}):
        assert memtrain.load_recipe("quickstart", given).recipe.train.max_steps == 3
    with pytest.raises(RecipeError) as caught:
        memtrain.load_recipe("quickstart", ["max_steps"])
    assert caught.value.faults[0].where == "from Python: `max_steps`"


def test_a_plan_for_a_card_is_that_of_the_command():
    recipe = memtrain.load_recipe("quickstart", {"cluster.device": "auto"})
    plan = memtrain.plan(recipe, gpu="t4", reads_data=False)
    assert plan.as_json()["need_bytes"] == plan.need_bytes
    assert repr(plan).startswith("RunPlan(needs ")
    assert "<iframe" in plan._repr_html_()


def test_decisions_say_that_values_came_from_python(tmp_path: Path):
    loaded = memtrain.load_recipe("quickstart", {"optim.lr": 1e-4})
    assert loaded.where("optim.lr") == "from Python: `optim.lr=0.0001`"
    reasons = json.dumps(memtrain.plan(loaded, budget="2GiB").as_json())
    assert "from Python: `memory.budget=2GiB`" in reasons
    assert "from the command line" not in reasons


def test_errors_name_the_argumentsof_python_and_no_options():
    recipe = memtrain.load_recipe("quickstart", {"cluster.device": "auto"})
    with pytest.raises(RecipeError) as unknown:
        memtrain.plan(recipe, gpu="h1000", reads_data=False)
    assert unknown.value.faults[0].where == "gpu"
    assert unknown.value.faults[0].fix.endswith('or give its size with budget="24GiB"')
    with pytest.raises(RecipeError) as alone:
        memtrain.plan(recipe, num_gpus=2, reads_data=False)
    assert alone.value.text() == (
        "error: num_gpus=2 needs a kind of GPU, but none is visible here\n"
        "   at: num_gpus\n"
        '  try: add gpu="h100", or another kind'
    )
    with pytest.raises(DataError) as gone:
        memtrain.inspect_lengths("gone.jsonl", tokenizer="builtin:tiny")
    assert gone.value.faults[0].where == "the arguments"
    assert of_python("keep them and choose another --run-dir; --no-resume removes them") == (
        "keep them and choose another run_dir; resume=False removes them"
    )


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Takes one tiny run: three steps of the quickstart."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102
    run = names["run"]
    assert isinstance(run, memtrain.api.FinishedRun)  # pyright: ignore[reportAttributeAccessIssue]
    assert run.figures.num_steps == 3
    assert (run.model / "config.json").is_file()
    capsys.readouterr()
    assert (
        main(["chat", str(run.folder.path), "-p", "How many?", "--temperature", "0", "--max-tokens", "8"])
        == 0
    )
    reported = capsys.readouterr().out
    assert "The run was trained on plain text: each prompt is continued as text" in reported
    assert len(reported.splitlines()) > 1


@pytest.mark.slow
def test_the_adapter_of_a_run_is_talked_with_turn_by_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Takes one tiny run; the second turn sees the first, until it is reset."""
    monkeypatch.chdir(tmp_path)
    given = {
        "train.max_steps": 1,
        "model.adapter": {},
        "data.train": {"source": "builtin:arithmetic", "limit": 32},
    }
    run = memtrain.train(memtrain.load_recipe("quickstart", given), run_dir="runs/adapter")
    talk = Chat(text_model(run.folder.path), system="Count.")
    said = talk.answer("One?", lambda _: None, max_tokens=4, temperature=0)
    talk.answer("Two?", lambda _: None, max_tokens=4, temperature=0)
    assert [one["role"] for one in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[2]["content"] == said
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Count."}]
    assert talk.answer("One?", lambda _: None, max_tokens=4, temperature=0) == said


def test_a_run_shows_itself_in_a_line(tmp_path: Path):
    run = memtrain.api.FinishedRun(RunFolder(tmp_path / "run"))  # pyright: ignore[reportAttributeAccessIssue]
    run.folder.path.mkdir()
    with MetricsWriter(run.folder.metrics) as writer:
        for at, loss in ((1, 3.0), (2, 1.5)):
            writer.write(StepEvent(step=at, loss=loss, lr=0.1, tokens=1, loss_tokens=1, seconds=1.0))
    assert repr(run) == f"FinishedRun({tmp_path}/run: not started, 2 steps, loss 3.0000 -> 1.5000)"


def test_lengths_are_counted_with_a_tokenizer_without_a_model(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"text": "one two"}\n' * 20)
    found = memtrain.inspect_lengths(tmp_path / "rows.jsonl", tokenizer="builtin:tiny")
    assert (found.rows, found.tokenizer) == (20, "builtin:tiny")


def test_what_is_printed_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Notebooks print the last value of a cell: a report of a thousand steps, or the text of a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n' * 3)
    recipe = memtrain.load_recipe("quickstart")
    assert repr(recipe).endswith("quickstart.yaml: sft of builtin:tiny on builtin:arithmetic)")
    lengths = memtrain.inspect_lengths("rows.jsonl", tokenizer="builtin:tiny")
    assert repr(lengths).startswith("Inspection(rows.jsonl: 3 rows, ")
    assert "\n" not in repr(lengths)
    assert lengths._repr_html_().startswith("<iframe")
    folder = RunFolder(tmp_path / "run")
    with folder.open_for_run():
        report = load_report(folder)
    assert repr(report) == "Report(run: not started, no step yet)"
