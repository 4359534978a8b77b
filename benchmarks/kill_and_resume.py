"""Ten kills at random moments: does the same command go on with the same losses, bit for bit?

    python benchmarks/kill_and_resume.py gsm8k/train.jsonl [--kills 10] [--seed 0] [-o kill_and_resume.json]
                                         [KEY=VALUE ...]

`memtrain sft` is started as a user starts it, on questions and answers, packed, with LoRA dropout, NEFTune,
accumulation and a cosine schedule, and killed with SIGKILL after a random time between nothing and what the
whole run takes. The same command again goes on, until that many kills were made and the run ended. A run that
ends earlier is followed by another one. `KEY=VALUE` overrides the recipe, such as
memory.streamed_layers=on. Every line of the metrics that tells a step or an evaluation is
compared with those of a run that nobody killed: the text of the numbers must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_files import write_result

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
method: sft
model:
  config: {{model_type: llama, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, tie_word_embeddings: true}}
  tokenizer: builtin:tiny
  adapter: {{r: 8, dropout: 0.1}}
data:
  train: {{source: {data}, limit: 400}}
  columns: {{prompt: question, completion: answer}}
  eval_fraction: 0.05
length: {{max_length: 512, packing: bfd_split}}
optim: {{lr: 2e-3, schedule: cosine, warmup_steps: 4, weight_decay: 0.1, neftune_alpha: 5}}
train: {{batch_size: 8, micro_batch_size: 2, max_steps: 40}}
eval: {{every_steps: 10}}
save: {{every_steps: 4, keep_best: true}}
cluster: {{device: cpu, processes: 1, threads: 1}}
"""
OVERRIDES: list[str] = []
"""Overrides of the recipe that the command line names."""
SAME = ("step", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "extra")


def begin(recipe: Path, folder: Path) -> subprocess.Popen[bytes]:
    """The command, as a process."""
    words = [sys.executable, "-m", "memtrain", "sft", str(recipe), *OVERRIDES, "--run-dir", str(folder)]
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder.parent / f"{folder.name}.txt").open("ab") as output:
        return subprocess.Popen(words, env=os.environ | given, stdout=output, stderr=output)


def lines_of(folder: Path) -> list[tuple[Any, ...]]:
    """What must not move of every step and evaluation, in the order in which it was reported."""
    path = folder / "metrics.jsonl"
    whole = (
        [text for text in path.read_text().splitlines(True) if text.endswith("\n")] if path.exists() else []
    )
    reported = [json.loads(text) for text in whole]
    return [
        (line["kind"], *(json.dumps(line.get(name)) for name in SAME))
        for line in reported
        if line["kind"] in ("step", "eval")
    ]


def kill_once(recipe: Path, folder: Path, lives_s: float) -> dict[str, Any] | None:
    """Begin or go on, and kill after `lives_s`; None when the run had ended before."""
    process = begin(recipe, folder)
    try:
        code = process.wait(lives_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        code = process.wait()
    if code == 0:
        return None
    if code != -signal.SIGKILL:
        raise SystemExit((folder.parent / f"{folder.name}.txt").read_text())
    steps = [line for line in lines_of(folder) if line[0] == "step"]
    saved = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    return {
        "run": folder.name,
        "lived_s": round(lives_s, 2),
        "step": int(steps[-1][1]) if steps else 0,
        "checkpoints": saved,
    }


def compared(folder: Path, whole: Path) -> dict[str, Any]:
    """How many lines of a killed run differ from those of the whole one, and whether its weights do."""
    mine, other = lines_of(folder), lines_of(whole)
    weights = [next((path / "final").glob("*.safetensors")) for path in (folder, whole)]
    return {
        "run": folder.name,
        "lines": len(other),
        "lines_that_differ": abs(len(mine) - len(other))
        + sum(a != b for a, b in zip(mine, other, strict=False)),
        "final_weights_are_equal": weights[0].read_bytes() == weights[1].read_bytes(),
        "state": json.loads((folder / "status.json").read_text())["state"],
    }


def memory_settings(folder: Path) -> dict[str, Any]:
    """How the run's plan treats its layers."""
    settings = json.loads((folder / "plan.json").read_text())["settings"]
    names = ("slice_tokens", "checkpoint_every", "offload", "weights_offload", "in_backward")
    return {name: settings[name] for name in names}


def end(recipe: Path, folder: Path) -> None:
    """Let a run go to its end."""
    if begin(recipe, folder).wait():
        raise SystemExit((folder.parent / f"{folder.name}.txt").read_text())


def main() -> None:
    """Kill, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "benchmarks/results/kill_and_resume.json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    asked = parser.parse_intermixed_args()
    OVERRIDES.extend(asked.overrides)
    moments = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as name:
        os.environ["MEMTRAIN_CACHE"] = f"{name}/cache"
        recipe = Path(name) / "recipe.yaml"
        recipe.write_text(RECIPE.format(data=json.dumps(str(asked.data.resolve()))))
        whole = Path(name) / "whole"
        end(recipe, whole)
        began = time.monotonic()
        end(recipe, Path(name) / "again")
        taken_s = time.monotonic() - began
        kills: list[dict[str, Any]] = []
        folders = [Path(name) / "killed-1"]
        while len(kills) < asked.kills:
            killed = kill_once(recipe, folders[-1], moments.uniform(0.0, taken_s))
            if killed is None:
                folders.append(Path(name) / f"killed-{len(folders) + 1}")
            else:
                kills.append(killed)
                print(json.dumps(killed), flush=True)
        end(recipe, folders[-1])
        reported = {
            "environment": environment(),
            "overrides": OVERRIDES,
            "settings": memory_settings(whole),
            "seed": asked.seed,
            "whole_run_s": round(taken_s, 2),
            "kills": kills,
            "runs": [compared(folder, whole) for folder in [Path(name) / "again", *folders]],
        }
    write_result(asked.out, reported)
    print(json.dumps(reported["runs"], indent=1))
    if any(run["lines_that_differ"] or not run["final_weights_are_equal"] for run in reported["runs"]):
        raise SystemExit("not the same")


def environment() -> dict[str, Any]:
    """Where it was run."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    words = [Path(word).name if "/" in word else word for word in sys.argv]
    return {
        "device": f"{names[0].split(':')[1].strip()}, {os.cpu_count()} cores, 1 thread used",
        "system": platform.platform(),
        "commit": commit.stdout.strip(),
        "command": shlex.join(["python", *words]),
    }


if __name__ == "__main__":
    main()
