"""`memtrain inspect-lengths` beside the tokenizer's own batch encoding: wall time, CPU time, peak memory.

    python benchmarks/inspect_lengths.py --megabytes 2000

A JSONL of prompts and completions with log-normal lengths is generated in a temporary folder, and a
byte-level BPE of 16,384 tokens is trained on its first rows. Both tasks run on the same text with the same
threads, each in a process of its own: `encode_batch_fast` on batches of 1,000 rendered rows (reading and
rendering are not timed), and the whole of `inspect` (reading, rendering, tokenizing, counting, all tables).
They take turns over equal parts of the file, so that a change of the machine's load meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from result_files import write_result

ROWS_AT_ONCE = 1_000
VOCABULARY = 16_384
NUM_WORDS = 50_000
RESULTS = Path(__file__).parent / "results"


def make_words(random: np.random.Generator) -> list[str]:
    """Words of 1 to 12 letters, the frequent ones short."""
    syllables = [
        a + b for a in "bcdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ou")
    ]
    words = [
        "".join(random.choice(syllables, 1 + int(rank**0.13) // 2 + random.integers(0, 2)))
        for rank in range(1, NUM_WORDS + 1)
    ]
    return [word + ("." if random.random() < 0.08 else "") for word in words]


def generate(path: Path, megabytes: int, seed: int) -> int:
    """Write the rows; how many there are."""
    random = np.random.default_rng(seed)
    words = np.array(make_words(np.random.default_rng(0)), dtype=object)
    share = 1 / (np.arange(NUM_WORDS) + 2.7)
    edges = np.cumsum(share / share.sum())
    count = 0
    with path.open("w") as file:
        while file.tell() < megabytes * 10**6:
            lengths = np.clip(random.lognormal(4.6, 1.0, ROWS_AT_ONCE), 4, 20_000).astype(int)
            drawn = words[np.searchsorted(edges, random.random(int(lengths.sum())))]
            begin = 0
            for length in lengths.tolist():
                row = drawn[begin : begin + length]
                begin, middle = begin + length, length // 3
                said = {"prompt": " ".join(row[:middle]) + " ", "completion": " ".join(row[middle:])}
                file.write(json.dumps(said) + "\n")
            count += ROWS_AT_ONCE
    return count


def train_tokenizer(path: Path, folder: Path) -> None:
    """A byte-level BPE trained on the first rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with path.open() as file:
        lines = [line for _, line in zip(range(8_000), file, strict=False)]
    tokenizer.train_from_iterator((" ".join(json.loads(line).values()) for line in lines), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rendered(path: Path) -> Iterator[list[str]]:
    texts: list[str] = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            texts.append(row["prompt"] + row["completion"] + "<end>")
            if len(texts) == ROWS_AT_ONCE:
                yield texts
                texts = []
    if texts:
        yield texts


def run_raw(path: Path, tokenizer: str) -> dict[str, Any]:
    """Batch encoding alone."""
    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

    encoder = load_tokenizer(tokenizer)._tokenizer
    wall = cpu = 0.0
    tokens = 0
    for texts in rendered(path):
        began, used = time.perf_counter(), time.process_time()
        found = encoder.encode_batch_fast(texts)
        wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - used
        tokens += sum(len(one) for one in found)
    return {"wall_s": wall, "cpu_s": cpu, "tokens": tokens}


def run_inspect(path: Path, tokenizer: str) -> dict[str, Any]:
    """Everything that the command does but printing."""
    from memtrain.recipes.sections.data import Data
    from memtrain.recipes.sections.length import Length
    from memtrain.recipes.sections.training import Train
    from memtrain.trainers.data.length_report.inspect import Question, inspect
    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    loaded("a few words")
    before = peak_bytes()
    reading_s = [0.0, 0.0]
    began, used = time.perf_counter(), time.process_time()

    def progress(rows: int, tokens: int, total: int | None) -> None:
        reading_s[:] = [time.perf_counter() - began, time.process_time() - used]

    data = Data.model_validate({"train": str(path)})
    found = inspect(Question(str(path), data, Length(), Train(), None, tokenizer), loaded, progress=progress)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - used,
        "reading_wall_s": reading_s[0],
        "reading_cpu_s": reading_s[1],
        "tokens": found.tokens,
        "rows": found.rows,
        "peak_above_tokenizer_mib": (peak_bytes() - before) / 2**20,
    }


TASKS = {"raw": run_raw, "inspect": run_inspect}


def in_process(task: str, path: Path, tokenizer: Path, cache: Path) -> dict[str, Any]:
    """One task in a process of its own."""
    environment = os.environ | {"MEMTRAIN_CACHE": str(cache), "TOKENIZERS_PARALLELISM": "true"}
    words = [sys.executable, __file__, "--task", task, "--path", str(path), "--tokenizer", str(tokenizer)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(megabytes: int, parts: int) -> dict[str, Any]:
    """Both tasks in turns over equal parts; then the whole file once for the peak of memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [folder / f"part{number}.jsonl" for number in range(parts)]
        rows = sum(generate(path, megabytes // parts, seed) for seed, path in enumerate(files, start=1))
        train_tokenizer(files[0], folder / "tokenizer")
        turns: list[dict[str, Any]] = []
        for number, path in enumerate(files):
            order = ("raw", "inspect") if number % 2 else ("inspect", "raw")
            turn = {task: in_process(task, path, folder / "tokenizer", folder / "cache") for task in order}
            assert turn["raw"]["tokens"] == turn["inspect"]["tokens"], "Both must see the same tokens."
            turns.append(turn | {"load_average": os.getloadavg()[0]})
        return {"megabytes": sum(path.stat().st_size for path in files) / 1e6, "rows": rows, "turns": turns}


def commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return said.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2_000)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--tokenizer")
    asked = parser.parse_args()
    if asked.task is not None:
        print(json.dumps(TASKS[asked.task](asked.path, asked.tokenizer)))
        return
    found = measure(asked.megabytes, asked.parts)
    turns = found["turns"]

    def total(task: str, key: str) -> float:
        return sum(turn[task][key] for turn in turns)

    result = {
        "question": "speed of inspect-lengths beside raw batch encoding of the same text; its peak memory",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/inspect_lengths.py", *sys.argv[1:]]),
        "device": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {name: version(name) for name in ("memtrain", "tokenizers", "transformers", "numpy")}
        | {"python": platform.python_version()},
        "speed_of_raw_wall": total("raw", "wall_s") / total("inspect", "wall_s"),
        "speed_of_raw_cpu": total("raw", "cpu_s") / total("inspect", "cpu_s"),
        "speed_of_raw_wall_reading_only": total("raw", "wall_s") / total("inspect", "reading_wall_s"),
        "speed_of_raw_cpu_reading_only": total("raw", "cpu_s") / total("inspect", "reading_cpu_s"),
        "peak_above_tokenizer_mib": max(turn["inspect"]["peak_above_tokenizer_mib"] for turn in turns),
        **found,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "inspect_lengths.json"
    write_result(path, result)
    print(json.dumps({key: value for key, value in result.items() if key != "turns"}, indent=1))


if __name__ == "__main__":
    main()
