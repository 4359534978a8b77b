"""`memtrain lm-eval RUN`: benchmarks of lm-evaluation-harness on a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.output.terminal import hide_progress_bars, print_table, print_text, whole
from memtrain.errors import LaunchError

if TYPE_CHECKING:
    from memtrain.recipes.sections.evaluation import LmEval


def lm_eval(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a model.")],
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of the harness, such as gsm8k,ifeval. Default: those of the run's recipe."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of rows per task.")] = None,
    include_path: Annotated[str | None, typer.Option(help="Folder with your own tasks.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Number of few-shot examples.")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Apply the model's chat template.")
    ] = False,
) -> None:
    """Run benchmarks of EleutherAI's lm-evaluation-harness on a trained model (`pip install
    'memtrain[lm-eval]'`).

    A run does the same at its end with `eval.lm_eval` in its recipe.
    """
    from memtrain.recipes.sections.evaluation import LmEval

    if tasks is None:
        asked = _of_recipe(run)
    else:
        asked = LmEval(
            tasks=tuple(tasks.split(",")),
            limit=limit,
            include_path=include_path,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
        )
    print_scores(run, asked)


def _of_recipe(run: Path) -> LmEval:
    from memtrain.memory.plan.plan import PLAN_FILE, read_plan

    path = run / PLAN_FILE
    asked = read_plan(path, reveals=False).recipe.eval.lm_eval if path.is_file() else None
    if asked is None:
        raise LaunchError(
            "no task is named", "--tasks", "name some (--tasks gsm8k,ifeval); `lm-eval ls tasks` lists them"
        )
    return asked


def print_scores(run: Path, asked: LmEval) -> None:
    """Run the benchmarks, and print their scores.

    Raises: LaunchError where there is no finished model, or the harness is missing or fails.
    """
    from memtrain.memory.hardware.devices import detect
    from memtrain.trainers.run_folder.report.benchmarks import COLUMNS, RESULT_FILE, rows_of
    from memtrain.trainers.tools.lm_eval import run_lm_eval
    from memtrain.trainers.tools.trained_model import text_model

    model = text_model(run)
    hide_progress_bars()
    scores = run_lm_eval(model, asked, detect("auto").device, print_text)
    print_table(COLUMNS, rows_of(scores))
    print_text(f"All results: {whole(run / RESULT_FILE)}")
