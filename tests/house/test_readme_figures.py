"""Figures of README beside TRL's: each is that of a committed result, with a date and a commit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
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


def of_method(model: str, case: str, ratio: str, key: str) -> float:
    rows = [row for row in result("methods_vs_trl")["rows"] if (row["model"], row["case"]) == (model, case)]
    return median(rows[0][ratio][key])


def whole_grpo(model: str) -> tuple[float, float]:
    rows = [
        row for row in result("methods_vs_trl")["rows"] if row["model"] == model and row["case"] == "grpo"
    ]
    return span(rows[0]["ratio"]["whole_s"])


GSM8K = "11M, 32k words"


def claims() -> Iterator[str]:
    """The words of each row, made from its result."""
    (few, many), (least, most) = of_sft("25M", "speed_ratio"), of_sft("0.9M", "speed_ratio")
    yield f"25M weights: {few:.2f} (padded) to {many:.2f} (padding-free); 0.9M"
    yield f"0.9M: {least:.2f} to {most:.2f}"
    cases = ("sft", "dpo", "kto")
    near = [of_method(GSM8K, case, "ratio_compacting", "step_s") for case in cases]
    stands = [of_method(GSM8K, case, "ratio", "step_s") for case in cases]
    low, high = span([of_method(GSM8K, case, "ratio_compacting", "peak_mib") for case in cases])
    yield "TRL 1.16: {:.1f}, {:.1f}, {:.1f}; if its head".format(*stands)
    yield "{:.1f}, {:.1f}, {:.1f}, and".format(*near) + f" {low:.1f} to {high:.1f} times the memory"
    yield f"reward model {of_method(GSM8K, 'reward', 'ratio', 'step_s'):.1f}"
    (few, many), (least, most) = whole_grpo("25M"), whole_grpo("0.9M")
    yield f"TRL 1.16: {few:.1f} to {many:.1f} with 25M weights, {least:.1f} to {most:.1f} with 0.9M"
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
            assert re.search(r"CPU, 2026-\d\d-\d\d, commit [0-9a-f]{8}", row), row
