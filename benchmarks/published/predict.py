"""Predict every published run and compare: peaks and step times against measured ones, as a table and a plot.

python benchmarks/published/predict.py                # writes docs/published.md and docs/published.svg
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memtrain.cli.rescue.as_it_was import facts_of, priced_with
from memtrain.errors import MemtrainError
from memtrain.memory.estimate.static import overhead
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import ELSEWHERE as HAD
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import TRANSFORMERS, ForeignStep
from memtrain.recipes.edit import with_key
from memtrain.recipes.reading.load import load_text
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.pages.charts import COLOURS
from memtrain.trainers.pages.page import standalone
from memtrain.trainers.pages.scatter import Spot, agreement_chart

ROOT = Path(__file__).parents[2]
RUNS, EXPLAINED = Path(__file__).parent / "runs.json", Path(__file__).parent / "explained.md"
PAGE, PLOT = ROOT / "docs" / "published.md", ROOT / "docs" / "published.svg"
ROOM = 2**50
"""A budget that nothing exceeds: runs are priced, not refused."""

LEFT_AS_THEY_ARE: Mapping[str, object] = {
    "model.kernels": "transformers",
    "memory.checkpoint_every": 1,
    "memory.activation_offloading": "off",
    "memory.streamed_layers": "off",
    "memory.optimizer_offload": "off",
    "optim.in_backward": "off",
    "memory.expandable_segments": False,
    "length.padding_free": True,
    "cluster.engine": "ddp",
    "cluster.cpu_offload": "none",
    "memory.budget": ROOM,
}
PRESUMED = HAD | {"flash_attn_interface"}
"""Packages that the published run had."""
TOKENS = {"tokenizer": "builtin:tiny"}
"""No text is read."""
TRAINER = ("fms-acceleration", "ms-swift", "Qwen", "PEFT benchmark", "PEFT guides", "Answer.AI", "Unsloth")
TRAINER += ("PyTorch blog",)
FOREIGN = dict.fromkeys(TRAINER, TRANSFORMERS)
"""Sources whose plain loss and optimizer step are another tool's; torchtune's are the same as memtrain's."""
OF_VERSION = {"4.45.2": ForeignStep((1, 3, 3, 3), is_foreach=True)}
"""The step of a version of transformers that a source names, where it is another: before 4.46 models widened
their own logits, and kept no half-precision copy."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run beside its prediction; `gib` is None where it cannot be planned."""

    run: Mapping[str, Any]
    gib: float | None
    why_not: str = ""
    step_s: float | None = None
    """Predicted seconds of a step."""

    @property
    def ratio(self) -> float | None:
        return None if self.gib is None else self.gib / self.run["measured_gib"]

    @property
    def time_ratio(self) -> float | None:
        """Predicted seconds of a step over those that were published; None where none were."""
        said = self.run.get("step_s")
        return None if said is None or self.step_s is None else self.step_s / said


def recipe_of(run: Mapping[str, Any]) -> Recipe:
    """The run as a recipe: a step of as many micro-batches as the published run had."""
    keys = run["keys"]
    replicas = run["processes"] // keys.get("cluster.context_parallel", 1)
    rows = run["micro_batches"] * keys["train.micro_batch_size"] * replicas
    model = {"path": keys["model.path"]} if "model.path" in keys else {"config": keys["model.config"]}
    text = (
        f"method: sft\nmodel: {json.dumps(model | TOKENS)}\ndata: {{train: rows.jsonl}}\n"
        f"length: {{max_length: {keys['length.max_length']}, packing: bfd}}\ntrain: {{batch_size: {rows}}}\n"
    )
    recipe = load_text(text, run["setting"]).recipe
    if "model.adapter" in keys:
        given = keys["model.adapter"]
        recipe = with_key(recipe, "model.adapter", Adapter.model_validate(given))
    return recipe


def step_of(run: Mapping[str, Any]) -> ForeignStep | None:
    """The other tool's step; None where it is the same as memtrain's."""
    return OF_VERSION.get(run.get("transformers", ""), FOREIGN.get(run["source"]))


def compared(run: Mapping[str, Any]) -> Compared:
    """A run's prediction: live tensors, and the allocator's slack where reserved memory was published."""
    try:
        recipe = recipe_of(run)
        hardware = Hardware.named(run["gpu"], run["processes"])
        said = {**LEFT_AS_THEY_ARE, **run["keys"], "cluster.processes": run["processes"]}
        said.pop("model.adapter", None)
        said.pop("model.path", None)
        said.pop("model.config", None)
        if said["memory.activation_checkpointing"] == "off":
            said["memory.checkpoint_every"] = "auto"
        facts = replace(facts_of(recipe, hardware, PRESUMED), foreign=step_of(run))
        priced, _ = priced_with(recipe, said, facts)
    except MemtrainError as error:
        return Compared(run, None, error.faults[0].what)
    num_bytes = priced.prediction.peak.num_bytes
    num_bytes += run.get("kept_inputs", 0) * inputs_of_maps(run, facts.shape)
    if run["measures"] == "reserved":
        num_bytes *= 1 + overhead(priced.settings).slack
    return Compared(run, num_bytes / 2**30, step_s=priced.step_s)


def inputs_of_maps(run: Mapping[str, Any], shape: ModelShape) -> int:
    """Bytes of the inputs of all linear maps of a micro-batch."""
    maps = {part.name: part.num_inputs for part in shape.linears}
    tokens = run["keys"]["length.max_length"] * run["keys"]["train.micro_batch_size"]
    return 2 * tokens * shape.num_layers * (2 * shape.width + maps["o_proj"] + maps["down_proj"])


def has_words(run: Mapping[str, Any], words: str) -> bool:
    """Whether source, setting, class, card and differences of a run have all these words, parted by `;`; a
    word after an exclamation mark must not be there."""
    of_run = [
        run["source"],
        run["setting"],
        run["klass"],
        f"{run['processes']} x {run['gpu']}",
        *run["differs"],
    ]
    text = " | ".join(of_run)
    wanted = [word.strip() for word in words.split(";")]
    return all(word[1:] not in text if word.startswith("!") else word in text for word in wanted)


def spans(text: str, found: Sequence[Compared]) -> str:
    """The text with `<<words>>` as the ratios of the runs that have these words, lowest to highest; after
    `s:` of the seconds."""

    def span(match: re.Match[str]) -> str:
        words = match[1].removeprefix("s:")
        some = [one for one in found if has_words(one.run, words)]
        ratios = [one.ratio if words == match[1] else one.time_ratio for one in some]
        there = sorted(ratio for ratio in ratios if ratio is not None)
        low, high = f"{there[0]:.2f}", f"{there[-1]:.2f}"
        return low if low == high else f"{low} to {high}"

    return re.sub(r"<<(.+?)>>", span, text)


def figures(of: Sequence[float | None]) -> str:
    """Median and p95 of the errors of ratios, the lowest and the highest."""
    ratios = sorted(ratio for ratio in of if ratio is not None)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p95 = errors[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]
    median = statistics.median(errors)
    return f"| {len(ratios)} | {median:.1%} | {p95:.1%} | {ratios[0]:.2f} | {ratios[-1]:.2f} |"


def claim(found: Sequence[Compared]) -> str:
    """README's sentence of the same work and of the rest."""
    ratios = [one.ratio for one in found if one.ratio is not None and not one.run["differs"]]
    rest = [abs(one.ratio - 1) for one in found if one.ratio is not None and one.run["differs"]]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p95 = errors[round(0.95 * (len(errors) - 1))]
    low = max(1 - min(ratios), 0)
    return (
        f"{statistics.median(errors):.1%} off in the median, {p95:.1%} at p95 and {low:.1%} "
        f"too low at most of {len(ratios)} runs whose work is the same; {statistics.median(rest):.0%} in the "
        f"median of {len(rest)} that differ in something"
    ).replace("%", " %")


def goal(same: Sequence[Compared]) -> str:
    """The goal for the same work, and whether it is met."""
    ratios = [one.ratio for one in same if one.ratio is not None]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    p95 = errors[round(0.95 * (len(errors) - 1))]
    median, lowest = statistics.median(errors), min(ratios)
    is_met = median <= 0.01 and p95 <= 0.05 and lowest >= 0.97
    return (
        "The goal for the same work: the median within 1 %, the 95th percentile within 5 %, none predicted "
        f"more than 3 % too low. It is {'met' if is_met else 'not met'}: {median:.1%}, {p95:.1%}, and "
        f"{1 - lowest:.1%} too low at most, in {len(same)} runs."
    )


def page(found: Sequence[Compared]) -> str:
    planned = [one for one in found if one.gib is not None]
    timed = [one for one in planned if one.time_ratio is not None]
    head = EXPLAINED.read_text().format(total=len(found), planned=len(planned), timed=len(timed))
    same = [one for one in planned if not one.run["differs"]]
    lines = [spans(head, planned), "## By class", ""]
    lines += ["| runs | planned | median error | p95 | lowest | highest |", "|---|---|---|---|---|---|"]
    groups = {"same work": same, "something differs": [one for one in planned if one.run["differs"]]}
    groups |= grouped(planned, "klass")
    lines += [f"| {name} {figures([one.ratio for one in of])}" for name, of in groups.items() if of]
    lines += ["", goal(same), "", *times_by_class(timed)]
    lines += ["", "## Every run", "", COLUMNS, "|---" * COLUMNS.count(" | ") + "|---|"]
    lines += [row(one) for one in sorted(planned, key=order)]
    refused = [one for one in found if one.gib is None]
    if refused:
        lines += ["", "## Not planned", ""]
        lines += [f"- {one.run['source']}, {one.run['setting']}: {one.why_not}." for one in refused]
    return "\n".join(lines) + "\n"


COLUMNS = (
    "| source | run | measured GiB | predicted | ratio | published s | predicted | ratio | what differs |"
)


def order(one: Compared) -> tuple[str, str, str]:
    """The place of a run in the table."""
    return one.run["source"], one.run["klass"], one.run["setting"]


def row(one: Compared) -> str:
    """A run as a row of the table; without seconds where none were published."""
    run = one.run
    seconds = "| | | |"
    if one.time_ratio is not None:
        seconds = f"| {run['step_s']:.2f} | {one.step_s:.2f} | {one.time_ratio:.2f} |"
    return (
        f"| [{run['source']}]({run['link']}) | {run['setting']}, {run['processes']} x {run['gpu']} "
        f"| {run['measured_gib']:.2f} {run['measures']} | {one.gib:.2f} | {one.ratio:.2f} "
        f"{seconds} {'; '.join(run['differs'])} |"
    )


def grouped(found: Sequence[Compared], name: str) -> dict[str, list[Compared]]:
    """The runs by a fact of theirs, in the order in which it comes."""
    kinds = dict.fromkeys(one.run[name] for one in found)
    return {kind: [one for one in found if one.run[name] == kind] for kind in kinds}


def times_by_class(timed: Sequence[Compared]) -> list[str]:
    """The table of ratios of seconds: by class, by card and by source."""
    lines = [
        "## Step times by class",
        "",
        "| runs | timed | median error | p95 | lowest | highest | median ratio |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    groups = {"same work": [one for one in timed if not one.run["differs"]]}
    for name in ("klass", "gpu", "source"):
        groups |= grouped(timed, name)
    for name, of in groups.items():
        ratios = [one.time_ratio for one in of]
        middle = statistics.median(ratio for ratio in ratios if ratio is not None)
        lines.append(f"| {name} {figures(ratios)} {middle:.2f} |")
    return lines


def plot(found: Sequence[Compared]) -> str:
    """Predicted against measured on one logarithmic scale, a colour for each source; ringed: same work."""
    sources = list(dict.fromkeys(one.run["source"] for one in found if one.gib is not None))
    colours = {source: COLOURS[min(at, len(COLOURS) - 1)] for at, source in enumerate(sources)}
    spots = [
        Spot(
            run["measured_gib"],
            one.gib,
            f"{run['source']}: {run['setting']}",
            colours[run["source"]],
            is_chosen=not run["differs"],
        )
        for one in found
        if one.gib is not None and (run := one.run)
    ]
    title = "Predicted against published peaks"
    return standalone(agreement_chart(spots, title, unit="GiB", legend=list(colours.items()))) + "\n"


def main() -> None:
    found = [compared(run) for run in json.loads(RUNS.read_text())]
    PAGE.write_text(page(found))
    PLOT.write_text(plot(found))
    planned = [one for one in found if one.gib is not None]
    print(claim(planned))
    print("runs planned, median error, p95, lowest, highest")
    print("all:", figures([one.ratio for one in planned]))
    print("same work:", figures([one.ratio for one in planned if not one.run["differs"]]))
    print("seconds:", figures([one.time_ratio for one in planned]))


if __name__ == "__main__":
    main()
