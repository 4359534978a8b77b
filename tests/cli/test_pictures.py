"""Real output in the manual: commands of a page are run, and their lines stand behind them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGE = """\
Words.

<!-- shown: first 1, like ^last -->

```console
$ printf 'one\\ntwo\\nlast \\n' \\
    ; true
stale
$ echo "a
b"
```

```
$ echo left as it is
```
"""


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "benchmarks" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_output_of_a_page_is_made_again(pictures, tmp_path: Path):
    made = pictures.renewed(PAGE, tmp_path)
    shown = "one\n...\nlast\n"
    assert f"    ; true\n{shown}$ echo" in made
    assert '$ echo "a\nb"\na\n...\n```' in made
    assert "stale" not in made
    assert "$ echo left as it is\n```" in made
    assert pictures.renewed(made, tmp_path) == made


def test_a_command_that_fails_ends_the_script_with_what_it_said(pictures, tmp_path: Path):
    with pytest.raises(SystemExit, match="gone"):
        pictures.output_of("echo gone; exit 3", tmp_path)
