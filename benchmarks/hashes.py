"""Write constraints.hashes.txt: the pinned packages of the tests with the hashes of their files.

    python benchmarks/hashes.py

pip resolves each pin of constraints.txt on the index that it is set to, for each supported Python on Linux
x86-64, and downloads wheels' metadata alone; of a package that has no wheel its source is downloaded. torch
is left out: which build of it is right, for a CPU or with CUDA's libraries, is the machine's. What the build
of memtrain itself needs is added. See docs/decisions/0025-torch-is-pinned-by-version-the-rest-by-hash.md.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints.hashes.txt"
PYTHONS = ("3.11.9", "3.12.5")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
OF_MACHINE = ("torch",)
OF_DOCS = ("zensical", "deepmerge", "markdown", "pymdown-extensions", "tomli")
"""Packages of the site alone: `make docs` installs them."""
SOURCES = ("deepspeed",)
"""Packages without a wheel."""
BUILD = ("editables==0.6", "hatchling==1.33.0", "tomlkit==0.15.2", "trove-classifiers==2026.9.21.13")
"""What builds memtrain, beside what is pinned already. Taste: the newest of 2026-11-28."""
HEAD = """\
# The packages of the tests by the hashes of their files, for Python 3.11 and 3.12 on Linux x86-64, torch left
# out: `make setup HASHES=1`. Written by `python benchmarks/hashes.py` after a change of constraints.txt.
"""


def pins() -> list[str]:
    """`name==version` of every package that is installed by its hash."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    left_out = {*OF_MACHINE, *OF_DOCS}
    return sorted([line for line in lines if name_of(line) not in left_out] + [*BUILD], key=name_of)


def name_of(pin: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def hashes_of(pinned: list[str]) -> dict[str, set[str]]:
    """Hashes of the files of each pin, by its name."""
    found: dict[str, set[str]] = {name_of(pin): set() for pin in pinned}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheels = [pin for pin in pinned if name_of(pin) not in SOURCES]
        for python in PYTHONS:
            words = ["install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--target", folder]
            words += ["--python-version", python, "--implementation", "cp", "--report", str(place / "report")]
            words += [word for name in PLATFORMS for word in ("--platform", name)]
            pip(words + wheels)
            for one in json.loads((place / "report").read_text())["install"]:
                found[name_of(one["metadata"]["name"])].add(
                    one["download_info"]["archive_info"]["hashes"]["sha256"]
                )
        for pin in (pin for pin in pinned if name_of(pin) in SOURCES):
            pip(
                [
                    "download",
                    "--no-binary",
                    ":all:",
                    "--no-build-isolation",
                    "--dest",
                    str(place / "source"),
                    pin,
                ]
            )
            for file in (place / "source").iterdir():
                found[name_of(pin)].add(hashlib.sha256(file.read_bytes()).hexdigest())
    return found


def pip(words: list[str]) -> None:
    """Run pip without dependencies."""
    subprocess.run([sys.executable, "-m", "pip", words[0], "--quiet", "--no-deps", *words[1:]], check=True)


def main() -> None:
    pinned = pins()
    found = hashes_of(pinned)
    lines = [
        " \\\n    ".join([pin, *(f"--hash=sha256:{one}" for one in sorted(found[name_of(pin)]))])
        for pin in pinned
    ]
    FILE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
