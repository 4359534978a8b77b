"""Pictures and real output of the manual and the README, made again by running what they show.

python benchmarks/pictures.py            # about eight minutes on one core; nothing is downloaded

Every `console` block of docs/tutorials/ is run, in order, in one folder with the files of examples/tutorial/:
the lines after a `$ command` become what it printed. A comment before the block (`<!-- shown: first 4, last 3
-->`) says which lines are kept. docs/pictures/ has rich's export of a terminal, and charts of reports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
TUTORIALS = [
    ROOT / "docs" / "tutorials" / f"{name}.md"
    for name in ("alpaca", "preferences", "reward-file", "out-of-memory")
]
"""In the order in which they are run: later ones take the models of earlier ones."""
PLAN = "memtrain plan sft/llama-3.1-8b-lora --gpu 4090 --without-data"
BLOCK = re.compile(r"(?:<!-- shown: (?P<shown>.*?) -->\n\n?)?```console\n(?P<body>.*?)```\n", re.S)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="memtrain-pictures-") as place:
        folder = Path(place) / "tutorial"
        shutil.copytree(ROOT / "examples" / "tutorial", folder)
        for page in TUTORIALS:
            print(page.relative_to(ROOT), flush=True)
            page.write_text(renewed(page.read_text(), folder))
        report_pictures(folder)
        calculator_picture(Path(place))
        terminal_picture(PLAN, output_of(PLAN, folder), PICTURES / "plan.svg")


def renewed(text: str, folder: Path) -> str:
    """A page with the output of today in its blocks."""

    def one(block: re.Match[str]) -> str:
        lines: list[str] = []
        for command in commands_of(block["body"]):
            shown = kept(output_of(command, folder).splitlines(), block["shown"] or "")
            lines += [f"$ {command}", *shown]
        body = "\n".join(lines)
        return block[0][: block.start("body") - block.start()] + body + "\n```\n"

    return BLOCK.sub(one, text)


def commands_of(body: str) -> list[str]:
    """The commands of a block: what follows a `$`, with the lines that a backslash or an open quote joins."""
    found: list[str] = []
    for line in body.splitlines():
        if found and (found[-1].endswith("\\") or found[-1].count('"') % 2):
            found[-1] += f"\n{line}"
        elif line.startswith("$ "):
            found.append(line[2:])
    return found


def kept(lines: list[str], shown: str) -> list[str]:
    """The lines that `shown` names (`first 4`, `last 3`, `like ^held-out`), `...` for each gap; or all."""
    if not shown:
        return lines
    wanted: set[int] = set()
    for words in shown.split(", "):
        kind, _, what = words.partition(" ")
        if kind == "like":
            wanted |= {at for at, line in enumerate(lines) if re.search(what, line)}
        else:
            count = int(what)
            wanted |= set(range(len(lines))[:count] if kind == "first" else range(len(lines))[-count:])
    found: list[str] = []
    for at, line in enumerate(lines):
        if at in wanted:
            found.append(line)
        elif not found or found[-1] != "...":
            found.append("...")
    return found


def output_of(command: str, folder: Path) -> str:
    """What a command prints into a pipe of 80 columns; a command that fails ends this script."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MEMTRAIN_CALIBRATION": "off",
        "MEMTRAIN_CACHE": str(folder.parent / "cache"),
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdout=-1, stderr=-2, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.replace(str(ROOT) + "/", "").splitlines())


def terminal_picture(command: str, output: str, file: Path) -> None:
    """A terminal with a command and its output, as an SVG that loads nothing."""
    from rich.console import Console
    from rich.text import Text

    with open(os.devnull, "w") as nothing:
        console = Console(record=True, width=92, file=nothing)
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text(output))
        drawn = console.export_svg(title="memtrain")
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S))


def report_pictures(folder: Path) -> None:
    """Charts of the report of the first tutorial's run, and its summary as the terminal shows it."""
    from memtrain.trainers.pages.page import standalone
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.report.curves import curve_groups
    from memtrain.trainers.run_folder.report.report import load_report
    from memtrain.trainers.run_folder.report.report_html import memory_of

    for name, run in (("sft", "alpaca-sft"), ("dpo", "pairs-dpo"), ("grpo", "parity")):
        report = load_report(RunFolder(folder / "runs" / run))
        large, _, _ = curve_groups(report)
        (PICTURES / f"{name}.svg").write_text(standalone(large[0].svg, large[0].legend))
        if name == "sft":
            memory = memory_of(report)
            (PICTURES / "memory.svg").write_text(standalone(memory.svg, memory.legend))


def calculator_picture(folder: Path) -> None:
    """The reward of examples/calculator-cpu, by its own commands."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    output_of("python examples/calculator-cpu/rows.py", folder)
    for method in ("sft", "grpo"):
        recipe = f"examples/calculator-cpu/{method}.yaml"
        output_of(f"memtrain {method} {recipe} --run-dir runs/calculator-{method}", folder)
    first_chart(folder / "runs" / "calculator-grpo", PICTURES / "calculator.svg")


def first_chart(run: Path, file: Path) -> None:
    """The first chart of a run's report: the loss, or the reward."""
    from memtrain.trainers.pages.page import standalone
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.report.curves import curve_groups
    from memtrain.trainers.run_folder.report.report import load_report

    large, _, _ = curve_groups(load_report(RunFolder(run)))
    file.write_text(standalone(large[0].svg, large[0].legend))


if __name__ == "__main__":
    main()
