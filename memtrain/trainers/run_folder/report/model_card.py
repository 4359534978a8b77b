"""The model card: `final/README.md`, with the header that the Hugging Face hub reads; no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memtrain.errors import printable
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.units import gib
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.progress import duration
from memtrain.trainers.run_folder.report.benchmarks import rows_of
from memtrain.trainers.run_folder.report.data_words import lost_words
from memtrain.trainers.run_folder.report.public_words import (
    code,
    is_hub_id,
    plain,
    public_place,
    public_recipe,
)
from memtrain.trainers.run_folder.report.report import (
    Report,
    eval_name,
    eval_words,
    figures_of,
    load_report,
    loss_words,
    reward_words,
)
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole

TEMPLATES = Path(__file__).parent / "templates"
TASKS = {"lm": ("text-generation", "CausalLM"), "score": ("text-classification", "SequenceClassification")}
"""(task of the hub, end of transformers' and PEFT's automatic classes), by the model's head."""


def write_card(folder: RunFolder) -> Path:
    """Write `final/README.md` from the plan, the recipe and the metrics of the run, and return its path.

    Raises: as `load_report`; LaunchError when the disk refuses.
    """
    report = load_report(folder)
    assert report.plan is not None, "A run that has a model has a plan."
    path = folder.final / "README.md"
    try:
        write_whole(path, render_card(report, report.plan))
    except OSError as error:
        raise disk_fault(error, "the model card cannot be written", path) from None
    return path


def render_card(report: Report, plan: Plan) -> str:
    """The card as Markdown."""
    figures = figures_of(report)
    rows = [
        ("steps", f"{report.steps[-1].step if report.steps else 0:,} of {plan.settings.max_steps:,}"),
        ("trained parameters", plan.parameters_words()),
        ("training loss", loss_words(figures)),
        ("training reward", reward_words(figures)),
        (eval_name(figures), eval_words(figures)),
        ("tokens", f"{figures.tokens:,}, {figures.loss_tokens:,} loss tokens"),
        ("time", duration(figures.seconds)),
        ("peak memory", gib(figures.measured_bytes) if figures.measured_bytes else ""),
    ]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"plain": plain, "code": code}
    # A fence is closed by one as long as itself at least.
    recipe = _yaml(public_recipe(plan))
    return environment.get_template("card.md.j2").render(
        header=_yaml(metadata(plan.recipe, plan.settings.adapter)),
        name=report.name,
        quoted_name=json.dumps(report.name).replace("`", "\\u0060"),
        method=METHODS[plan.recipe.method].title,
        base=base_words(plan.recipe),
        is_adapter=plan.settings.adapter is not None,
        task=TASKS[METHODS[plan.recipe.method].head][1],
        rows=[(name, value) for name, value in rows if value],
        data=[(one, lost_words(one)) for one in report.data],
        losses=losses_of(plan.recipe.method),
        benchmarks=rows_of(report.scores),
        sources=[public_place(source.source) for source in plan.recipe.data.train],
        recipe=recipe,
        fence="~" * max(4, longest_run(recipe, "~") + 1),
        versions=plan.versions,
    )


def _yaml(tree: object) -> str:
    """YAML without letters that nobody sees: escapes stand for all others where there is one."""
    text = yaml.safe_dump(tree, sort_keys=False, width=100, allow_unicode=True).strip()
    if printable(text) == text:
        return text
    return yaml.safe_dump(tree, sort_keys=False, width=100, allow_unicode=False).strip()


def metadata(recipe: Recipe, adapter: Adapter | None) -> dict[str, object]:
    """The header of a model that trained `adapter`: known facts only.

    A licence is not: it is the base model's and the data's to give.

    Source: https://huggingface.co/docs/hub/model-cards#model-card-metadata
    """
    header: dict[str, object] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": TASKS[METHODS[recipe.method].head][0],
        "tags": ["memtrain", recipe.method, *([adapter.kind] if adapter else [])],
    }
    if recipe.model.path is not None and is_hub_id(recipe.model.path):
        header["base_model"] = recipe.model.path
        header["base_model_relation"] = "adapter" if adapter else "finetune"
    datasets = [source.source for source in recipe.data.train if is_hub_id(source.source)]
    if datasets:
        header["datasets"] = datasets
    return header


def losses_of(method: str) -> str:
    """The sentence on the losses of a method: means over tokens, or the method's own."""
    made = METHODS[method]
    if made.num_answers == 0 and not made.is_online:
        return "Losses are means over loss tokens"
    return f"Losses are those of {made.title}"


def base_words(recipe: Recipe) -> str:
    """Model that the training began from, as Markdown."""
    if recipe.model.path is None:
        return "Random weights"
    revision = f" at {code(recipe.model.revision)}" if recipe.model.revision else ""
    return f"{code(public_place(recipe.model.path))}{revision}"


def longest_run(text: str, letter: str) -> int:
    """Letters of the longest run of one letter in a text."""
    return max((len(run) for run in re.findall(f"{re.escape(letter)}+", text)), default=0)
