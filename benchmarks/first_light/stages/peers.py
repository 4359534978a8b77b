"""memtrain and TRL on the same weights and rows, in turns: tokens a second and peaks, and their ratios.

The two do not do the same work by default, so there are columns: each at its defaults, the same work, and TRL
as its users set it for speed. Each side is a process of its own that is built once, and makes its steps a
round at a time while the others wait. Where TRL is not installed the stage says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from first_light.bench import Bench

WARM_ROUNDS, ROUNDS, STEPS = 3, 5, 2
"""Rounds that are not timed: TRL's first took 7.7, 3.4 and 1.3 s on an H100, the fourth 1.2; then those that
are; steps of a round."""
TIME_S = 150.0
"""No round is begun later than so long after the first, where one has been timed."""
LOSSES_AGREE = 1e-3
"""Largest difference of the first step's losses, before any update."""
ROWS, PACKED_ROWS = 8, 5
"""Rows of a step; sequences that hold about as many tokens without padding."""
SAME_WORK = (
    "memory.activation_checkpointing=on",
    "memory.activation_offloading=off",
    "memory.streamed_layers=off",
    f"train.micro_batch_size={ROWS}",
)
PURE = "optim.master_weights=false"
"""TRL trains bfloat16 weights without float32 copies; adapters are float32 on both sides."""
FAST: dict[str, Any] = {
    "gradient_checkpointing": False,
    "use_liger_kernel": True,
    "packing": True,
    "packing_strategy": "bfd" if find_spec("flash_attn") else "wrapped",
    "per_device_train_batch_size": PACKED_ROWS,
}
"""Padding-free rows need flash-attn, as do packed ones that see themselves alone: without it rows are joined
and cut into full sequences, whose rows see one another."""


@dataclass(frozen=True, slots=True)
class Side:
    """One process: the program, and what it is given beside the job."""

    name: str
    program: str
    """`memtrain` or `trl`."""
    overrides: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of TRL's `SFTConfig`."""


@dataclass(frozen=True, slots=True)
class Column:
    """A comparison of two sides."""

    name: str
    ours: str
    theirs: str
    has_same_rows: bool = True


COLUMNS = (
    Column("each at its defaults", "memtrain", "TRL"),
    Column("the same work", "memtrain, checkpointing and no float32 copies", "TRL"),
    Column("TRL set for speed", "memtrain", "TRL set for speed", has_same_rows=False),
)


def against_trl(bench: Bench, size: str, overrides: list[str]) -> dict[str, Any]:
    """Each side's figures, and for each column the ratio of memtrain's tokens a second to TRL's."""
    if find_spec("trl") is None:
        return {"skipped": "trl is not installed here (collect its wheels: docs/offline.md)"}
    file = bench.work / "trl-job.json"
    job = job_of(bench, size, overrides)
    file.write_text(json.dumps(job))
    is_pure = not job["lora"] and bench.device.is_cuda
    # Two of the large ones are all that a card holds at a time, and the plan leaves half of it to the other;
    # without checkpointing TRL has no place beside it.
    is_large = size == "8B" and bench.device.is_cuda
    limit = [f"memory.budget={bench.device.total_bytes() // 2}"] if is_large else []
    sides = (
        Side("memtrain", "memtrain", limit),
        Side("TRL", "trl"),
        Side(COLUMNS[1].ours, "memtrain", [*limit, *SAME_WORK, *([PURE] if is_pure else [])]),
        Side("TRL set for speed", "trl", config=FAST),
    )
    if not is_large:
        return reported(in_turns(sides, file, bench.work))
    found: dict[str, Rounds] = {}
    for column in COLUMNS[:2]:
        pair = [one for one in sides if one.name in (column.ours, column.theirs)]
        found |= {f"{column.name}: {name}": one for name, one in in_turns(pair, file, bench.work).items()}
    return reported(found, COLUMNS[:2])


def job_of(bench: Bench, size: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What all sides have in common."""
    tokens = bench.tokens(2_048)
    path, words = bench.recipe("sft", size, tokens=tokens, overrides=overrides, batch=ROWS, count=192)
    recipe = json.loads(Path(path).read_text())
    recipe["model"] = {"path": str(bench.saved(size)), "dtype": recipe["model"]["dtype"]}
    recipe["train"]["shuffle"] = False
    Path(path).write_text(json.dumps(recipe))
    bench.device.freed()
    return {
        "recipe": path,
        "overrides": words,
        "model": str(bench.saved(size)),
        "rows": recipe["data"]["train"],
        "max_length": tokens,
        "batch": ROWS,
        "lora": any(word.startswith("model.adapter") for word in overrides),
        "device": bench.device.kind,
        "steps": STEPS,
        "rounds": WARM_ROUNDS + ROUNDS,
        "work": str(bench.work),
    }


@dataclass(slots=True)
class Rounds:
    """What a side has made."""

    used: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What it was set to, as it says itself."""
    made: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    fault: str = ""


def in_turns(sides: Sequence[Side], job: Path, work: Path, time_s: float = TIME_S) -> dict[str, Rounds]:
    """The rounds of each side, one after the other, the order turned each time; a side that ends is left."""
    running = {one.name: _Process(one, job, work / f"side-{number}.log") for number, one in enumerate(sides)}
    found = {one.name: Rounds() for one in sides}

    def asked(name: str, word: str) -> Mapping[str, Any] | None:
        if found[name].fault:
            return None
        try:
            return running[name].answer(word)
        except RuntimeError as error:
            found[name].fault = str(error)
            return None

    try:
        for name in running:
            found[name].used = asked(name, "") or {}
        until = time.monotonic() + time_s
        for number in range(WARM_ROUNDS + ROUNDS):
            if number > WARM_ROUNDS and time.monotonic() > until:
                break
            for name in running if number % 2 == 0 else reversed(running):
                made = asked(name, "go\n")
                found[name].made += [made] if made is not None else []
    finally:
        for process in running.values():
            process.end()
    return found


class _Process:
    def __init__(self, side: Side, job: Path, log: Path) -> None:
        self.name, self.log = side.name, log
        given = json.dumps({"overrides": list(side.overrides), "config": dict(side.config)})
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "first_light.sides", side.program, str(job), given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                text=True,
            )

    def answer(self, word: str) -> Mapping[str, Any]:
        """Its next line, after a word that lets it make its steps. Raises: RuntimeError when it has ended."""
        assert self.process.stdin is not None, "The pipe was asked for."
        assert self.process.stdout is not None, "The pipe was asked for."
        self.process.stdin.write(word)
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"{self.name} ended: {' '.join(said[-3:])[-400:]}")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def reported(found: Mapping[str, Rounds], columns: Sequence[Column] = COLUMNS) -> dict[str, Any]:
    """Medians and spreads of each side after its first rounds, and the columns."""
    sides = {name: _side(one) for name, one in found.items()}
    told = {one.name: column_of(one, found) for one in columns}
    return {
        "words": "; ".join(f"{name}: {one['words']}" for name, one in told.items()),
        "columns": told,
        "sides": sides,
    }


def _side(one: Rounds) -> dict[str, Any]:
    timed = [made["tokens"] / made["seconds"] for made in one.made[WARM_ROUNDS:]]
    figures = {"tokens_per_s": median(timed), "spread": [min(timed), max(timed)]} if timed else {}
    return {
        **({"fault": one.fault} if one.fault else {}),
        **figures,
        "peak_bytes": max((made["peak_bytes"] for made in one.made), default=0),
        "used": dict(one.used),
        "rounds": [dict(made) for made in one.made],
    }


def column_of(column: Column, found: Mapping[str, Rounds]) -> dict[str, Any]:
    """The ratio of the medians with those of the rounds, peaks, and the difference of the first losses."""
    names = [name if name in found else f"{column.name}: {name}" for name in (column.ours, column.theirs)]
    ours, theirs = (found[name] for name in names)
    pairs = list(zip(ours.made[WARM_ROUNDS:], theirs.made[WARM_ROUNDS:], strict=False))
    if not pairs:
        return {"sides": names, "words": ours.fault or theirs.fault or "no round was timed"}
    rates = [[one["tokens"] / one["seconds"] for one in side] for side in zip(*pairs, strict=True)]
    ratios = sorted(a / b for a, b in zip(*rates, strict=True))
    ratio = median(rates[0]) / median(rates[1])
    peaks = [max(one["peak_bytes"] for one in side.made) / 2**30 for side in (ours, theirs)]
    said = f"{ratio:.2f} times TRL's tokens/s ({ratios[0]:.2f}-{ratios[-1]:.2f} in {len(ratios)} rounds), "
    said += f"peak {peaks[0]:.1f} against {peaks[1]:.1f} GiB"
    made: dict[str, Any] = {"sides": names, "ratio": ratio, "ratios": ratios}
    if column.has_same_rows:
        apart = abs(ours.made[0]["losses"][0] - theirs.made[0]["losses"][0])
        made |= {"losses_apart": apart, "losses_agree": apart <= LOSSES_AGREE}
        said += f", first losses {'agree' if apart <= LOSSES_AGREE else 'differ'} ({apart:.1e})"
    else:
        said += ", rows cut and joined: its losses are others"
    return made | {"words": said}
