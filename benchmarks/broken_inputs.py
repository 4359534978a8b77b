"""Recipes and model folders broken at random, by a seed: does anything but a plain error come out?

    python benchmarks/broken_inputs.py [--recipes 20000] [--models 500] [--seed 0]
        [-o benchmarks/results/broken_inputs.json]

Every recipe is read as the command line reads it. Every eighth is a shipped one with other values of its
keys, and is planned, without its data.
Every model folder (truncated, mislabelled, with impossible configurations and hostile templates) is trained
for a step by `memtrain sft`, in a fork of this process. Counted are exit codes, tracebacks, errors without a
place or a cure, and hangs; the first of each kind is reported with its seed, to make it again. The file holds
what was tried so far, of one commit: the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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

import psutil
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
train: {batch_size: 4, max_steps: 1}
memory: {measure_peaks: false}
cluster: {device: cpu, processes: 1, threads: 1}
"""


STOPPED: list[int] = []
"""Signals that asked to stop: what was tried up to there is reported."""


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
            # What the parent has mapped counts too: a CUDA build of torch maps several GiB.
            limit_bytes = psutil.Process().memory_info().vms + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
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


def run(
    part: dict[str, Any], seeds: range, act: Callable[[int], tuple[str, str]], keep: Callable[[], None]
) -> None:
    """Counts in `part` how the mutants of these seeds ended, from the first one that it does not have.

    `keep` writes what is counted so far, after every twentieth of the seeds and at the end.
    """
    ended = Counter(part.get("ended", {}))
    part.setdefault("seed", seeds.start)
    for name in ("mutants", "faults", "processor_s", "slowest_s"):
        part.setdefault(name, 0)
    part.setdefault("ended", {})
    wrong: list[dict[str, Any]] = part.setdefault("first_faults", [])
    for number in seeds[part["mutants"] :]:
        if STOPPED:
            break
        start = processor_s()
        how, fault = act(number)
        taken_s = processor_s() - start
        ended[how] += 1
        part["mutants"] += 1
        part["processor_s"] = round(part["processor_s"] + taken_s, 3)
        if taken_s > part["slowest_s"]:
            part |= {"slowest_s": round(taken_s, 2), "slowest_seed": number}
        if fault:
            part["faults"] += 1
            wrong += [{"seed": number, "how": how, "said": fault}] * (len(wrong) < 20)
            print(f"{number}: {how}: {fault}", flush=True)
        part["ended"] = dict(sorted(ended.items()))
        if part["mutants"] % max(1, len(seeds) // 20) == 0:
            print(f"{part['mutants']:,} of {len(seeds):,}, {part['faults']} faults", flush=True)
            keep()
    keep()


def processor_s() -> float:
    """Processor time of this process, and of its children that have ended."""
    return time.process_time() + resource_s()


def resource_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", type=int, default=20_000)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/broken_inputs.json")
    asked = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGTERM, lambda number, frame: STOPPED.append(number))
    output = asked.output.resolve()
    found: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {}
    if (found.get("commit"), found.get("seed")) != (commit(), asked.seed):
        found = {"python": platform.python_version(), "commit": commit(), "seed": asked.seed}
    keep = functools.partial(write, output, found)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        recipes = range(asked.seed, asked.seed + asked.recipes)
        run(found.setdefault("recipes", {}), recipes, recipe_or_plan, keep)
        if asked.models:
            models = range(asked.seed, asked.seed + asked.models)
            run(found.setdefault("models", {}), models, ModelMutants(Path(folder)).outcome, keep)
    print(json.dumps({name: one["ended"] for name, one in found.items() if isinstance(one, dict)}, indent=1))


def recipe_or_plan(seed: int) -> tuple[str, str]:
    """How the recipe of a seed ended; one of PLANNED is planned."""
    return recipe_outcome(seed, plans=seed % PLANNED == 0)


def write(output: Path, found: dict[str, Any]) -> None:
    """The result so far, whole or as it was."""
    beside = output.with_suffix(".tmp")
    write_result(beside, found)
    beside.replace(output)


def commit() -> str:
    """The commit that was tried."""
    reported = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return reported.stdout.strip()


if __name__ == "__main__":
    main()
