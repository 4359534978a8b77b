"""What saving costs the steps: while they wait, and in the background.

    python benchmarks/saving.py [-o benchmarks/results/saving.json] [--pairs 3] [--ranks 1]

A Llama of 25 M weights, AdamW, float32: 306 MB a checkpoint. The same run in turns with and without
`save.async_save`: how long each save held the steps, and what the steps beside it took. The losses of both
are compared, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from pathlib import Path
from typing import Any

import warm_ranks as warm
from many_ranks import ROOT, about
from result_files import write_result

RECIPE = """\
method: sft
model:
  config: {model_type: llama, hidden_size: 512, intermediate_size: 1376, num_hidden_layers: 8,
           num_attention_heads: 8, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: true}
  tokenizer: builtin:tiny
data: {train: {source: builtin:arithmetic, limit: 400}}
length: {max_length: 128}
memory: {measure_peaks: false}
train: {batch_size: 8, max_steps: 20}
save: {every_steps: 5, keep: 2}
cluster: {device: cpu, threads: 1}
"""


def run_once(recipe: Path, run: Path, num_ranks: int, *, background: bool) -> dict[str, Any]:
    """One run: seconds that each save held the steps, and seconds and processor seconds of the steps."""
    asked = [f"save.async_save={'true' if background else 'false'}", f"cluster.processes={num_ranks}"]
    asked += ["cluster.engine=fsdp2"] if num_ranks > 1 else []
    planned = warm.plan(recipe, "sft", run, asked)
    if planned.code:
        raise SystemExit(planned.said)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ranks = warm.start(run, num_ranks)
    if any(warm.wait(ranks)):
        raise SystemExit(ranks[0].said)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = warm.lines(run, "step")
    return {
        "background": background,
        "saves": [
            {name: round(line[name], 3) for name in ("step", "seconds", "held_s", "waited_s")}
            for line in warm.lines(run, "save")
        ],
        "steps_s": [round(line["seconds"], 3) for line in steps],
        "processor_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "whole_s": round(steps[-1]["time"] - steps[0]["time"], 3),
        "curve": warm.curve(run),
    }


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of some runs. The first save makes the buffers, and the last is waited for by the end."""
    held = [save["held_s"] for run in runs for save in run["saves"][1:-1]]
    return {
        "held_s": round(statistics.median(held), 3),
        "first_held_s": round(statistics.median([run["saves"][0]["held_s"] for run in runs]), 3),
        "written_in_s": round(statistics.median([s["seconds"] for run in runs for s in run["saves"]]), 3),
        "step_s": round(statistics.median([one for run in runs for one in run["steps_s"][1:]]), 3),
        "processor_s": round(statistics.median([run["processor_s"] for run in runs]), 2),
    }


def main() -> None:
    """Run in turns, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/saving.json")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    warm.warm_up()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["MEMTRAIN_CACHE"] = f"{place}/cache"
        recipe = Path(place) / "recipe.yaml"
        recipe.write_text(RECIPE)
        for number in range(2 * asked.pairs):
            run = Path(place) / f"run-{number}"
            runs.append(run_once(recipe, run, asked.ranks, background=number % 2 == 1))
    curves = [run.pop("curve") for run in runs]
    reported = about() | {
        "ranks": asked.ranks,
        "same_bits": all(curve == curves[0] for curve in curves),
        "waited_for": summed_up([run for run in runs if not run["background"]]),
        "in_the_background": summed_up([run for run in runs if run["background"]]),
        "runs": runs,
    }
    ranks = f" --ranks {asked.ranks}" if asked.ranks > 1 else ""
    reported["about"]["command"] = f"python benchmarks/saving.py --pairs {asked.pairs}{ranks}"
    reported["about"]["load"] = [round(one, 1) for one in os.getloadavg()]
    write_result(asked.output, reported)
    print(json.dumps({key: value for key, value in reported.items() if key != "runs"}, indent=1))


if __name__ == "__main__":
    main()
