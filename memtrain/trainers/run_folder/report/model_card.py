"""The model card: `final/README.md`, with the header that the Hugging Face hub reads; no torch."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.units import gib
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.progress import duration
from memtrain.trainers.run_folder.report.benchmarks import rows_of
from memtrain.trainers.run_folder.report.data_words import lost_words
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
    return environment.get_template("card.md.j2").render(
        header=yaml.safe_dump(
            metadata(plan.recipe, plan.settings.adapter), sort_keys=False, allow_unicode=True
        ).strip(),
        name=report.name,
        method=METHODS[plan.recipe.method].title,
        base=base_words(plan.recipe),
        is_adapter=plan.settings.adapter is not None,
        task=TASKS[METHODS[plan.recipe.method].head][1],
        rows=[(name, value) for name, value in rows if value],
        data=[(one, lost_words(one)) for one in report.data],
        losses=losses_of(plan.recipe.method),
        benchmarks=rows_of(report.scores),
        sources=[source.source for source in plan.recipe.data.train],
        recipe=report.recipe_text.strip(),
        versions=plan.versions,
    )


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
    """Model that the training began from."""
    if recipe.model.path is None:
        return "random weights"
    revision = f" at {recipe.model.revision}" if recipe.model.revision else ""
    return f"{recipe.model.path}{revision}"


def is_hub_id(name: str) -> bool:
    """Whether a name is `owner/name` on the hub, and neither a file, a folder nor a built-in."""
    is_data_file = re.search(r"\.(jsonl?|csv|parquet|arrow|txt)(\.gz)?$", name) is not None
    is_id = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None
    return is_id and not is_data_file and not Path(name).exists()
