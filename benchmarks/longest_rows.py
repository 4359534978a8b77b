"""Streamed layers: the longest row that a card is planned to take, beside those that others publish.

    python benchmarks/longest_rows.py           # two plans a row, seconds each; writes results and table
    python benchmarks/longest_rows.py --page    # the table of docs/streamed-layers.md, from the results

Each is the answer of `memtrain plan RECIPE --gpu h100 --solve max_length` with `--host-memory 4TiB` and a row
a step, by arithmetic; no GPU is asked. The plan at that length names what waits on the host: inputs of
layers, moments, float32 copies. Results: benchmarks/results/longest_rows.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from result_files import write_result

from memtrain.cli.plan.lookup import look_at_model
from memtrain.cli.plan.model_shape import shape_for
from memtrain.memory.estimate.host_memory import host_bytes
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.plan import Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.reading.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "longest_rows.json"
PAGE = ROOT / "docs" / "streamed-layers.md"
BEGIN = "| | memory | planned tokens | published elsewhere | waits on the host |"
END = "\n\nThe lengths that"
WHOLE = "79.10 GiB"
"""Memory of a whole H100, as torch gives it."""


class Row(NamedTuple):
    """A question, and the answer that somebody else published."""

    name: str
    recipe: str
    memory: str
    published: str = ""

    @property
    def words(self) -> list[str]:
        """The command's."""
        budget = [] if self.memory == WHOLE else ["--budget", self.memory.replace(" ", "")]
        asked = ["--gpu", "h100", "--host-memory", "4TiB", *budget, "--json"]
        return ["plan", self.recipe, *asked, "train.batch_size=1"]


ROWS = (
    Row("8B QLoRA", "sft/llama-3.1-8b-qlora", "12 GiB", "Unsloth 21,848"),
    Row("8B QLoRA", "sft/llama-3.1-8b-qlora", "16 GiB", "Unsloth 40,724"),
    Row("8B QLoRA", "sft/llama-3.1-8b-qlora", "24 GiB", "Unsloth 78,475"),
    Row("8B QLoRA", "sft/llama-3.1-8b-qlora", WHOLE, "Unsloth 342,733"),
    Row("8B LoRA in bfloat16", "sft/llama-3.1-8b-lora", "32 GiB"),
    Row("70B QLoRA", "sft/llama-3.3-70b-qlora", "48 GiB", "Unsloth 12,106"),
    Row("70B QLoRA", "sft/llama-3.3-70b-qlora", WHOLE, "Unsloth 89,389"),
    Row("8B full, float32 copies of the weights", "sft/llama-3.1-8b-full", WHOLE, "ALST 500,000"),
)


def main() -> None:
    """Ask for each row, and write the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the table from the results")
    if not parser.parse_args().page:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        found = [answer(row) for row in ROWS]
        write_result(RESULTS, {"commit": commit.stdout.strip(), "rows": found})
    known = json.loads(RESULTS.read_text())["rows"]
    text = PAGE.read_text()
    begin = text.index(BEGIN)
    PAGE.write_text(text[:begin] + table(known) + text[text.index(END, begin) :])


WAITING = (
    "offloaded activations",
    "optimizer states",
    "states of the host's weights",
    "weights",
    "gradients",
)
"""Owners of host memory beside the processes, the index of the data, and what a save copies."""


def answer(row: Row) -> dict[str, Any]:
    """The longest row, what waits on the host then, and the keys of the plan that others may want."""
    solved = asked_of([*row.words, "--solve", "max_length"])
    tokens = int(solved["value"])
    plan = asked_of([*row.words, "--without-data", f"length.max_length={tokens}"])
    settings = Settings.model_validate_json(json.dumps(plan["settings"]))
    config = look_at_model(load_recipe(row.recipe, []).recipe.model).config
    batch = HeaviestBatch(1, tokens, tokens, tokens)
    prediction = Prediction.model_validate_json(json.dumps(plan["prediction"]))
    owners = host_bytes(settings, shape_for(config), batch, 1, prediction)
    reported = {
        "name": row.name,
        "memory": row.memory,
        "tokens": tokens,
        "tokens_per_s": plan["tokens_per_s"],
    }
    reported |= {"slice_tokens": settings.slice_tokens, "weights_offload": settings.weights_offload}
    return reported | {"host_GiB": round(sum(owners.get(name, 0) for name in WAITING) / 2**30, 1)}


def asked_of(words: list[str]) -> dict[str, Any]:
    """What the command prints as JSON."""
    out = subprocess.run(["memtrain", *words], capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(f"memtrain {' '.join(words)}\n{out.stderr}")
    return json.loads(out.stdout)


def table(known: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    lines = [BEGIN, "|---|---|---|---|---|"]
    for row, one in zip(ROWS, known, strict=True):
        waits = f"{one['host_GiB']:,.0f} GiB"
        lines.append(f"| {row.name} | {row.memory} | {one['tokens']:,} | {row.published} | {waits} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
