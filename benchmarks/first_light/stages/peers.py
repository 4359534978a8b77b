"""memtrain and TRL on the same weights and rows, in turns: tokens a second and peaks, and their ratios.

Each side is a process of its own that is built once, and makes its steps a round at a time while the other
waits. Where TRL is not installed the stage says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from first_light.bench import Bench

SIDES = ("memtrain", "trl")
ROUNDS, STEPS = 3, 2
"""Rounds that are timed, after one that is not; steps of a round."""


def against_trl(bench: Bench, size: str, overrides: list[str]) -> dict[str, Any]:
    """The ratio of the medians, memtrain's over TRL's, with the lowest and highest of the rounds."""
    if find_spec("trl") is None:
        return {"skipped": "trl is not installed here (collect its wheels: docs/offline.md)"}
    tokens = bench.tokens(2_048)
    path, words = bench.recipe("sft", size, tokens=tokens, overrides=overrides, batch=8, count=192)
    recipe = json.loads(Path(path).read_text())
    recipe["model"] = {"path": str(bench.saved(size)), "dtype": recipe["model"]["dtype"]}
    recipe["train"]["shuffle"] = False
    Path(path).write_text(json.dumps(recipe))
    bench.device.freed()
    job = {
        "recipe": path,
        "overrides": words,
        "model": str(bench.saved(size)),
        "rows": recipe["data"]["train"],
        "max_length": tokens,
        "batch": 8,
        "lora": any(word.startswith("model.adapter") for word in overrides),
        "device": bench.device.kind,
        "steps": STEPS,
        "rounds": ROUNDS + 1,
        "work": str(bench.work),
    }
    file = bench.work / "trl-job.json"
    file.write_text(json.dumps(job))
    found = in_turns(file, bench.work)
    return reported(found)


def in_turns(job: Path, work: Path) -> dict[str, list[dict[str, Any]]]:
    """The rounds of each side, one side after the other, `ROUNDS + 1` times."""
    sides = {name: _Side(name, job, work / f"side-{name}.log") for name in SIDES}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    try:
        for number in range(ROUNDS + 1):
            for name in SIDES if number % 2 == 0 else reversed(SIDES):
                found[name].append(sides[name].round())
    finally:
        for side in sides.values():
            side.end()
    return found


class _Side:
    def __init__(self, name: str, job: Path, log: Path) -> None:
        self.name, self.log = name, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "first_light.sides", name, str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                text=True,
            )

    def round(self) -> dict[str, Any]:
        """Let it make its steps."""
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None, "The pipes were asked for."  # noqa: PT018
        pipes[0].write("go\n")
        pipes[0].flush()
        line = pipes[1].readline()
        if not line:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"{self.name} ended: {' '.join(last)[:300]}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def reported(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians and ratios; the first round of each side is left out."""
    ours, theirs = ([one["tokens"] / one["seconds"] for one in found[name][1:]] for name in SIDES)
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    peaks = {name: max(one["peak_bytes"] for one in found[name]) for name in SIDES}
    ratio = median(ours) / median(theirs)
    said = f"{ratio:.2f} times TRL's tokens/s ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    peak = f"peak {peaks['memtrain'] / 2**30:.1f} against {peaks['trl'] / 2**30:.1f} GiB"
    return {
        "words": f"{said}, {peak}",
        "ratio": ratio,
        "ratios": ratios,
        "tokens_per_s": {"memtrain": median(ours), "trl": median(theirs)},
        "peak_bytes": peaks,
        "losses": {name: [one["loss"] for one in found[name]] for name in SIDES},
        "rounds": {name: [dict(one) for one in found[name]] for name in SIDES},
    }
