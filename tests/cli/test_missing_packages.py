"""A package that memtrain needs and that is not here is named, with the ways to it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memtrain import __main__ as program
from memtrain.__main__ import NEEDS, main

ROOT = Path(__file__).parents[2]


def test_the_packages_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!]", one)[0] for one in project["dependencies"]}
    assert set(NEEDS.values()) == names


def test_a_missing_package_is_no_bug_of_memtrain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On a node with torch and transformers alone there was a traceback, one package at a time."""
    gone = ("psutil", "peft")
    monkeypatch.setattr(program, "find_spec", lambda name: None if name in gone else object())

    def run(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    monkeypatch.setattr("memtrain.cli.app.run", run)
    assert main(["doctor"]) == 5
    assert capsys.readouterr().err == (
        "error: peft, psutil are not installed, and memtrain needs them\n"
        f"   at: {sys.executable}\n"
        "  try: pip install peft psutil\n"
        "   or: without a network: collect them with benchmarks/wheels.sh --all where there is one "
        "(docs/offline.md)\n"
    )


@pytest.mark.parametrize("module", ["gone", "torch.gone"])
def test_another_module_that_is_missing_is_a_bug(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(arguments: object) -> int:
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr("memtrain.cli.app.run", run)
    assert main(["doctor"]) == 70
    assert "this is a bug in memtrain" in capsys.readouterr().err


def test_wheels_are_collected_for_known_words_only():
    """A misspelt word was passed over, and the wheels were the few of none."""
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/wheels.sh"), "--al"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "unknown word: --al (--all, --peers)\n")
