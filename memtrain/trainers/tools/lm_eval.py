"""Benchmarks of lm-evaluation-harness on a finished model, run as a process of their own; no torch here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from memtrain.errors import LaunchError
from memtrain.recipes.sections.evaluation import LmEval
from memtrain.trainers.checkpoints.final_model import note_card
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.report.benchmarks import RESULT_FILE, Score, scores_of
from memtrain.trainers.run_folder.report.model_card import write_card
from memtrain.trainers.run_folder.report.report_html import write_report
from memtrain.trainers.runtime.atomic_files import write_whole
from memtrain.trainers.runtime.own_trees import remove_half_written
from memtrain.trainers.tools.trained_model import (
    MERGED,
    TrainedModel,
    base_revision,
    ends_otherwise,
    own_tokenizer,
    trusting_recipe,
    whole_model,
    why_not_beside_base,
)

PACKAGE = "lm_eval"
PLACE = "eval.lm_eval"
INSTALL = "pip install 'memtrain[lm-eval]'"
_LAST_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception): ")
_NOT_FOUND = "Tasks not found: "
"""Begin of the line by which `lm-eval validate` names tasks that it does not know."""


def check_installed() -> None:
    """Nothing where lm-evaluation-harness can be run. Raises: LaunchError with the way to it."""
    if find_spec(PACKAGE) is None:
        raise LaunchError(
            "lm-evaluation-harness (lm_eval) is asked for but not installed",
            PLACE,
            INSTALL,
        )


def check_asked(asked: LmEval | None) -> None:
    """Nothing where no benchmark is asked for, or the package is here and has it; seconds of its time.

    Raises: LaunchError.
    """
    if asked is None:
        return
    check_installed()
    files = [one for one in asked.tasks if one.endswith((".yaml", ".yml"))]
    unknown = [one for one in files if not Path(one).is_file()]
    unknown += _unknown(tuple(one for one in asked.tasks if one not in files), asked.include_path)
    if unknown:
        raise LaunchError(
            f"lm-evaluation-harness has no benchmark {' and no '.join(unknown)}",
            f"{PLACE}.tasks",
            "`lm-eval ls tasks` lists them; a folder of your own is named in eval.lm_eval.include_path",
        )


@cache
def _unknown(names: tuple[str, ...], folder: str | None) -> tuple[str, ...]:
    """The names of no benchmark, asked of the harness itself; `folder`: of tasks beside its own."""
    if not names:
        return ()
    words = [sys.executable, "-m", PACKAGE, "validate", "--tasks", ",".join(names)]
    words += ["--include_path", folder] if folder is not None else []
    told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    lines = [line for line in told.splitlines() if line.startswith(_NOT_FOUND)]
    return tuple(name for line in lines for name in line.removeprefix(_NOT_FOUND).split(", "))


def lm_eval_words(model: TrainedModel, asked: LmEval, output: Path, device: str) -> list[str]:
    """The command that runs the benchmarks; an adapter is put on its base, with its own tokenizer.

    Source: lm_eval 0.4.13, `lm-eval run --help` and `HFLM.__init__`.
    Raises: LaunchError where a name cannot be given to the harness.
    """
    place: dict[str, object] = {"pretrained": model.folder}
    if model.is_adapter:
        place = {"pretrained": model.base, "peft": model.folder, "tokenizer": own_tokenizer(model)}
        place["revision"] = base_revision(model)
    place |= {"trust_remote_code": trusting_recipe(model) and True, "dtype": "auto"}
    # The harness reads its arguments apart at commas: a name with one would be another argument.
    for name, value in place.items():
        if re.search(r"[,=]", str(value)):
            raise LaunchError(
                f"lm-evaluation-harness takes no comma and no '=' in a name, and {name} is {value}",
                str(model.run),
                "rename the folder, or link to it by another name",
            )
    given = ",".join(f"{name}={value}" for name, value in place.items() if value is not None)
    words = [sys.executable, "-m", PACKAGE, "run", "--model", "hf", "--model_args", given]
    words += ["--tasks", ",".join(asked.tasks), "--batch_size", str(asked.batch_size), "--device", device]
    words += ["--output_path", str(output)]
    for option in ("limit", "num_fewshot", "include_path"):
        if (value := getattr(asked, option)) is not None:
            words += [f"--{option}", str(value)]
    return [*words, "--apply_chat_template"] if asked.apply_chat_template else words


def beside_base_or_merged(model: TrainedModel, emit: Callable[[str], None]) -> TrainedModel:
    """The model as the harness can load it: an adapter that it cannot put on its base is merged.

    Raises: LaunchError where it cannot be merged.
    """
    why = why_not_beside_base(model) if model.is_adapter else ""
    if model.is_adapter and not why and ends_otherwise(model):
        why = "that ends its turns otherwise than its base"
    if not why:
        return model
    if not (model.run / MERGED).exists():
        from memtrain.trainers.tools.merge import merge_run

        emit(f"{model.folder} is merged into {model.run / MERGED}: the harness takes no adapter {why}")
        merge_run(model.run)
    whole = whole_model(model, f"lm-evaluation-harness, which takes no adapter {why},")
    return replace(model, folder=whole, is_adapter=False)


def run_lm_eval(
    model: TrainedModel, asked: LmEval, device: str, emit: Callable[[str], None] = print
) -> list[Score]:
    """The scores of a finished model; its results and the command are written to `lm_eval.json` of the run.

    Raises: LaunchError where the package is missing or fails: the end of its output says why.
    """
    check_installed()
    model = beside_base_or_merged(model, emit)
    output = model.run / f".{PACKAGE}"
    remove_half_written(output)
    words = lm_eval_words(model, asked, output, device)
    emit(f"lm-evaluation-harness: {', '.join(asked.tasks)} on {model.folder}")
    log = model.run / "lm_eval.log"
    try:
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        found = sorted(output.rglob("results_*.json"))
        if code or not found:
            raise LaunchError(
                f"lm-evaluation-harness failed: {_reason(log.read_text(encoding='utf-8', errors='replace'))}",
                str(log),
                "correct the tasks by it; the model is intact: memtrain lm-eval runs the benchmarks again",
            )
        given = cast(dict[str, Any], json.loads(found[-1].read_text(encoding="utf-8")))
        kept = {key: given.get(key) for key in ("results", "n-samples", "versions", "lm_eval_version")}
        write_whole(model.run / RESULT_FILE, json.dumps({"command": words, **kept}, indent=1, default=str))
    finally:
        remove_half_written(output)
    _show(RunFolder(model.run))
    return scores_of(given["results"])


def _reason(log: str) -> str:
    """The last error in the output of a program with what follows it, without its traceback; or its end."""
    lines = log.splitlines()
    errors = [number for number, line in enumerate(lines) if _LAST_ERROR.match(line)]
    return " ".join(lines[errors[-1] :][:3] if errors else lines[-3:])[-600:]


def _show(folder: RunFolder) -> None:
    """Write the scores into the report and the model card of a run; nothing of a model folder alone."""
    if folder.plan.is_file():
        write_report(folder)
        write_card(folder)
        note_card(folder)
