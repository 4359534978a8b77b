"""All questions that a CPU can answer, one after the other, with small settings: `make bench`.

    python benchmarks/suite.py [--trl-env trl-env] [--out bench-results] [--only NAME ...] [--again]

Each script's result goes into the folder OUT, and OUT/benchmarks.md shows them all. What is there already
is not made again (`--again`: it is), so that a call that was ended goes on. What needs TRL is left out where
its environment is not given, and said. docs/benchmarks.md is made of benchmarks/results, with the larger
settings that each script names in its first lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from result_files import write_result
from turns import where

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
"""Seconds after which a script is ended."""


@dataclass(frozen=True, slots=True)
class Question:
    """One script with small settings. OUT in its words: the result; TRL: a Python with trl; TRLBIN: `trl`."""

    name: str
    words: tuple[str, ...]
    is_stdout: bool = False
    """The result is what it prints."""

    @property
    def needs_trl(self) -> bool:
        """Whether the script cannot run without TRL."""
        return "TRL" in self.words or "TRLBIN" in self.words


BENCH = ("-m", "memtrain", "bench")
QUESTIONS = (
    Question("start_up", ("start_up.py", "--trl", "TRLBIN", "--repeats", "2", "-o", "OUT")),
    Question("packing", ("packing.py", "--trl", "TRL", "--repeats", "2", "-o", "OUT")),
    Question(
        "data_preparation",
        ("data_preparation.py", "--trl", "TRL", "--rows", "10000", "--repeats", "2", "-o", "OUT"),
    ),
    Question(
        "waterfall_sft",
        (*BENCH, "smoke/sft-packed", "--steps", "3", "--repeats", "2", "--ablate", "--json"),
        is_stdout=True,
    ),
    Question(
        "waterfall_dpo", (*BENCH, "smoke/dpo", "--steps", "3", "--repeats", "2", "--json"), is_stdout=True
    ),
    Question(
        "waterfall_grpo", (*BENCH, "smoke/grpo", "--steps", "3", "--repeats", "2", "--json"), is_stdout=True
    ),
    Question("shared_prompts", ("shared_prompts.py", "-o", "OUT")),
    Question(
        "sft_vs_trl",
        ("sft_vs_trl.py", "--trl", "TRL", "--repeats", "1", "--models", "0.9M", "--out", "OUT"),
    ),
    Question(
        "methods_vs_trl",
        ("methods_vs_trl.py", "--trl", "TRL", "--repeats", "1", "--models", "0.9M", "-o", "OUT"),
    ),
    Question("pairs_against_trl", ("pairs_against_trl.py", "--trl", "TRL", "--repeats", "1", "-o", "OUT")),
    Question("preferences_against_trl", ("preferences_against_trl.py", "--trl", "TRL", "-o", "OUT")),
    Question("policy_peak", ("policy_peak.py", "--trl", "TRL", "-o", "OUT")),
)


def main() -> None:
    """Ask what was not asked yet, then write the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trl-env", type=Path, help="folder of a virtual environment with trl")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--only", nargs="+", choices=[one.name for one in QUESTIONS])
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    env = asked.trl_env if asked.trl_env and (asked.trl_env / "bin" / "trl").exists() else None
    failed: list[str] = []
    for question in QUESTIONS:
        if asked.only and question.name not in asked.only:
            continue
        failed += (
            [question.name] if not answered(question, asked.out.resolve(), env, again=asked.again) else []
        )
    from page import page, read_results

    (asked.out / "benchmarks.md").write_text(page(read_results(asked.out)))
    print(f"wrote {asked.out / 'benchmarks.md'}")
    if failed:
        print(f"not measured: {', '.join(failed)}; their last lines are in {asked.out}", file=sys.stderr)
        sys.exit(1)


def answered(question: Question, out: Path, env: Path | None, *, again: bool) -> bool:
    """Whether there is an answer, or none is to be had without TRL."""
    path = out / f"{question.name}.json"
    if path.is_file() and not again:
        print(f"{question.name}: there already")
        return True
    if question.needs_trl and env is None:
        print(f"{question.name}: left out, it needs --trl-env")
        return True
    beside = path.with_suffix(".tmp")
    command = [sys.executable, *_words(question, beside, env)]
    started = time.monotonic()
    print(f"{question.name} ...", flush=True)
    log = out / f"{question.name}.log"
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as errors:
        reported = beside.open("w") if question.is_stdout else errors
        try:
            done = subprocess.run(
                command,
                cwd=HERE,
                stdout=reported,
                stderr=errors,
                timeout=LIMIT_S,
                check=False,
                env={**os.environ, **quiet},
            )
        except subprocess.TimeoutExpired:
            print(f"{question.name}: not done after {LIMIT_S} s")
            return False
        finally:
            if reported is not errors:
                reported.close()
    if done.returncode or not _is_json(beside):
        said = log.read_text().strip().splitlines() or [f"exit code {done.returncode}"]
        print(f"{question.name}: failed: {said[-1]}", flush=True)
        return False
    if question.is_stdout:
        stamped(beside, "memtrain " + " ".join(question.words[len(BENCH) - 1 :]))
    beside.rename(path)
    print(f"{question.name}: {time.monotonic() - started:.0f} s", flush=True)
    return True


def stamped(result: Path, command: str) -> None:
    """Add device, date and commit to a result that was printed without."""
    reported = json.loads(result.read_text())
    write_result(result, reported | {"where": where(command)})


def _words(question: Question, out: Path, env: Path | None) -> list[str]:
    trl = {"TRL": str(env / "bin" / "python"), "TRLBIN": str(env / "bin" / "trl")} if env else {}
    known = {"OUT": str(out), **{name: str(Path(path).absolute()) for name, path in trl.items()}}
    return [known.get(word, word) for word in question.words]


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()
