"""Packages for a machine without a network: wheels that lie in .whl/ are unpacked, and come first."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = ".whl"


def site_of(root: Path) -> Path | None:
    """The folder of the packages from `root`/.whl, unpacked once for the same wheels; None without any.

    Raises: CalledProcessError when pip cannot unpack them, such as for another version of Python.
    """
    wheels = sorted((root / FOLDER).glob("*.whl"))
    if not wheels:
        return None
    named = "\n".join([sys.version, *(f"{one.name} {one.stat().st_size}" for one in wheels)])
    digest = hashlib.sha256(named.encode()).hexdigest()[:12]
    site = Path(tempfile.gettempdir()) / f"memtrain-site-{digest}"
    if not (site / "done").is_file():
        words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        words += ["--no-cache-dir", "--upgrade", "--target", str(site), *map(str, wheels)]
        subprocess.run(words, check=True)
        (site / "done").touch()
    return site


def are_for_this_python(root: Path) -> bool:
    """Whether all packages in `root`/.whl are for the version of Python that runs."""
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    fitting = ("py3", "py2.py3", f"py{version}", f"cp{version}")
    return all(one.stem.split("-")[-3] in fitting for one in (root / FOLDER).glob("*.whl"))
