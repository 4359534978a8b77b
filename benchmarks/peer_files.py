"""Import other trainers' files in bulk, and plan what came out: a table with a row for each group of files.

git clone https://github.com/huggingface/trl && git clone https://github.com/axolotl-ai-cloud/axolotl
python benchmarks/peer_files.py trl=trl/examples axolotl=axolotl/examples --gpu h100 --save found.jsonl

NAME=PATH is a group: a file, or a folder with all its files of a kind that `memtrain import` reads. All runs
in this process, as the commands do it: `read` are the files whose trainer and method are known, `written` the
recipes that are whole (also where only rows or rewards are missing, which the file computes), `planned` those
that `memtrain plan` takes as they are. `--save` keeps each file's recipe and what was said, a JSON line each.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from memtrain.__main__ import main as memtrain
from memtrain.errors import EXIT_OUR_FAULT, MemtrainError
from memtrain.recipes.importers.importing import Imported, import_config, read_foreign

KINDS = (".yaml", ".yml", ".json", ".toml", ".py", ".sh", ".ipynb")
MOST_SECONDS = 120
"""After which a file is given up, and counted as a fault."""


def main() -> int:
    """Print the table; 1 where something ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--num-gpus", type=int, help="cards; else those that the recipe says")
    parser.add_argument("--no-plan", action="store_true")
    parser.add_argument("--save", type=Path, help="a JSON line a file")
    parser.add_argument("--show", type=int, default=12, help="reasons shown of a group")
    given = parser.parse_args()
    groups: dict[str, list[Path]] = {}
    for one in given.groups:
        name, _, path = one.partition("=")
        groups.setdefault(name, []).extend(files_of(Path(path or name)))
    kept = [] if given.save is None else [given.save.open("w")]
    table: list[tuple[str, ...]] = [("group", "files", "read", "written", "planned", "tracebacks", "seconds")]
    for name, files in groups.items():
        start, found = time.monotonic(), []
        for path in files:
            found.append(one_file(path, given))
            for file in kept:
                print(json.dumps({"group": name, "file": str(path), **found[-1]}), file=file, flush=True)
        counted = [
            sum(bool(one[key]) for one in found) for key in ("read", "written", "planned", "traceback")
        ]
        shares = [f"{one} ({one / len(files):.0%})" if files else "0" for one in counted[:3]]
        seconds = f"{time.monotonic() - start:.0f}"
        table.append((name, str(len(files)), *shares, str(counted[3]), seconds))
        for why, number in Counter(one["why"] for one in found if one["why"]).most_common(given.show):
            print(f"{name}: {number:3} {why}")
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    for row in table:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return int(any(row[5] != "0" for row in table[1:]))


def files_of(path: Path) -> list[Path]:
    """The files of a folder that may be configurations, or the file."""
    if path.is_file():
        return [path]
    return sorted(one for one in path.rglob("*") if one.suffix in KINDS and one.is_file())


def one_file(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """How far a file came, and why no further."""
    found: dict[str, Any] = dict.fromkeys(("read", "written", "planned"), False)
    found |= dict.fromkeys(("why", "tool", "method", "recipe", "traceback"), "") | {"notes": []}
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(MOST_SECONDS)
    try:
        foreign = read_foreign(str(path))
        found |= {"tool": foreign.tool.name, "method": foreign.method or ""}
        made = import_config(foreign)
        found |= {"read": True, "method": made.method, "recipe": made.text, "notes": made.notes}
        made = _with_stand_ins(made, path)
        found["written"] = not made.faults
        if made.faults:
            found["why"] = f"not whole: {made.faults[0].what}"
        elif not given.no_plan:
            found |= _planned(made.text, given)
    except MemtrainError as error:
        found["why"] = str(error).splitlines()[0].replace(str(path), "FILE").replace(path.name, "FILE")
    except Exception:
        found |= {"traceback": traceback.format_exc(), "why": f"TRACEBACK {sys.exc_info()[1]!r:.100}"}
    finally:
        signal.alarm(0)
    return found


def _with_stand_ins(made: Imported, path: Path) -> Imported:
    """The same with rows and a reward, where the file computes them: it is planned without reading any."""
    lacks = r"data(\.train)?: missing|\w+ needs rewards"
    if not made.faults or not all(re.match(lacks, one.what) for one in made.faults):
        return made
    return import_config(read_foreign(str(path)), has_stand_ins=True)


def _planned(text: str, given: argparse.Namespace) -> dict[str, Any]:
    """Whether `memtrain plan` takes the recipe, and what it says where it does not."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(text)
        number = [] if given.num_gpus is None else ["--num-gpus", str(given.num_gpus)]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = memtrain(["plan", str(recipe), "--gpu", given.gpu, "--without-data", *number])
    said = next((one for one in err.getvalue().splitlines() if one.startswith("error")), err.getvalue()[:200])
    if code == EXIT_OUR_FAULT:
        return {"traceback": err.getvalue(), "why": f"TRACEBACK {err.getvalue().splitlines()[-1]:.150}"}
    return {"planned": code == 0, "why": "" if code == 0 else f"plan: {said}"}


def _give_up(*_: object) -> None:
    raise TimeoutError(f"no answer in {MOST_SECONDS} s")


if __name__ == "__main__":
    sys.exit(main())
