"""Named evaluation sets, and runs that end where held-out rows show no gain."""

import json
from pathlib import Path

import pytest

from memtrain.trainers.loop import loop

WORSE = (
    *("optim.lr=0.3", "optim.schedule=constant", "train.max_steps=12"),
    *("eval.every_steps=1", "save.every_steps=1", "save.keep=20"),
)
"""A rate so high that held-out rows get worse."""


def rows(path: Path, first: int) -> str:
    """Four rows of a prompt with an answer, other ones from each `first`."""
    some = [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}" * n} for n in range(first, first + 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return str(path)


def dies_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    plain = loop.one_step

    def dies(run, work, *rest):
        if work.step == step:
            raise KeyboardInterrupt
        return plain(run, work, *rest)

    monkeypatch.setattr(loop, "one_step", dies)


def test_a_run_ends_where_nothing_is_gained_and_goes_on_to_the_same_end(runs, metrics, monkeypatch):
    """Killed after its first evaluation without a gain, it must count on from there, bit for bit."""
    samples = "eval.samples={prompts: [one], max_tokens: 2, every_steps: 100}"
    words = (*WORSE, samples, "eval.early_stopping.patience=2")
    folder = runs.done("whole", *words)
    losses = [event["loss"] for event in metrics(folder, "eval")]
    best = losses.index(min(losses)) + 1
    final = metrics(folder, "final")[-1]
    assert len(losses) == final["step"] == best + 2 < 12
    assert final["best_step"] == best
    assert final["stopped_early"] == (
        f"stopped early at step {best + 2} of 12: no gain in held-out loss over 2 evaluations; "
        f"best {min(losses):.4f} at step {best}"
    )
    assert final["stopped_early"] in (folder / "report.html").read_text()
    assert [event["step"] for event in metrics(folder, "sample")] == [0, best + 2]
    dies_at(monkeypatch, best + 1)
    assert runs.run("killed", *words).code != 0
    monkeypatch.undo()
    other = runs.done("killed", *words)
    assert [event["loss"] for event in metrics(other, "eval")] == losses
    assert metrics(other, "final")[-1]["stopped_early"] == final["stopped_early"]
    again = runs.run("whole", *words)
    assert "is finished; nothing was done" in " ".join(again.out.split())
    patient = runs.done("whole", *words, "eval.early_stopping.patience=3")
    losses = [event["loss"] for event in metrics(patient, "eval")]
    # Processors round otherwise: whether the third evaluation gains is theirs to say.
    assert len(losses) > best + 2
    assert losses[: best + 2] == [event["loss"] for event in metrics(other, "eval")]
    assert len(losses) == next(
        (n for n in range(4, 12) if min(losses[: n - 3]) <= min(losses[n - 3 : n])), 12
    )


@pytest.mark.parametrize("packing", ["none", "bfd"])
def test_sets_are_measured_as_though_alone(runs, metrics, packing: str, tmp_path):
    small, large = rows(tmp_path / "small.jsonl", 1), rows(tmp_path / "large.jsonl", 20)
    plain = ("data.eval_fraction=0", "train.max_steps=2", f"length.packing={packing}", "eval.every_steps=1")
    alone = [
        metrics(runs.done(name, *plain, f"data.eval={path}"), "eval")
        for name, path in (("small", small), ("large", large))
    ]
    both = runs.done(
        "both",
        *plain,
        f"data.eval={{small: {small}, large: {large}}}",
        "eval.early_stopping={metric: large/accuracy, patience: 5}",
    )
    for said, *parts in zip(metrics(both, "eval"), *alone, strict=True):
        for name, part in zip(("small", "large"), parts, strict=True):
            assert said[f"{name}/loss"] == pytest.approx(part["loss"], rel=1e-6)
            assert said[f"{name}/accuracy"] == part["accuracy"]
        tokens = [part["tokens"] for part in parts]
        weighted = sum(count * part["loss"] for count, part in zip(tokens, parts, strict=True)) / sum(tokens)
        assert (said["tokens"], said["loss"]) == (sum(tokens), pytest.approx(weighted, rel=1e-6))
    assert [line["rows"] for line in metrics(both, "data") if line["split"] == "held-out"] == [8]
    assert "held-out loss of small" in (both / "report.html").read_text()
