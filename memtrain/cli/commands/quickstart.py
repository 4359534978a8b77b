"""`memtrain quickstart`: the main job on built-in data and a built-in model, with nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text, whole


def quickstart(
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder of the run.")] = "runs/quickstart",
) -> None:
    """Train a tiny model on built-in word problems, and show the savings of the plan. About a minute on one
    core.

    Nothing is downloaded: the model starts from random weights and knows nothing, not even English. The
    sample at the end shows that it has learned the form of an answer; correct answers need a larger model.
    """
    from memtrain.cli.commands.train import run_recipe
    from memtrain.cli.plan.plain_plan import plain_plan
    from memtrain.memory.plan.plan import read_plan
    from memtrain.memory.plan.units import gib
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.report.report import figures_of, load_report
    from memtrain.trainers.run_folder.report.sample import sample_rows
    from memtrain.trainers.tools.peak_of_call import measure

    print_text(
        "Training a tiny model from random weights on made-up word problems: about a minute on one core."
    )
    print_text()
    folder = RunFolder(run_recipe("sft", "quickstart", [], run_dir=run_dir, resume=False))
    print_text()
    print_text(
        "Two steps on the same rows without the plan (rows padded, all activations and logits kept) ..."
    )
    plain = measure(plain_plan(read_plan(folder.plan)))
    report = load_report(folder)
    figures = figures_of(report)
    saved = 1 - (figures.measured_bytes or 0) / plain.peak_bytes
    print_text()
    print_table(
        ("quickstart", ""),
        [
            (
                "loss",
                f"{report.steps[0].loss:.3f} at the first step, {report.steps[-1].loss:.3f} at the last",
            ),
            ("held-out loss", f"{report.evals[-1].loss:.3f}"),
            ("speed", f"{figures.tokens_per_s:,.0f} tokens/s"),
            ("peak memory, planned", f"{gib(figures.measured_bytes or 0)} measured"),
            ("peak memory, plain", f"{gib(plain.peak_bytes)} measured: the plan saves {saved:.0%}"),
            ("model", whole(folder.final)),
            ("report", whole(folder.report)),
        ],
    )
    _print_sample(sample_rows(report))
    print_text()
    print_text(
        "The sample is a held-out problem, with the model's answer after it. A model this small learns "
        "what an answer looks like; few of its answers are right."
    )
    print_text()
    print_text(
        f"Next: memtrain init sft -o my.yaml; memtrain sft my.yaml. The recipe here: {whole(folder.recipe)}"
    )


def _print_sample(rows: Sequence[tuple[str, str]]) -> None:
    """Name and text of each part of the sample, whose lines stay lines."""
    for name, text in rows:
        print_text()
        for line in (name, *text.strip("\n").splitlines()):
            print_text(line)
