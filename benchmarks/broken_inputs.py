"""Recipes and model folders broken at random, by a seed: does anything but a plain error come out?

    python benchmarks/broken_inputs.py [--recipes 20000] [--models 500] [--seed 0] [-o broken_inputs.json]

Every recipe is read as the command line reads it. Every eighth is a shipped one with other values of its
keys, and is planned, without its data.
Every model folder (truncated, mislabelled, with impossible configurations and hostile templates) is trained
for a step by `memtrain sft`, in a fork of this process. Counted are exit codes, tracebacks, errors without a
place or a cure, and hangs; the first of each kind is told with its seed, which makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mutants_of_models import make_models, mutate
from mutants_of_recipes import mutated, override, varied
from result_files import write_result

from memtrain.__main__ import main as memtrain
from memtrain.errors import EXIT_OUR_FAULT, RecipeError
from memtrain.recipes.reading.load import load_recipe

ROOT = Path(__file__).resolve().parents[1]
PLANNED = 8
"""Of so many recipes one is planned."""

HANG_S = 30
"""Processor time after which a mutant hangs."""

MEMORY_BYTES = 6 * 2**30
"""Address space of a model's mutant: a template or a configuration may not take the machine down."""

MODEL_CODES = (0, 2, 3, 4, 5, 7)
"""How a step on a mutated model may end: done, or an error of recipe, plan, data, launch or memory."""

RECIPE = """\
method: sft
model: {path: MODEL}
data: {train: ROWS, cache_dir: CACHE}
length: {max_length: 64}
train: {batch_rows: 4, max_steps: 1}
memory: {watch: false}
cluster: {device: cpu, processes: 1, threads: 1}
"""


STOPPED: list[int] = []
"""Signals that asked to stop: what was tried up to there is told."""


class Hang(BaseException):
    """Raised by the timer."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Ends what runs inside after HANG_S of processor time."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def recipe_outcome(seed: int, *, plans: bool) -> tuple[str, str]:
    """(how a mutant ended, what was wrong with that); written into the current folder."""
    random_ = random.Random(seed)
    if plans:
        text, words = varied(random_)
        raw = text.encode()
    else:
        raw = mutated(random_)
        words = [override(random_) for _ in range(random_.choice([0, 0, 1, 2]))]
    Path("my.yaml").write_bytes(raw)
    try:
        with limited():
            load_recipe("my.yaml", words)
            return planned(words) if plans else ("read", "")
    except RecipeError as error:
        silent = [one.what for one in error.faults if not (one.what.strip() and one.where)]
        return "refused", f"no place: {silent[0]}" if silent else ""
    except Hang:
        return "hang", f"more than {HANG_S} s"
    except Exception:
        return "traceback", traceback.format_exc(limit=-3)


def planned(words: list[str]) -> tuple[str, str]:
    """How the plan of the recipe ended."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = memtrain(["plan", "my.yaml", "--without-data", *words])
    if code == EXIT_OUR_FAULT or "Traceback" in err.getvalue():
        return "traceback", err.getvalue()[-1500:]
    if code and "  try: " not in err.getvalue():
        return f"plan: code {code}", f"no cure: {err.getvalue()[:300]}"
    return f"plan: code {code}", ""


class ModelMutants:
    """Models to mutate and rows to train them on, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = make_models(folder / "models")
        rows = folder / "rows.jsonl"
        with rows.open("w") as file:
            for i in range(8):
                turns = [("user", f"What is {i} + 1?"), ("assistant", f"{i + 1}")]
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
                file.write(json.dumps(row) + "\n")
        places = {"MODEL": folder / "model", "ROWS": rows, "CACHE": folder / "cache"}
        text = RECIPE
        for word, place in places.items():
            text = text.replace(word, json.dumps(str(place)))
        (folder / "recipe.yaml").write_text(text)

    def outcome(self, seed: int) -> tuple[str, str]:
        """(how a step on the mutant of a seed ended, what was wrong with that)."""
        for name in ("run", "cache", "model"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        said = mutate(self.models, self.folder / "model", seed)
        output = self.folder / "output.txt"
        child = os.fork()
        if child == 0:
            self._child(output)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = output.read_text(errors="replace")
        wrong = fault_of(code, text)
        return f"code {code}", f"{said}\n{wrong}: {text[-1500:]}" if wrong else ""

    def _child(self, output: Path) -> None:
        """Train in this fork, and end it."""
        code = EXIT_OUR_FAULT
        try:
            file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(file, 1)
            os.dup2(file, 2)
            # A test's own capture stands in their place, and is no file of this process.
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            resource.setrlimit(resource.RLIMIT_CPU, (HANG_S, HANG_S))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            from memtrain.trainers.data.tokenize import template_limits

            template_limits.LIMIT_S = 1.0
            code = memtrain(["sft", str(self.folder / "recipe.yaml"), "--run-dir", str(self.folder / "run")])
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def fault_of(code: int, text: str) -> str:
    """What is wrong with how a step on a mutated model ended; empty where nothing is."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "hang"
    if code not in MODEL_CODES:
        return "exit code"
    if "Traceback" in text:
        return "traceback"
    if "trust_remote_code" in text:
        return "advice to trust code"
    if code and not ("\nerror: " in f"\n{text}" and "   at: " in text and "  try: " in text):
        return "no place or no cure"
    return ""


def run(count: int, seed: int, act: Callable[[int], tuple[str, str]], name: str) -> dict[str, Any]:
    """Counts of how `count` mutants ended, with the faults that were found."""
    ended: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    slowest, begun = (0.0, seed), time.process_time()
    tried = 0
    for number in range(seed, seed + count):
        if STOPPED:
            break
        tried += 1
        start = time.process_time()
        how, fault = act(number)
        ended[how] += 1
        slowest = max(slowest, (time.process_time() - start, number))
        if fault:
            wrong.append({"seed": number, "how": how, "said": fault})
            print(f"{name} {number}: {how}: {fault}", flush=True)
        if (number - seed + 1) % max(1, count // 20) == 0:
            print(f"{name}: {number - seed + 1:,} of {count:,}, {len(wrong)} faults", flush=True)
    return {
        "mutants": tried,
        "seed": seed,
        "ended": dict(sorted(ended.items())),
        "faults": len(wrong),
        "first_faults": wrong[:20],
        "slowest_s": round(slowest[0], 2),
        "slowest_seed": slowest[1],
        "processor_s": round(time.process_time() - begun + resource_s(), 1),
    }


def resource_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", type=int, default=20_000)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("broken_inputs.json"))
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, lambda number, frame: STOPPED.append(number))
    found: dict[str, Any] = {"python": platform.python_version(), "commit": commit()}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found["recipes"] = run(
            asked.recipes,
            asked.seed,
            lambda number: recipe_outcome(number, plans=number % PLANNED == 0),
            "recipe",
        )
        if asked.models:
            found["models"] = run(asked.models, asked.seed, ModelMutants(Path(folder)).outcome, "model")
        os.chdir(here)
    write_result(asked.output, found)
    print(json.dumps({name: one["ended"] for name, one in found.items() if isinstance(one, dict)}, indent=1))


def commit() -> str:
    """The commit that was tried."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip()


if __name__ == "__main__":
    main()
