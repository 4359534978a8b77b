"""Mixtures of experts on one card: the least memory that a plan needs, and the trace of the same plan.

    python benchmarks/mixtures.py [MODEL ...]   # minutes a model, most of them for traces
    python benchmarks/mixtures.py --page        # the table of docs/mixtures.md, from the results

Each row: `memtrain plan RECIPE model.path=MODEL ... --gpu CARD --solve budget`, then the plan of that budget,
then its step traced. `full`: every weight, AdamW with float32 copies; `LoRA`: rank 16 on the attention, over
bfloat16; `QLoRA`: the same over NF4; `QLoRA+experts`: on every linear map and expert. 8 rows of 4,096 tokens
a step; the host has 16 TiB. No GPU is asked.
Results: benchmarks/results/mixtures.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
from pathlib import Path
from typing import Any

from result_files import write_result

from memtrain.__main__ import main as run_command

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mixtures.json"
PAGE = ROOT / "docs" / "mixtures.md"
BEGIN = "| model | form | card | needs | live tensors | traced | slices | on the host, GiB |"
END = "\n\n<!-- end of the table -->"
MODELS = (
    "Qwen/Qwen3-30B-A3B",
    "openai/gpt-oss-20b",
    "mistralai/Mixtral-8x7B-v0.1",
    "deepseek-ai/DeepSeek-V3",
)
ATTENTION = {
    "deepseek-ai/DeepSeek-V3": "[q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]",
}
"""Linear maps of the attention, where they are others than q, k, v and o."""
FORMS = {
    "full": "sft/llama-3.1-8b-full",
    "LoRA": "sft/llama-3.1-8b-lora",
    "QLoRA": "sft/llama-3.1-8b-qlora",
    "QLoRA+experts": "sft/llama-3.1-8b-qlora",
}
CARDS_GB = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180, 288)
"""Sizes by which cards are sold; a program can use some 3% less than the GiB of the name."""
NO_EXPERTS_IN_ALL_LINEAR = {"openai/gpt-oss-20b"}
"""Models whose experts were never linear maps: `all-linear` leaves them alone, as another row has them."""
USABLE = 0.97


def main() -> None:
    """Plan and trace each row, and write the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "models", nargs="*", help="other models than those of the table are not written to it"
    )
    parser.add_argument("--forms", nargs="*", default=list(FORMS), help=f"some of {', '.join(FORMS)}")
    parser.add_argument("--untraced", action="store_true", help="plan alone; earlier traces stay")
    parser.add_argument("--page", action="store_true", help="write the table from the results")
    asked = parser.parse_args()
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    if not asked.page:
        for model in asked.models or MODELS:
            for form in asked.forms:
                if form == "QLoRA+experts" and model in NO_EXPERTS_IN_ALL_LINEAR:
                    continue
                name = f"{model} {form}"
                before = known["rows"].get(name, {}) if asked.untraced else {}
                made = row(model, form, is_traced=not asked.untraced)
                is_same = before.get("budget") == made.get("budget")
                known["rows"][name] = (before if is_same else {}) | made
                print(name, json.dumps(known["rows"][name]), flush=True)
                write_result(RESULTS, known)
        command = ["git", "rev-parse", "HEAD"]
        known["commit"] = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        write_result(RESULTS, known)
    if BEGIN not in PAGE.read_text():
        return
    text = PAGE.read_text()
    begin = text.index(BEGIN)
    PAGE.write_text(text[:begin] + table(known["rows"]) + text[text.index(END, begin) :])


def row(model: str, form: str, *, is_traced: bool) -> dict[str, Any]:
    """The least memory, what waits on the host then, and the trace."""
    words = [
        FORMS[form],
        f"model.path={model}",
        "length.max_length=4096",
        "train.batch_size=8",
        "save.async_save=false",
        *("--host-memory", "16TiB", "--without-data", "--json", "--gpu", "b300"),
    ]
    if form == "full":
        words.append("optim.master_weights=true")
    else:
        targets = ATTENTION.get(model, "[q_proj, k_proj, v_proj, o_proj]")
        targets = targets if form != "QLoRA+experts" else "all-linear"
        words.append(f"model.adapter={{r: 16, alpha: 32, target_modules: {targets}}}")
    solved = said(["plan", *words, "--solve", "budget"])
    if solved is None:
        return {"gib": None}
    budget = solved["keys"]["memory.budget"]
    made = said(["plan", *words, "--budget", budget, *(["--trace"] if is_traced else [])])
    assert made is not None, f"{budget} is enough."
    settings, traced = made["settings"], made["traced"]
    peaks = {kind: peak_of(one["prediction"]) for kind, one in (("planned", made), ("traced", traced)) if one}
    return {
        "budget": solved["value"],
        **peaks,
        **({"not_traced": made["not_traced"]} if is_traced and made["not_traced"] else {}),
        "host": made["host"],
        "micro_batch": [settings["micro_batch_size"], settings["micro_tokens"]],
        "slice_tokens": settings["slice_tokens"],
        "weights_offload": settings["weights_offload"],
        "offload": settings["offload"],
        "tokens_per_s": made.get("tokens_per_s"),
    }


def peak_of(prediction: dict[str, Any]) -> int:
    """The highest phase."""
    return max(phase["num_bytes"] for phase in prediction["phases"])


def said(words: list[str]) -> dict[str, Any] | None:
    """The command's JSON; None where nothing fits."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run_command(words)
    return json.loads(out.getvalue()) if code == 0 else None


def table(known: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [BEGIN, "|---|---|---|---|---|---|---|---|"]
    models = list(dict.fromkeys(name.rsplit(" ", 1)[0] for name in known))
    for name, one in sorted(known.items(), key=lambda item: models.index(item[0].rsplit(" ", 1)[0])):
        model, form = name.rsplit(" ", 1)
        lines.append(f"| {' | '.join([model.rsplit('/', 1)[-1], form, *cells(one)])} |")
    return "\n".join(lines)


def cells(one: dict[str, Any]) -> list[str]:
    """The card, the two predictions of live tensors, and what waits on the host."""
    if one.get("budget") is None:
        return ["none of these", *["-"] * 5]
    card = next((size for size in CARDS_GB if USABLE * size * 2**30 >= one["budget"]), None)
    tells_trace = "traced" in one
    steps = one["host"]["phases"]["steps"]
    host = {name: size for name, size in steps.items() if name != "processes" and size > 2**29}
    waits = ", ".join(
        f"{name} {size / 2**30:,.0f}" for name, size in sorted(host.items(), key=lambda i: -i[1])
    )
    return [
        f"{card} GB" if card else "none of these",
        f"{one['budget'] / 2**30:.2f}",
        f"{one['planned'] / 2**30:.2f}",
        f"{one['traced'] / 2**30:.2f} ({one['planned'] / one['traced'] - 1:+.1%})" if tells_trace else "-",
        f"{one['slice_tokens']:,}" if one["slice_tokens"] else "-",
        waits,
    ]


if __name__ == "__main__":
    main()
