"""Benchmarks of lm-evaluation-harness on a finished model, run as a process of their own; no torch here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from memtrain.errors import LaunchError
from memtrain.recipes.sections.evaluation import LmEval
from memtrain.trainers.runtime.atomic_files import write_whole
from memtrain.trainers.tools.trained_model import TrainedModel

PACKAGE = "lm_eval"
RESULT_FILE = "lm_eval.json"
PLACE = "eval.lm_eval"
INSTALL = "pip install 'memtrain[lm-eval]'"
NOT_SCORES = ("alias", "sample_len", "name")
"""Fields of a task's results that are no numbers of the model."""


@dataclass(frozen=True, slots=True)
class Score:
    """A number of a benchmark."""

    task: str
    metric: str
    """With the filter that it was taken behind, where the task has one: `exact_match, strict-match`."""
    value: float
    stderr: float | None


def check_installed() -> None:
    """Nothing where lm-evaluation-harness can be run. Raises: LaunchError with the way to it."""
    if find_spec(PACKAGE) is None:
        raise LaunchError(
            "lm-evaluation-harness (lm_eval) is asked for but not installed",
            PLACE,
            INSTALL,
        )


def check_asked(asked: LmEval | None) -> None:
    """Nothing where no benchmark is asked for, or the package is here. Raises: LaunchError."""
    if asked is not None:
        check_installed()


def lm_eval_words(model: TrainedModel, asked: LmEval, output: Path, device: str) -> list[str]:
    """The command that runs the benchmarks. Source: lm_eval 0.4.13, `lm-eval run --help`."""
    place = (
        f"pretrained={model.base},peft={model.folder}" if model.is_adapter else f"pretrained={model.folder}"
    )
    words = [sys.executable, "-m", PACKAGE, "run", "--model", "hf", "--model_args", f"{place},dtype=auto"]
    words += ["--tasks", ",".join(asked.tasks), "--batch_size", str(asked.batch_size), "--device", device]
    words += ["--output_path", str(output)]
    for option in ("limit", "num_fewshot", "include_path"):
        if (value := getattr(asked, option)) is not None:
            words += [f"--{option}", str(value)]
    return [*words, "--apply_chat_template"] if asked.apply_chat_template else words


def run_lm_eval(
    model: TrainedModel, asked: LmEval, device: str, emit: Callable[[str], None] = print
) -> list[Score]:
    """The scores of a finished model; its results and the command are written to `lm_eval.json` of the run.

    Raises: LaunchError where the package is missing or fails: the end of its output says why.
    """
    check_installed()
    output = model.run / f".{PACKAGE}"
    shutil.rmtree(output, ignore_errors=True)
    words = lm_eval_words(model, asked, output, device)
    emit(f"lm-evaluation-harness: {', '.join(asked.tasks)} on {model.folder}")
    log = model.run / "lm_eval.log"
    try:
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        found = sorted(output.rglob("results_*.json"))
        if code or not found:
            tail = " ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
            raise LaunchError(
                f"lm-evaluation-harness failed: {tail[-600:]}",
                str(log),
                "correct eval.lm_eval by it; the model is intact: memtrain lm-eval runs the benchmarks again",
            )
        given = cast(dict[str, Any], json.loads(found[-1].read_text(encoding="utf-8")))
        kept = {key: given.get(key) for key in ("results", "n-samples", "versions", "lm_eval_version")}
        write_whole(model.run / RESULT_FILE, json.dumps({"command": words, **kept}, indent=1, default=str))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return scores_of(given["results"])


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """The numbers in the results of the harness, in its order."""
    found: list[Score] = []
    for task, values in results.items():
        for key, value in values.items():
            metric, _, behind = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if metric in NOT_SCORES or metric.endswith("_stderr") or not is_number:
                continue
            error = values.get(f"{metric}_stderr,{behind}")
            name = metric if behind in ("", "none") else f"{metric}, {behind}"
            found.append(Score(task, name, float(value), error if isinstance(error, float) else None))
    return found


def rows_of(scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    """Scores as rows of a table."""
    return [
        (one.task, one.metric, f"{one.value:.4g}" + (f" ±{one.stderr:.2g}" if one.stderr is not None else ""))
        for one in scores
    ]
