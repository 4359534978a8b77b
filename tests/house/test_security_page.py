"""docs/security.md names the test behind each of its sentences: they are there."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_security_page_names_is_there():
    page = (ROOT / "docs/security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", page))
    assert len(named) > 20
    defined: set[str] = set()
    kept = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in kept.stdout.split():
        if name.endswith(".py") and (ROOT / name).is_file():
            defined |= set(re.findall(r"^def (test_\w+)", (ROOT / name).read_text(), re.MULTILINE))
    assert not named - defined
    assert not [file for file in files if not (ROOT / file).is_file()]
