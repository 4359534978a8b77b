"""The plan that docs/memory.md quotes against the plan that `memtrain plan` prints."""

import re
from pathlib import Path

import pytest

from memtrain.cli.app import run

PAGE = Path(__file__).parents[3] / "docs" / "memory.md"
COMMAND = ["plan", "sft/llama-3.1-8b-full", "--gpu", "h200", "--without-data"]


def quoted_lines() -> list[str]:
    """The lines with a figure of the quoted plan, each joined where it wraps."""
    block = PAGE.read_text().split("## Reading a plan\n\n```\n")[1].split("\n```")[0]
    joined = re.sub(r"\n {20,}", " ", block)
    joined = re.sub(r"(Host memory:[^\n]*)\n([^\n]+)\n", r"\1 \2\n", joined)
    return [" ".join(line.split()) for line in joined.splitlines() if re.search(r"\d", line)]


def test_every_figure_of_the_quoted_plan_is_printed_today(capsys: pytest.CaptureFixture[str]):
    run(COMMAND)
    printed = " ".join(capsys.readouterr().out.split())
    lines = quoted_lines()
    assert len(lines) > 15
    assert [line for line in lines if line not in printed] == []
