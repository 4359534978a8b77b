"""`memtrain sft` and the other methods, and `memtrain train`: from a recipe to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, complete_recipe
from memtrain.cli.output.terminal import print_text, whole
from memtrain.recipes.registry import METHODS

if TYPE_CHECKING:
    from memtrain.memory.plan.plan import Plan
    from memtrain.recipes.reading.load import LoadedRecipe
    from memtrain.trainers.run_folder.folder import RunFolder

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Write the plan and the launch files into the run folder; start nothing."),
]
RecipeOrDataset = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|DATASET",
        help="A recipe: a file or a shipped name. With --model, a dataset: a file, folder or hub id.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Model to train on DATASET: a folder or a hub id. The recipe of the run is written too.",
        show_default=False,
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option("--run-dir", help="Run folder, instead of the recipe's run_dir.", show_default=False),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume",
        help="Resume from the newest checkpoint of the run folder, or remove its checkpoints and start over.",
    ),
]


def _method_command(method: str | None, summary: str) -> Callable[..., None]:
    """The command that trains by a method, or by the recipe's method."""

    def command(
        recipe: RecipeOrDataset,
        overrides: OverridesArgument = None,
        model: ModelOption = None,
        dry_run: DryRun = False,
        run_dir: RunDir = None,
        resume: Resume = True,
    ) -> None:
        from memtrain.cli.plan.recipe_of_dataset import refuse_dataset, write_recipe
        from memtrain.trainers.runtime.streams import go_on_without_readers

        go_on_without_readers()
        if model is None:
            refuse_dataset(recipe, method)
        else:
            from memtrain.cli.plan.dataset_alone import method_to_train

            own = method or method_to_train(recipe, model, overrides or [])
            recipe, overrides = str(write_recipe(own, recipe, model, overrides or [])), None
            print_text(f"Wrote {whole(recipe)}: the recipe of this run.")
        run_recipe(method, recipe, overrides or [], dry_run=dry_run, run_dir=run_dir, resume=resume)

    command.__doc__ = summary
    return command


BY_METHOD = {name: _method_command(name, method.summary) for name, method in METHODS.items()}
"""The command of each method."""
train = _method_command(None, "Train with the method that the recipe names.")


def run_recipe(
    method: str | None,
    recipe: str,
    overrides: list[str],
    *,
    dry_run: bool = False,
    run_dir: str | None = None,
    resume: bool = True,
    start_over: str = "--no-resume, or another --run-dir",
) -> Path:
    """Plan, launch and finish one run; its folder. `start_over`: the words for a finished run.

    Raises: MemtrainError of every kind.
    """
    from memtrain.recipes.reading.load import load_recipe

    loaded = load_recipe(recipe, overrides, method=method)

    from memtrain.cli.launch.local import recipe_yaml, start, write_files
    from memtrain.cli.launch.summary import print_end, print_plan, reading_progress
    from memtrain.cli.plan.check_rewards import check_rewards
    from memtrain.cli.plan.make_plan import make_plan, run_folder_of
    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.trainers.checkpoints.final_model import refuse_foreign_final
    from memtrain.trainers.checkpoints.run_state import is_over, lost_model
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.runtime.atomic_files import disk_fault
    from memtrain.trainers.runtime.exits import no_way_out
    from memtrain.trainers.runtime.signals import outliving_terminal

    with no_way_out():
        _check_what_is_asked(loaded)
    folder = RunFolder(Path(run_folder_of(loaded, run_dir)))
    # From the first look at the folder to the last word in it: two starts must not see each other's half.
    with outliving_terminal(), no_way_out(), folder.open_for_run() as lock:
        with _all_faults(loaded), at_their_lines(loaded), reading_progress() as progress:
            planned = make_plan(loaded, run_dir=run_dir, progress=progress, keeps=resume)
        plan = planned.plan
        check_rewards(loaded, plan.data)
        if resume and is_over(folder, plan):
            _print_finished(folder, start_over)
            _benchmarks(plan, folder)
            return folder.path
        if resume and (lost := lost_model(folder)):
            print_text(
                f"The run is finished, but {whole(folder.final)} is incomplete ({lost}); it is written again."
            )
        refuse_foreign_final(folder)
        print_plan(planned)
        try:
            # The plan first: by it a run folder is known as one.
            plan.write(folder.path)
            folder.recipe.write_text(recipe_yaml(plan))
            script = write_files(plan, folder.path)
        except OSError as error:
            raise disk_fault(error, "the plan cannot be written", folder.path) from None
        if dry_run:
            print_text(f"Nothing was started. The plan is in {whole(folder.plan)}; {whole(script)} runs it.")
            return folder.path
        start(plan, folder, lock, resume=resume)
        print_end(folder)
        _benchmarks(plan, folder)
    return folder.path


def _check_what_is_asked(loaded: LoadedRecipe) -> None:
    """Raise the faults of trackers, benchmarks and reward functions, and with them those of other parts."""
    from memtrain.cli.plan.check_rewards import check_rewards
    from memtrain.cli.plan.recipe_lines import at_their_lines
    from memtrain.trainers.run_folder.trackers import check_trackers
    from memtrain.trainers.tools.lm_eval import check_asked

    with _all_faults(loaded), at_their_lines(loaded):
        check_trackers(loaded.recipe.log.trackers)
        check_asked(loaded.recipe.eval.lm_eval)
        check_rewards(loaded)


@contextmanager
def _all_faults(loaded: LoadedRecipe) -> Iterator[None]:
    """Inside, an error of the data or the machine is raised with the faults of the run's other parts."""
    from memtrain.cli.plan.check_run import with_the_rest
    from memtrain.errors import DataError, LaunchError

    try:
        yield
    except (DataError, LaunchError) as error:
        raise with_the_rest(loaded, error) from error.__cause__


def _print_finished(folder: RunFolder, start_over: str) -> None:
    """Say that a run has nothing left to do."""
    print_text(
        f"The run in {whole(folder.path)} is finished; nothing was done. Its model: {whole(folder.final)}"
    )
    print_text(f"To run it again: {start_over}.")


def _benchmarks(plan: Plan, folder: RunFolder) -> None:
    """Run the benchmarks of `eval.lm_eval` that were not run on this model yet."""
    from memtrain.trainers.run_folder.report.benchmarks import is_of_this_model

    asked = plan.recipe.eval.lm_eval
    if asked is None or is_of_this_model(folder):
        return
    from memtrain.cli.commands.lm_eval import print_scores

    print_text()
    print_scores(folder.path, asked)
