"""Samples and metrics of a run: what the model writes while it trains, which moves nothing."""

import json
from pathlib import Path

import pytest

from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.loop import loop

SAMPLES = "eval.samples={prompts: [Ann has 3, Two and two], every_steps: 2, max_tokens: 5, temperature: 0.9}"
METRICS = """
def length(completions, reference):
    return [len(text) for text in reference]

def brief(completion, completion_ids, limit=6):
    return len(completion_ids) <= limit
"""
NOISY = ("eval.every_steps=3", "optim.neftune_alpha=5", "memory.measure_peaks=true")


def curve(metrics, folder: Path) -> list[tuple[float, ...]]:
    return [(step["loss"], step["grad_norm"]) for step in metrics(folder, "step")]


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    """Overrides that ask for samples and two metrics."""
    (tmp_path / "metrics.py").write_text(METRICS)
    names = ", ".join(f"{tmp_path}/metrics.py:{name}" for name in ("length", "brief"))
    asked = f"eval.metrics={{functions: [{names}], max_rows: 4, max_tokens: 6}}"
    return (*NOISY, SAMPLES, asked, "eval.early_stopping={metric: length, patience: 9}")


def test_samples_and_metrics_move_no_number_and_are_planned(runs, metrics, words):
    """The noise of NEFTune draws from torch's state in every step: sampling must leave it alone."""
    plain, folder = runs.done("plain", *NOISY), runs.done("run", *words)
    assert curve(metrics, plain) == curve(metrics, folder)
    samples = metrics(folder, "sample")
    assert [one["step"] for one in samples] == [0, 2, 4, 6]
    assert all(len(one["texts"]) == 2 for one in samples)
    evals = metrics(folder, "eval")
    assert [one["loss"] for one in evals] == [one["loss"] for one in metrics(plain, "eval")]
    assert {one["length"] for one in evals} == {evals[0]["length"]}
    assert evals[0]["length"] > 10
    assert [one["brief"] for one in evals] == [1.0] * len(evals)
    page = (folder / "report.html").read_text()
    assert "Two and two" in page
    assert 'class="legend">step 4' in page
    plan = read_plan(folder / "plan.json")
    (predicted,) = [one.num_bytes for one in plan.prediction.phases if one.phase == "samples"]
    measured = max(one["allocated"] for one in metrics(folder, "memory") if one["phase"] == "samples")
    assert 0.5 * predicted < measured <= 1.05 * predicted


def test_samples_go_on_after_a_kill(runs, metrics, words, monkeypatch):
    whole = runs.done("whole", *words, "save.every_steps=1")
    step_of, plain = 3, loop.one_step

    def dies(run, work, *rest):
        if work.step == step_of:
            raise KeyboardInterrupt
        return plain(run, work, *rest)

    monkeypatch.setattr(loop, "one_step", dies)
    assert runs.run("killed", *words, "save.every_steps=1").code != 0
    monkeypatch.undo()
    killed = runs.done("killed", *words, "save.every_steps=1")
    assert [one["texts"] for one in metrics(killed, "sample")] == [
        one["texts"] for one in metrics(whole, "sample")
    ]
    assert curve(metrics, killed) == curve(metrics, whole)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("eval.metrics={functions: ./nowhere.py:exact}", "there is no file 'nowhere.py'"),
        (
            "eval.metrics={functions: {function: exact_answer, weight: 2.0}}",
            "weight has no effect on a metric",
        ),
        ("eval.metrics={functions: [exact_answer, length], max_rows: 2}", "needs"),
        ("eval.samples={prompts: ['']}", "prompt 1 has no token"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_launch(runs, override: str, said: str):
    ended = runs.run("run", override)
    assert ended.code not in (0, 1)
    assert said in ended.err, ended.err
    assert not (runs.folder / "run").exists() or not list((runs.folder / "run").glob("checkpoints/*"))


def test_metrics_of_pairs_compare_with_the_chosen_answer(runs, metrics, tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " none"} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "m.py").write_text(
        "def right(completion, reference, prompt):\n    return reference != ' none'\n"
    )
    recipe = tmp_path / "dpo.yaml"
    text = runs.recipe.read_text().replace("method: sft", "method: dpo")
    recipe.write_text(text.replace("{source: builtin:arithmetic, limit: 100}", str(tmp_path / "pairs.jsonl")))
    words = (f"eval.metrics={{functions: {tmp_path}/m.py:right, max_tokens: 3}}", "train.max_steps=1")
    folder = runs.done(
        "dpo", *words, "eval.samples={prompts: 1 + 1 =, max_tokens: 3}", verb="dpo", recipe=str(recipe)
    )
    assert [one["right"] for one in metrics(folder, "eval")] == [1.0]
    assert [one["step"] for one in metrics(folder, "sample")] == [0, 1]
