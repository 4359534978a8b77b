"""From JSONL to packed rows: time, peak memory and bytes of cache, ours and TRL's in turns.

    python benchmarks/data_preparation.py --trl trl-env/bin/python [--rows 20000] [--repeats 3] [-o FILE]

The same file of prompts and completions and the same tokenizer. Ours reads, tokenizes into the store and
packs (`prepare` and `sequences_of`); TRL's reads with `load_dataset` and does the rest in `SFTTrainer`'s
`_prepare_dataset`, with packing bfd. Models are not loaded; imports are not timed. Neither finds a cache. One
process and one thread each: CPU time with children, the peak of the resident set above the imports', bytes on
disk afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meter import peak_bytes, reset_peak

MAX_LENGTH = 512
TEXT = "the pens trains leave at noon each has more than costs whole half sum of answer is so"
WORDS = tuple(TEXT.split())


def main() -> None:
    """Measure and write, or one side of it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trl", help="a Python with trl")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side is not None:
        side, folder = asked.side
        print(json.dumps({"memtrain": ours, "trl": theirs}[side](Path(folder))))
        return
    from turns import in_turns, medians, ratios, where, write

    pythons = {"memtrain": sys.executable} | ({"trl": asked.trl} if asked.trl else {})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        num_bytes = write_rows(folder / "rows.jsonl", asked.rows)
        save_tokenizer(folder / "tokenizer")
        sides = {side: partial(apart, python, side, folder) for side, python in pythons.items()}
        figures = in_turns(sides, asked.repeats)
    result = where("python benchmarks/data_preparation.py --trl PYTHON")
    result |= {"rows": asked.rows, "bytes_of_jsonl": num_bytes, "repeats": asked.repeats}
    result |= {side: medians(of_side) | {"all": of_side} for side, of_side in figures.items()}
    if asked.trl:
        result["ratio"] = {
            key: ratios(*([one[key] for one in figures[side]] for side in ("memtrain", "trl")))
            for key in ("cpu_s", "wall_s", "peak_bytes", "cache_bytes")
        }
        print(json.dumps(result["ratio"]))
    write("data_preparation", result, asked.output)


def write_rows(path: Path, rows: int) -> int:
    """A JSONL of random words; its bytes."""
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            sizes = (int(draw.lognormvariate(3.5, 0.6)) + 3, int(draw.lognormvariate(4.0, 0.8)) + 3)
            prompt, completion = (" ".join(draw.choices(WORDS, k=size)) for size in sizes)
            row = {"prompt": f"{number}: {prompt}?", "completion": f" {completion}."}
            file.write(json.dumps(row) + "\n")
    return path.stat().st_size


def save_tokenizer(folder: Path) -> None:
    """The built-in tokenizer, as both sides load it."""
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer_of(Model(path="builtin:tiny")).save_pretrained(folder)


def apart(python: str, side: str, folder: Path) -> dict[str, float]:
    """One side in a process and with caches of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        env = os.environ | {
            "HF_HOME": cache,
            "HF_DATASETS_CACHE": f"{cache}/datasets",
            "BENCH_CACHE": cache,
            "OMP_NUM_THREADS": "1",
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, __file__, "--side", side, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        reported = json.loads(done.stdout.strip().splitlines()[-1])
        size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
        return reported | {"cache_bytes": float(size)}


def measured(prepare: Callable[[], tuple[int, int]]) -> dict[str, float]:
    """CPU time and peak memory of `prepare`, which returns (sequences, tokens in them)."""
    before = reset_peak()
    cpu, wall = cpu_s(), time.perf_counter()
    sequences, tokens = prepare()
    return {
        "cpu_s": cpu_s() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_bytes": peak_bytes() - before,
        "sequences": float(sequences),
        "tokens": float(tokens),
    }


def cpu_s() -> float:
    """CPU seconds of this process and its children."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def ours(folder: Path) -> dict[str, float]:
    """memtrain: read, tokenize, store, pack."""
    import torch

    torch.set_num_threads(1)
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.data.packing.by_method import sequences_of
    from memtrain.trainers.data.store.prepare import prepare

    cache = Path(os.environ["BENCH_CACHE"])

    def work(rows: Path) -> tuple[int, int]:
        recipe_path = cache / "recipe.yaml"
        recipe_path.write_text(
            f"method: sft\nmodel: {{config: {{model_type: qwen3}}, tokenizer: {folder}/tokenizer}}\n"
            f"data: {{train: {rows}, cache_dir: {cache}/store}}\n"
            f"length: {{max_length: {MAX_LENGTH}, packing: bfd}}\n"
        )
        recipe = load_recipe(str(recipe_path)).recipe
        made = sequences_of(recipe, prepare(recipe), shares_prompts=False)
        return len(made.tokens), int(made.tokens.sum())

    # A few rows first, so that what is imported on the way is not timed.
    few = cache / "few.jsonl"
    write_rows(few, 4)
    work(few)
    return measured(lambda: work(folder / "rows.jsonl"))


def theirs(folder: Path) -> dict[str, float]:
    """TRL: load_dataset, and what SFTTrainer does with the rows before training."""
    import datasets
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = SFTConfig(
        output_dir=os.environ["BENCH_CACHE"],
        max_length=MAX_LENGTH,
        packing=True,
        packing_strategy="bfd",
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    # A trainer of a few rows, so that its constructor is not timed.
    few = datasets.Dataset.from_list([{"prompt": "one", "completion": " two"}] * 4)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **shape))
    trainer: Any = SFTTrainer(model=model, args=config, train_dataset=few, processing_class=tokenizer)

    def work() -> tuple[int, int]:
        rows = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
        made = trainer._prepare_dataset(rows, tokenizer, config, True, None, "train")
        column = made.data.column("input_ids")
        return len(made), int(sum(len(chunk.flatten()) for chunk in column.chunks))

    return measured(work)


if __name__ == "__main__":
    main()
