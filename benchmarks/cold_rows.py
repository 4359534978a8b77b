"""A first step of a million rows that nobody tokenized before, beside encoding the same text alone.

    python benchmarks/cold_rows.py [--rows 1000000] [--repeats 3] [-o FILE]

Short rows, a prompt and a completion each (39 tokens with the template's), made up. Ours is one command,
`memtrain sft` of one step: it starts, reads the file, checks it, tokenizes and stores every row, lays them
out, plans and trains. The same command with 100 rows tells what it costs to start, plan and train; what a
million rows add to it is their preparation. Beside it the tokenizer alone encodes the same texts in batches
of 1,000, prompts and completions apart as a mask needs them: its seconds are those of the encoding calls, and
with reading them those of `json.loads` too. In turns, one thread each; wall and CPU time with children, and
the highest resident memory.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from data_preparation import WORDS
from turns import in_turns, medians, ratios, run, where, write

LENGTHS = ((6, 18), (3, 14))
FEW_ROWS = 100
RECIPE = """\
method: sft
model: {{path: builtin:tiny}}
data: {{train: {rows}, cache_dir: {folder}/cache}}
length: {{max_length: 128}}
train: {{batch_size: 16, max_steps: 1}}
cluster: {{device: cpu, threads: 1}}
"""
RAW = """\
import json, sys, time
from pathlib import Path
from tokenizers import Tokenizer
import memtrain
place = next(Path(memtrain.__file__).parent.rglob("tokenizer.json"))
tokenizer = Tokenizer.from_file(str(place))
cpu_s = wall_s = 0.0
began = time.process_time()
with open(sys.argv[1]) as lines:
    while batch := [json.loads(line) for line, _ in zip(lines, range(1000))]:
        cpu, wall = time.process_time(), time.perf_counter()
        for name in ("prompt", "completion"):
            tokenizer.encode_batch_fast([row[name] for row in batch])
        cpu_s, wall_s = cpu_s + time.process_time() - cpu, wall_s + time.perf_counter() - wall
with_reading = time.process_time() - began
print(json.dumps({"cpu_s": cpu_s, "wall_s": wall_s, "with_reading_cpu_s": with_reading}))
"""


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_rows(folder / "rows.jsonl", asked.rows)
        write_rows(folder / "few.jsonl", FEW_ROWS)
        sides = in_turns(
            {
                "first step": lambda: first_step(folder, "rows.jsonl"),
                "first step of few rows": lambda: first_step(folder, "few.jsonl"),
                "encoding alone": lambda: encoding(folder),
            },
            asked.repeats,
        )
        result = where("python benchmarks/cold_rows.py") | {"rows": asked.rows, "repeats": asked.repeats}
        result["bytes_of_jsonl"] = (folder / "rows.jsonl").stat().st_size
    for side, figures in sides.items():
        result[side] = medians(figures) | {"all": figures}
    whole, few, alone = sides.values()
    prepared = [one["cpu_s"] - other["cpu_s"] for one, other in zip(whole, few, strict=True)]
    result["preparation_cpu_s"] = prepared
    result["encoding_of_first_step"] = {
        key: ratios(*([one[key] for one in side] for side in (whole, alone))) for key in ("cpu_s", "wall_s")
    }
    result["encoding_of_preparation"] = {
        key: ratios(prepared, [one[key] for one in alone]) for key in ("cpu_s", "with_reading_cpu_s")
    }
    write("cold_rows", result, asked.output)


def write_rows(path: Path, count: int) -> None:
    """Prompts of 6 to 18 words with their number, completions of 3 to 14."""
    draw = random.Random(0)
    with path.open("w") as lines:
        for number in range(count):
            prompt, completion = (" ".join(draw.choices(WORDS, k=draw.randint(*one))) for one in LENGTHS)
            lines.write(json.dumps({"prompt": f"{prompt} {number}?", "completion": completion}) + "\n")


def first_step(folder: Path, rows: str) -> dict[str, float]:
    """Figures of a command that finds no cache."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        recipe = Path(own) / "recipe.yaml"
        recipe.write_text(RECIPE.format(rows=folder / rows, folder=own))
        command = [sys.executable, "-m", "memtrain", "sft", str(recipe), "--run-dir", f"{own}/run"]
        ended = run(command, folder=Path(own))
    if ended.code:
        raise SystemExit(ended.out)
    return {"cpu_s": ended.cpu_s, "wall_s": ended.wall_s, "peak_bytes": float(ended.peak_bytes)}


def encoding(folder: Path) -> dict[str, float]:
    """Seconds of the tokenizer alone."""
    ended = run([sys.executable, "-c", RAW, str(folder / "rows.jsonl")], folder=folder)
    if ended.code:
        raise SystemExit(ended.out)
    return json.loads(ended.out)


if __name__ == "__main__":
    main()
