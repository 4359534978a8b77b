"""Reports of runs that ran out of memory, from the lists beside, and the answers of `memtrain rescue`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from memtrain.cli.rescue.find import Rescue, RescueQuestion, rescued_foreign
from memtrain.recipes.importers.importing import TOOLS, Foreign

FILES = tuple(
    Path(__file__).parent / name for name in ("reports.yaml", "more_reports.yaml", "latest_reports.yaml")
)
KNOWN_KEYS = {"link", "tool", "method", "config", "taken", "gpu", "budget", "processes"} | {
    "host_memory",
    "message",
    "said",
    "beyond",
}


@dataclass(frozen=True, slots=True)
class Report:
    """One row."""

    link: str
    asked: RescueQuestion
    foreign: Foreign
    beyond: str
    """Why no plan can fit; empty where one should."""

    @property
    def name(self) -> str:
        owner, repository, _, number = self.link.removeprefix("https://github.com/").split("/")
        return f"{repository}#{number}"


@cache
def rows() -> list[dict[str, Any]]:
    return [row for file in FILES for row in yaml.safe_load(file.read_text())]


def reports() -> list[Report]:
    return [_report(row) for row in rows()]


def _report(row: dict[str, Any]) -> Report:
    processes = row.get("processes", 1)
    foreign = Foreign(TOOLS[row["tool"]], row["config"], row.get("method"), processes, row["link"])
    asked = RescueQuestion(
        config="",
        traceback=f"torch.cuda.OutOfMemoryError: CUDA out of memory. {row.get('message', '')}",
        gpu=row.get("gpu"),
        budget=row.get("budget"),
        num_gpus=processes,
        host_memory=row.get("host_memory"),
    )
    return Report(row["link"], asked, foreign, row.get("beyond", ""))


@cache
def answer(at: int) -> Rescue:
    """What the command answers to a report."""
    report = reports()[at]
    return rescued_foreign(report.foreign, report.asked)
