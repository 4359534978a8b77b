"""Python API: recipes, plans, runs and lengths for notebooks, with the errors of the command line.

    import memtrain

    recipe = memtrain.load_recipe("my.yaml", {"optim.lr": 1e-4})
    plan = memtrain.plan(recipe, gpu="4090")
    run = memtrain.train(recipe)
    lengths = memtrain.inspect_lengths("rows.jsonl", model="Qwen/Qwen3-0.6B")

Every fault is a `memtrain.errors.MemtrainError` with `.faults` (what, where, fix). No torch at import.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrain.errors import Fault, MemtrainError, RecipeError
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.reading.load import load_recipe as read_recipe
from memtrain.recipes.reading.overrides import words_given_in
from memtrain.recipes.reading.shipped import COMMAND_LINE

if TYPE_CHECKING:
    from memtrain.cli.plan.answer import Answer
    from memtrain.trainers.data.length_report.result import Inspection
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.report.report import Figures, Report

Overrides = Mapping[str, Any] | Sequence[str]
"""Values by dotted key, or words as the command line has them (`optim.lr=1e-4`)."""

_OPTION = re.compile(
    r"--(?P<name>gpu|num-gpus|budget|run-dir|model|tokenizer)(?: (?P<value>[\w.]*\d[\w.]*))?\b"
)
"""An option that has an argument of a function here, with its value where one stands behind it."""
_WORDS = (
    ("--no-resume", "resume=False"),
    ("--without-data", "reads_data=False"),
)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that is over: its folder, its model, and its figures."""

    folder: RunFolder

    @property
    def model(self) -> Path:
        """Folder of the trained model, in the Hugging Face format."""
        return self.folder.final

    @property
    def report(self) -> Report:
        """Steps, evaluations, memory and notes, as report.html has them."""
        from memtrain.trainers.run_folder.report.report import load_report

        return load_report(self.folder)

    @property
    def figures(self) -> Figures:
        """The run in a few numbers: first and last loss, speed, peaks."""
        from memtrain.trainers.run_folder.report.report import figures_of

        return figures_of(self.report)

    def __repr__(self) -> str:
        from memtrain.memory.plan.units import count_of
        from memtrain.trainers.run_folder.report.report import figures_of, loss_words, state_of

        report = self.report
        steps = count_of(len(report.steps), "step")
        words = f"{state_of(report)}, {steps}, loss {loss_words(figures_of(report))}"
        return f"FinishedRun({self.folder.path}: {words})"

    def _repr_html_(self) -> str:
        from memtrain.trainers.pages.page import framed
        from memtrain.trainers.run_folder.report.report_html import render_report

        return framed(render_report(self.report))


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A plan that fits, as `memtrain plan` shows it."""

    answer: Answer

    @property
    def need_bytes(self) -> int:
        """Memory of one device that the run needs, margin included."""
        return self.answer.chosen.need_bytes

    @property
    def tokens_per_s(self) -> float:
        """Predicted speed of all processes together; computed, not measured."""
        return self.answer.tokens_per_s

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run."""
        return self.answer.resolved.settings.model_dump(mode="json")

    def as_json(self) -> dict[str, Any]:
        """The plan as `memtrain plan --json` prints it."""
        from memtrain.cli.plan.answer import as_json

        return as_json(self.answer, None, "")

    def __repr__(self) -> str:
        from memtrain.cli.plan.tables import settings_words
        from memtrain.memory.plan.units import gib

        how = settings_words(self.answer.resolved.settings)
        return f"RunPlan(needs {gib(self.need_bytes)}, {self.tokens_per_s:,.0f} tokens/s predicted: {how})"

    def _repr_html_(self) -> str:
        from memtrain.cli.plan.html import page
        from memtrain.trainers.pages.page import framed

        return framed(page(self.answer, None))


def load_recipe(recipe: str | Path, overrides: Overrides | None = None) -> LoadedRecipe:
    """The recipe of a file, or of a shipped name, with values laid over it by dotted key, or as
    words such as `optim.lr=1e-4`.

    Raises: RecipeError with every fault, each with its line; also for a dict, which has no lines to name.
    """
    if isinstance(recipe, Mapping):
        raise RecipeError(
            "a recipe is a file or the name of a shipped recipe, but a dict was given",
            "load_recipe",
            "write it to a file (`yaml.safe_dump(recipe, file)`), or pass its values as overrides of one",
        )
    with _errorsof_python():
        return read_recipe(str(recipe), _words(overrides))


def plan(
    recipe: LoadedRecipe | str | Path,
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    budget: str | None = None,
    reads_data: bool = True,
) -> RunPlan:
    """The fastest plan that fits this machine, a named card, or a budget such as `24GiB`.

    `reads_data`: tokenize the rows, else every row is taken to have `length.max_length` tokens.
    Raises: RecipeError, DataError, LaunchError; DoesNotFit when no plan fits.
    """
    from memtrain.cli.plan.answer import answer, ask, facts_of_question
    from memtrain.memory.plan.units import read_size

    loaded = _loaded(recipe)
    with _errorsof_python():
        num_bytes = None if budget is None else read_size(budget, "budget")
        if budget is not None:
            loaded = read_recipe(str(loaded.path), (*loaded.overrides, f"memory.budget={budget}"))
        question = ask(loaded, gpu, num_gpus, num_bytes)
        facts, note = facts_of_question(question, reads_data=reads_data, progress=None)
        return RunPlan(answer(question, facts, note))


def train(
    recipe: LoadedRecipe | str | Path, *, run_dir: str | Path | None = None, resume: bool = True
) -> FinishedRun:
    """Plan and run a recipe to its end, or go on where its run folder stopped.

    Raises: MemtrainError of every kind.
    """
    from memtrain.cli.commands.train import run_recipe
    from memtrain.trainers.run_folder.folder import RunFolder

    loaded = _loaded(recipe)
    with _errorsof_python():
        folder = run_recipe(
            None,
            str(loaded.path),
            list(loaded.overrides),
            run_dir=None if run_dir is None else str(run_dir),
            resume=resume,
            start_over="resume=False, or another run_dir",
        )
    return FinishedRun(RunFolder(folder))


def inspect_lengths(
    dataset: str | Path,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    overrides: Overrides | None = None,
) -> Inspection:
    """Length distribution of a dataset, and the losses of each `max_length`.

    Counted with `tokenizer`, or with that of `model`, whose memory is predicted too.
    Raises: RecipeError, DataError.
    """
    from memtrain.cli.commands.inspect_lengths import Words, inspected
    from memtrain.trainers.data.length_report.notebook import ShownInspection

    words = Words(str(dataset), tuple(_words(overrides)), model, tokenizer, None, None)
    with _errorsof_python():
        return ShownInspection(**dict(inspected(words, (), None, None)))


def _loaded(recipe: LoadedRecipe | str | Path) -> LoadedRecipe:
    return recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)


def _words(overrides: Overrides | None) -> list[str]:
    """Overrides as the words of a command line; JSON is YAML."""
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return list(overrides or ())
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overrides.items()]


@contextmanager
def _errorsof_python() -> Iterator[None]:
    """Inside, overrides are from Python, and an error that names an option of the command line names the
    argument of the function here."""
    try:
        with words_given_in("Python"):
            yield
    except MemtrainError as error:
        faults = [Fault(*map(of_python, (one.what, one.where, one.fix))) for one in error.faults]
        renamed = type(error)(faults)
        for note in getattr(error, "__notes__", ()):
            renamed.add_note(note)
        raise renamed from error.__cause__


def of_python(text: str) -> str:
    """`add --gpu h100` as `add gpu="h100"`, and the place of a word that was given as an argument."""
    if text == COMMAND_LINE:
        return "the arguments"
    for option, word in _WORDS:
        text = text.replace(option, word)
    return _OPTION.sub(_argument, text)


def _argument(found: re.Match[str]) -> str:
    name, value = found["name"].replace("-", "_"), found["value"]
    if value is None:
        return name
    return f"{name}={value}" if name == "num_gpus" else f'{name}="{value}"'
