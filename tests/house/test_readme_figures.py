"""Figures of README beside TRL's: each is that of a committed result, with a date and a commit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TABLE = README[README.index("| | memtrain | others |") : README.index("![Predicted peaks")]


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def span(values: Iterator[float] | list[float]) -> tuple[float, float]:
    found = sorted(values)
    return found[0], found[-1]


def of_sft(model: str, key: str) -> tuple[float, float]:
    return span([row[key]["median"] for row in result("sft_vs_trl")["rows"] if row["model"] == model])


CASES = (("8B", True, False), ("8B", True, True), ("0.6B", True, False), ("0.6B", False, False))
"""Size, an adapter or all weights, checkpointed or not."""


def on_card(side: str, key: str) -> list[Any]:
    """A figure of a side in each case; Unsloth trained no weights but adapters."""
    found = {
        (one["size"], one["lora"], one["checkpointed"]): one[key]
        for one in result("same_work")["turns"]
        if one["side"] == side
    }
    return [found[case] for case in CASES if case in found]


def claims() -> Iterator[str]:
    """The words of each row, made from its result."""
    speeds = {side: on_card(side, "tokens_per_s") for side in ("memtrain", "trl", "unsloth")}
    yield "8B LoRA {:,}, checkpointed {:,}; 0.6B LoRA {:,}, all weights {:,} |".format(*speeds["memtrain"])
    yield "TRL 1.16 with Liger: {:,}, {:,}; {:,}, {:,}. Unsloth".format(*speeds["trl"])
    yield "Unsloth 2026.10.9: {:,}, {:,}; {:,} | H100".format(*speeds["unsloth"])
    yield "{} GiB, {}; {}, {} | TRL".format(*on_card("memtrain", "peak_gib"))
    yield "TRL 1.16 with Liger: {} GiB, {}; {}, {}. Unsloth".format(*on_card("trl", "peak_gib"))
    yield "Unsloth: {}, {}; {} | H100".format(*on_card("unsloth", "peak_gib"))
    shares = [own / other for own, other in zip(speeds["memtrain"], speeds["unsloth"], strict=False)]
    yield "8B LoRA {:.2f}, checkpointed {:.2f}; 0.6B LoRA {:.2f} | Unsloth: 1".format(*shares)
    yield f"in bfloat16 | {speeds['memtrain'][3] / speeds['trl'][3]:.2f} | TRL 1.16 with Liger: 1"
    group = result("policy_peak")["completions"]["8"]
    beside = group["trl"]["peak_mib"] - 512
    yield f"{group['ours']['peak_mib']:.0f} MiB of live tensors | TRL 1.16: {beside:.0f} MiB"
    rows = result("data_preparation")
    yield f"{rows['memtrain']['cpu_s']:.1f} s of CPU | TRL 1.16: {rows['trl']['cpu_s']:.1f} s"
    low, high = of_sft("25M", "rss_growth_ratio")
    yield f"{low:.2f} to {high:.2f} (mostly weights and optimizer states)"


@pytest.mark.parametrize("words", list(claims()))
def test_a_figure_is_that_of_its_result(words: str):
    assert words in TABLE


def test_the_state_says_the_same_as_the_table():
    state = " ".join(README[README.index("## State") :].split())
    (few, many), (least, most) = of_sft("25M", "speed_ratio"), of_sft("0.9M", "speed_ratio")
    (low, high), (small, large) = of_sft("25M", "rss_growth_ratio"), of_sft("0.9M", "rss_growth_ratio")
    assert f"{least:.1f} to {most:.1f} times its tokens" in state
    assert f"{small:.2f} to {large:.2f} of its memory on a model of 0.9M" in state
    assert f"{few:.1f} to {many:.1f} times and {low:.2f} to {high:.2f} on one of 25M" in state


def test_kills_are_those_of_the_results():
    names = (
        "kill_and_resume",
        "kill_and_resume_streamed",
        "kill_moments",
        "kill_ranks",
        "kill_ranks_background",
    )
    found = [result(name)["kills"] for name in names]
    assert f"{sum(one if isinstance(one, int) else len(one) for one in found)} kills at random" in TABLE


def test_every_row_beside_trl_is_dated():
    for row in TABLE.splitlines():
        if "TRL 1.16" in row:
            assert re.search(r"(CPU|H100), 2026-\d\d-\d\d, commit [0-9a-f]{8}", row), row
