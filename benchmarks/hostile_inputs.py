"""Hostile inputs of every kind, by a seed, through the real commands: does a plain error come out?

    python benchmarks/hostile_inputs.py [--kinds models,servers] [--each 40] [--limit-s 3600]
        [--seed 0] [-o FILE]

`make break` runs it for an hour. The kinds are in hostile_kinds.py. An attempt fails where it ends in a
traceback, in exit code 70 or by a signal; without a place or a cure; after more than its time or memory;
where a fault that was planted is accepted in silence; or where a file that is none of its business has
changed. The kinds take turns, so that a run that is cut has tried some of each. Printed are the counts of
tried and failed, by kind, and each failure with its seed: `--kinds KIND --seed N --each 1` makes it again.
The exit code is 1 where one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]

LIMIT_S = 60.0
"""Processor time of one attempt. A forked command of memtrain takes about two seconds."""

WALL_FACTOR = 4
"""Time on the clock after which an attempt hangs, in times of its processor time: it may wait for nothing."""

MEMORY_BYTES = 3 * 2**30
"""Memory that one attempt may use beside what it begins with."""

CODES = (0, 2, 3, 4, 5, 6, 7, 8, 75)
"""How a command may end: done, or an error of recipe, plan, data, launch, run folder, memory, numbers; asked
to stop."""

OUR_FAULT = 70


@dataclass(slots=True)
class Ended:
    """How a command ended."""

    code: int
    text: str
    """What it printed on both streams."""
    is_over_time: bool = False
    is_over_memory: bool = False


@dataclass(slots=True)
class Attempt:
    """A command of memtrain and what is known of its end."""

    said: str
    """What is hostile about it."""
    words: Sequence[str]
    is_refused: bool | None = None
    """True: a fault was planted that no command may accept; False: nothing is wrong; None: either."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    stdin: str = ""
    stdout: str = "file"
    """`file`, `closed`, `full` (/dev/full) or `gone` (a pipe that nobody reads)."""
    look: Callable[[Ended], str] = lambda ended: ""
    """What else is wrong with the end; empty where nothing is."""
    codes: Sequence[int] = CODES
    limit_s: float = LIMIT_S


def attempt(one: Attempt, folder: Path) -> str:
    """Run the command in a fork of this process, in `folder`; what is wrong with its end, or nothing."""
    output = folder / ".output"
    start = time.monotonic()
    begin, ready = os.pipe()
    child = os.fork()
    if child == 0:
        # Its memory is looked at before it takes any.
        os.close(ready)
        os.read(begin, 1)
        os.close(begin)
        _child(one, folder, output)
    own = _memory(child)
    os.close(begin)
    os.close(ready)
    ended = Ended(0, "")
    most = 0
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        used = _memory(child)
        most = max(most, used)
        if time.monotonic() - start > one.limit_s * WALL_FACTOR or used > own + 2 * MEMORY_BYTES:
            ended.is_over_time = used <= own + 2 * MEMORY_BYTES
            _kill(child)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    _kill(child)
    ended.code = os.waitstatus_to_exitcode(status)
    ended.is_over_time |= ended.code == -signal.SIGXCPU
    ended.is_over_memory = most > own + MEMORY_BYTES
    ended.text = output.read_text(errors="replace") if output.exists() else ""
    return fault_of(one, ended)


def fault_of(one: Attempt, ended: Ended) -> str:
    """What is wrong with the end of a command."""
    if ended.is_over_time:
        return f"hang: more than {one.limit_s:g} s of processor time, or {one.limit_s * WALL_FACTOR:g} s"
    if ended.is_over_memory:
        return f"memory: more than {MEMORY_BYTES / 2**30:g} GiB"
    if "Traceback (most recent call last)" in ended.text:
        return f"traceback: {ended.text[-1500:]}"
    if ended.code not in one.codes:
        return f"exit code {ended.code}: {ended.text[-1500:]}"
    if "trust_remote_code" in ended.text:
        return f"advice to trust code: {ended.text[-1500:]}"
    is_plain = "\nerror: " in f"\n{ended.text}" and "   at: " in ended.text and "  try: " in ended.text
    if one.stdout == "file" and ended.code not in (0, 75) and not is_plain:
        return f"no place or no cure: {ended.text[-1500:]}"
    if one.is_refused and ended.code == 0:
        return f"accepted in silence: {ended.text[-1500:]}"
    if one.is_refused is False and ended.code != 0:
        return f"refused, and nothing is wrong: {ended.text[-1500:]}"
    return one.look(ended)


def _memory(pid: int) -> int:
    """Bytes of a process and its children."""
    try:
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


def _kill(child: int) -> None:
    """End the group that the fork leads, whatever it started included."""
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)


def _child(one: Attempt, folder: Path, output: Path) -> None:
    """The command, in the fork; ends it."""
    code = OUR_FAULT
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(one.limit_s), int(one.limit_s) + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.update(one.environment)
        os.chdir(folder)
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
        source = os.open(os.devnull, os.O_RDONLY)
        if one.stdin:
            source, other = os.pipe()
            os.write(other, one.stdin.encode())
            os.close(other)
        os.dup2(source, 0)
        os.dup2(file, 2)
        os.dup2(_stdout(one.stdout, file), 1)
        # A test's own capture stands in their place, and is no file of this process.
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, m) for n, m in ((0, "r"), (1, "w"), (2, "w")))
        if one.stdout == "closed":
            # As Python begins where the descriptor is closed: there is no stream.
            os.close(1)
            sys.stdout = None
        from memtrain.__main__ import main as memtrain

        # As from a shell: with words of its own it leaves the streams to whoever called it.
        sys.argv = ["memtrain", *one.words]
        code = memtrain()
        if one.stdout == "file" and sys.stdout is not None:
            sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _stdout(kind: str, file: int) -> int:
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if kind == "gone":
        source, sink = os.pipe()
        os.close(source)
        return sink
    return file


@dataclass(slots=True)
class Count:
    """What was tried of one kind."""

    tried: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    faults: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


Act = Callable[[int, Path], tuple[str, str]]
"""(seed, an empty folder) -> (what was tried, what was wrong with its end)."""


def try_kinds(kinds: Mapping[str, Act], each: int, seed: int, limit_s: float) -> dict[str, Count]:
    """Try `each` inputs of each kind, a few of one kind at a time, until the time is over."""
    counts = {name: Count() for name in kinds}
    until = time.monotonic() + limit_s
    for number in range(seed, seed + each):
        for name, act in kinds.items():
            if time.monotonic() > until:
                return counts
            _try(name, act, number, counts[name])
    return counts


def _try(name: str, act: Act, number: int, count: Count) -> None:
    place = Path(tempfile.mkdtemp(prefix="memtrain-break-"))
    start = time.monotonic()
    try:
        said, fault = act(number, place)
    except Exception:
        said, fault = "the attempt itself", traceback.format_exc()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    count.tried += 1
    count.slowest_s = max(count.slowest_s, round(time.monotonic() - start, 1))
    if fault:
        count.failed += 1
        count.faults += [{"seed": number, "tried": said, "fault": fault}] * (len(count.faults) < 20)
        print(f"{name} {number}: {said}\n   {fault}", flush=True)


def main() -> int:
    from hostile_kinds import KINDS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="Names with commas: all if not given.")
    parser.add_argument("--each", type=int, default=1000, help="Inputs of each kind.")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="No attempt begins after so long.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="A file for the counts and the first failures.")
    asked = parser.parse_args()
    if unknown := [name for name in asked.kinds.split(",") if name not in KINDS]:
        parser.error(f"unknown kind {unknown[0]}; there are {', '.join(KINDS)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    counts = try_kinds(
        {name: KINDS[name] for name in asked.kinds.split(",")}, asked.each, asked.seed, asked.limit_s
    )
    width = max(map(len, counts))
    for name, one in counts.items():
        print(f"{name:<{width}}  tried {one.tried:>5}  failed {one.failed:>4}  slowest {one.slowest_s:>6} s")
    failed = sum(one.failed for one in counts.values())
    print(f"{'all':<{width}}  tried {sum(one.tried for one in counts.values()):>5}  failed {failed:>4}")
    if asked.output is not None:
        from result_files import write_result

        kept = {
            name: {f: getattr(one, f) for f in Count.__dataclass_fields__} for name, one in counts.items()
        }
        about = {"python": platform.python_version(), "commit": _commit(), "seed": asked.seed}
        write_result(asked.output, {**about, "kinds": json.loads(json.dumps(kept))})
    return 1 if failed else 0


def _commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
