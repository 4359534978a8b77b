"""docs/benchmarks.md from the results: every question with its figures, or "not measured".

    python benchmarks/page.py [RESULTS [PAGE]]

RESULTS is a folder of JSON files, one a script; without it benchmarks/results. Each table names the device,
command and commit of its figures. Rows where memtrain loses stay.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Result = Mapping[str, Any]
MIB = 2**20

INTRODUCTION = """\
# Benchmarks

Written by `python benchmarks/page.py` from `benchmarks/results/`; do not edit. `make bench` measures the
same questions on your machine with small settings, and `make bench-gpu` those that need a GPU; a question
without a result says so. Where a ratio is given, it is TRL's figure over memtrain's: above 1 memtrain
needs less, below 1 it needs more. Figures of a shared machine are told as ratios of runs that took turns,
with their spread; peaks of tensors do not depend on the machine.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One question."""

    title: str
    file: str
    """Of the result, without `.json`."""
    says: str
    """What is compared, in a sentence or two."""
    rows: Callable[[Result], list[str]]
    command: str = ""
    """Where the result does not name its own."""


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(headers)} |", "|---" * len(headers) + "|"]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def same_work(result: Result) -> list[str]:
    """A row for each case."""
    cases: dict[tuple[object, ...], dict[str, Result]] = {}
    for one in result["turns"]:
        if one["kind"] == "steps" and "tokens_per_s" in one:
            key = (one["size"], one["lora"], one["checkpointed"], one["rows"], one["tokens"])
            cases.setdefault(key, {})[one["side"]] = one
    sides = list(dict.fromkeys(side for by_side in cases.values() for side in by_side))
    rows: list[list[object]] = []
    for (size, lora, checkpointed, count, tokens), by_side in cases.items():
        form = f"{size}, {'LoRA' if lora else 'all weights'}{', checkpointed' if checkpointed else ''}"
        cells = [_speed(by_side.get(side)) for side in sides]
        others = [one["tokens_per_s"] for side, one in by_side.items() if not side.startswith("memtrain")]
        own = max(one["tokens_per_s"] for side, one in by_side.items() if side.startswith("memtrain"))
        share = f"{own / max(others):.2f}" if others else ""
        rows.append([f"{form}, {count} rows of {tokens:,}", *cells, share])
    return table(["tokens/s (peak)", *sides, "memtrain over the fastest"], rows)


def _speed(one: Result | None) -> str:
    return "" if one is None else f"{one['tokens_per_s']:,} ({one['peak_gib']} GiB)"


def start_up(result: Result) -> list[str]:
    """A row for each command."""
    rows: list[list[object]] = []
    for task, reported in result["tasks"].items():
        ours, theirs = reported["memtrain"], reported.get("trl")
        rows.append(
            [
                f"`{task}`",
                f"{ours['cpu_s']:.2f} s",
                f"{theirs['cpu_s']:.2f} s" if theirs else "no counterpart",
                spread(reported["ratio"]["cpu_s"]) if theirs else "",
                f"{ours['wall_s']:.2f} s",
                f"{theirs['wall_s']:.2f} s" if theirs else "",
            ]
        )
    said = result["tasks"].get("wrong recipe", {}).get("says", {})
    lines = table(("command", "CPU, memtrain", "CPU, TRL", "ratio", "wall, memtrain", "wall, TRL"), rows)
    lines += [""] if said else []
    for side, words in said.items():
        lines.append(
            f"{side} answers the wrong recipe with {words['lines']} lines (exit code {words['code']}):"
        )
        lines += ["", "```", *[line[:160] for line in words["last"]], "```", ""]
    return lines


def packing(result: Result) -> list[str]:
    """A row for each size and strategy."""
    rows: list[list[object]] = []
    for size, strategies in result["rows"].items():
        for strategy, reported in strategies.items():
            ours, theirs = reported["memtrain"], reported.get("trl")
            rows.append(
                [
                    f"{int(size):,}",
                    strategy,
                    f"{ours['cpu_s']:.3f} s",
                    f"{theirs['cpu_s']:.3f} s" if theirs else "not measured",
                    spread(reported["ratio"]) if theirs else "",
                    f"{ours['fill']:.2%}",
                    f"{theirs['fill']:.2%}" if theirs else "",
                    mib(ours["peak_bytes"]),
                    mib(theirs["peak_bytes"]) if theirs else "",
                ]
            )
    headers = (
        "rows",
        "strategy",
        "CPU, memtrain",
        "CPU, TRL",
        "ratio",
        "fill, memtrain",
        "fill, TRL",
        "memory, memtrain",
        "memory, TRL",
    )
    return table(headers, rows)


def data_preparation(result: Result) -> list[str]:
    """A row for each figure."""
    names = {
        "cpu_s": "CPU time",
        "wall_s": "wall time",
        "peak_bytes": "memory",
        "cache_bytes": "cache on disk",
    }
    rows: list[list[object]] = []
    for key, name in names.items():
        show = (lambda value: f"{value:.1f} s") if key.endswith("_s") else mib
        theirs = result.get("trl")
        rows.append(
            [
                name,
                show(result["memtrain"][key]),
                show(theirs[key]) if theirs else "not measured",
                spread(result["ratio"][key]) if theirs else "",
            ]
        )
    size = f"{result['rows']:,} rows, {mib(result['bytes_of_jsonl'])} of JSONL."
    return [size, "", *table(("", "memtrain", "TRL", "ratio"), rows)]


def cold_rows(result: Result) -> list[str]:
    """A row for each side."""
    sides = ("first step", "first step of few rows", "encoding alone")
    rows = [[side, f"{result[side]['cpu_s']:.1f} s", f"{result[side]['wall_s']:.1f} s"] for side in sides]
    size = f"{result['rows']:,} rows, {mib(result['bytes_of_jsonl'])} of JSONL."
    whole, prepared = result["encoding_of_first_step"], result["encoding_of_preparation"]
    least = (
        f"Encoding alone has {spread(whole['cpu_s'])} of the CPU time of the whole command, and "
        f"{spread(prepared['cpu_s'])} of that of the preparation (first step less first step of few rows); "
        f"with reading the lines as JSON {spread(prepared['with_reading_cpu_s'])}."
    )
    return [size, "", *table(("", "CPU time", "wall time"), rows), "", least]


def sft_vs_trl(result: Result) -> list[str]:
    """A row for each model, data and mode."""
    rows: list[list[object]] = []
    for row in result["rows"]:
        speed = row["speed_ratio"]
        rss = row["rss_growth_mib"]
        rows.append(
            [
                row["model"],
                row["data"],
                row["mode"],
                f"{row['largest_loss_difference']:.1e}",
                f"{speed['median']:.2f} ({min(speed['all']):.2f}-{max(speed['all']):.2f})",
                f"{rss['memtrain']:.0f} MiB",
                f"{rss['trl']:.0f} MiB",
                f"{rss['trl'] / rss['memtrain']:.2f}",
            ]
        )
    headers = ("model", "data", "mode", "losses differ by", "speed over TRL's", "memory", "TRL's", "ratio")
    return table(headers, rows)


def bare_loop(result: Result) -> list[str]:
    headers = ["model", "steps", "memtrain", "mean step", "median step"]
    said = {"measured": "as it is by default", "unmeasured": "without its meter of memory"}
    return table(
        headers,
        (
            (one["model"], one["steps"], said[side], *(_over(ratios[key]) for key in ("mean", "settled")))
            for one in result["models"]
            for side, ratios in one["over_bare"].items()
        ),
    )


def _over(ratios: Sequence[float]) -> str:
    """Processor time over the bare loop's, in percent, of the middle turn and of all."""
    said = [f"{ratio - 1:+.1%}" for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
    return f"{said[0]} ({said[1]} to {said[2]})"


def methods_vs_trl(result: Result) -> list[str]:
    """A row for each model and method."""
    rows: list[list[object]] = []
    for row in result["rows"]:
        ours, theirs, ratio = row["memtrain"], row["trl"], row["ratio"]
        apart, compacts = row.get("largest_loss_difference"), row.get("ratio_compacting")
        rows.append(
            [
                row["model"],
                f"{row['case']} ({row.get('rows', 'made up')})",
                f"{ours['step_s']:.2f} s",
                f"{theirs['step_s']:.2f} s",
                turns(ratio["step_s"]),
                turns(compacts["step_s"]) if compacts else "not measured",
                turns(ratio["whole_s"]),
                turns(compacts["whole_s"]) if compacts else "not measured",
                f"{ours['peak_mib']:,.0f} MiB",
                turns(ratio["peak_mib"]),
                turns(compacts["peak_mib"]) if compacts else "not measured",
                f"{apart:.1e}" if apart is not None else "other samples",
            ]
        )
    headers = (
        "model",
        "method (rows)",
        "step",
        "TRL's",
        "ratio as it stands",
        "compacting",
        "whole run, as it stands",
        "compacting",
        "memory",
        "ratio as it stands",
        "compacting",
        "losses differ by",
    )
    return table(headers, rows)


def loss_tokens(result: Result) -> list[str]:
    """A row for each method and held-out metric: before and after, mean over seeds and deviation."""
    names = {
        "loss": "loss",
        "rewards/accuracies": "accuracy",
        "rewards/margins": "margin",
        "calibration": "calibration error",
    }
    rows: list[list[object]] = []
    for method, reported in result["summary"].items():
        for key, name in names.items():
            if key not in reported:
                continue
            (before, after), (_, deviation) = reported[key]["mean"], reported[key]["deviation"]
            every = ", ".join(f"{value:.3f}" for value in reported[key]["after"])
            rows.append([f"`{method}`", name, f"{before:.3f}", f"{after:.3f} ± {deviation:.3f}", every])
    lines = table(("method", "held-out", "before", "after, mean ± deviation", "after, every seed"), rows)
    return [*lines, "", f"{result['cpu_s'] / 60:.0f} minutes of processor time in all, `sft` included."]


def learnt_online(result: Result) -> list[str]:
    """A row for each method: the held-out reward of every seed, before and after."""
    rows: list[list[object]] = []
    for method, seeds in result["methods"].items():
        ends = [[seed["held_out"][at][1] for seed in seeds] for at in (0, -1)]
        every = [", ".join(f"{value:.2f}" for value in end) for end in ends]
        rows.append([f"`{method}`", *every, f"{statistics.mean(ends[1]) - statistics.mean(ends[0]):+.2f}"])
    return table(("method", "before, every seed", "after, every seed", "mean difference"), rows)


def context_parallel(result: Result) -> list[str]:
    """A row for each way: peak of a process by their number."""
    peaks = result["peak_mib_of_a_row_of_4096_tokens"]
    counts = [name for name in next(iter(peaks.values())) if name != "weights and gradients"]
    rows = [(case, *(f"{reported[count]:.1f} MiB" for count in counts)) for case, reported in peaks.items()]
    gaps = [
        reported["loss"]
        for case, by_count in result["largest_difference"].items()
        if "float32" in case
        for reported in by_count.values()
    ]
    said = f"Losses in float32 are those of one process to {max(gaps):.1e}."
    return [*table(("a row of 4,096 tokens", *counts), rows), "", said]


def preferences(result: Result) -> list[str]:
    """A row for each method."""
    rows = [
        (method, result["steps"], f"{curve['largest_difference']:.1e}")
        for method, curve in result["curves"].items()
    ]
    return table(("method", "steps", "losses differ by at most"), rows)


def pairs(result: Result) -> list[str]:
    """A row for each share and form."""
    rows: list[list[object]] = []
    for share, forms in result["prompt:answer"].items():
        for form, reported in forms.items():
            cells = [f"{reported['resident_mib']:.0f} MiB", f"{reported['step_s']:.2f} s"]
            trl = forms.get("trl")
            of_trl = f"{reported['resident_mib'] / trl['resident_mib']:.2f}" if trl else ""
            rows.append([share, form, *cells, of_trl])
    return table(("prompt : answer", "form", "memory", "CPU time of a step", "memory over TRL's"), rows)


def shared_prompts(result: Result) -> list[str]:
    """A row for each share and form."""
    rows = [
        (share, form, f"{one['tokens']:,}", f"{one['activations_mib']:.1f} MiB", f"{one['seconds']:.2f} s")
        for share, forms in result["prompt:answer"].items()
        for form, one in forms.items()
    ]
    return table(("prompt : answer", "form", "tokens", "activations", "CPU time"), rows)


def waterfall(result: Result) -> list[str]:
    """A row for each variant."""
    lines: list[str] = []
    for title, key in (("", "rows"), ("Left out one at a time:", "ablations")):
        if not result.get(key):
            continue
        lines += ["", title, ""] if title else []
        first = result["rows"][0]
        rows: list[list[object]] = []
        for row in result[key]:
            if row["peak_bytes"] is None:
                rows.append([row["name"], "not measured", mib(row["predicted_bytes"]), row["fault"], "", ""])
                continue
            speeds = row["tokens_per_s_all"]
            rows.append(
                [
                    row["name"],
                    mib(row["peak_bytes"]),
                    f"{mib(row['predicted_bytes'])} ({row['predicted_bytes'] / row['peak_bytes'] - 1:+.0%})",
                    f"{row['tokens_per_s']:,.0f} ({min(speeds):,.0f}-{max(speeds):,.0f})",
                    f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}" if first["tokens_per_s"] else "",
                    f"{row['loss_difference_first']:.0e}, {row['loss_difference']:.0e}",
                ]
            )
        headers = ("variant", "peak", "predicted", "tokens/s", "of plain", "loss differs: first step, any")
        lines += table(headers, rows)
    return lines


def memory_tables(result: Result) -> list[str]:
    """The errors in a line; the tables are in docs/memory.md."""
    errors = sorted(abs(row["arithmetic_error"]) for row in result["rows"])
    traced = sorted(abs(row["traced_bytes"] / row["real_bytes"] - 1) for row in result["rows"])
    rows = [
        (
            name,
            len(found),
            f"{statistics.median(found):.2%}",
            f"{found[int(0.95 * len(found))]:.2%}",
            f"{found[-1]:.2%}",
        )
        for name, found in (("trace against the allocator", traced), ("arithmetic against the trace", errors))
    ]
    return table(("", "recipes", "median error", "95th percentile", "worst"), rows)


def plans(result: Result) -> list[str]:
    """The errors in a line."""
    errors = sorted(abs(row["error"]) for row in result["rows"])
    misses = sum(not row["fits_by_trace"] for row in result["rows"])
    cells = (len(errors), f"{statistics.median(errors):.2%}", f"{errors[int(0.95 * len(errors))]:.2%}")
    return table(
        ("plans", "median error", "95th percentile", "worst", "false fits"),
        [(*cells, f"{errors[-1]:.2%}", misses)],
    )


def kernels(result: Result) -> list[str]:
    """Kernels of a micro-batch before and now, and of a decoded token."""
    before, rows = result["before"], []
    for name, case in result["cases"].items():
        if name == "decode":
            continue
        was = before.get(name, {}).get("micro_batch")
        reported = "" if was is None else f"{was:,}"
        now = [f"{case[key]:,}" for key in ("micro_batch", "update")]
        with_torch = f"torch {case['versions']['torch'].partition('+')[0]}"
        rows.append([name, reported, *now, f"{case['commit']}, {with_torch}"])
    lines = table(["case", f"a micro-batch at {before['at']}", "now", "an update", "counted at"], rows)
    decode = result["cases"].get("decode")
    if decode is None:
        return lines
    started, recorded = decode["started one by one"], decode["recorded"]
    return [
        *lines,
        "",
        f"A decoded token: {started['kernels_a_token']:,.0f} kernels, or one start of a recorded pass and "
        f"{recorded['kernels_a_token']:,.0f} beside it; {recorded['looks_of_the_host']} looks of the host at "
        f"{recorded['tokens']} tokens.",
    ]


def inspect_lengths(result: Result) -> list[str]:
    """A line of figures."""
    row = (
        f"{result['megabytes']:,.0f} MB, {result['rows']:,} rows",
        f"{result['speed_of_raw_wall']:.0%}",
        f"{result['speed_of_raw_cpu']:.0%}",
        f"{result['peak_above_tokenizer_mib']:.0f} MiB",
    )
    return table(("data", "speed of raw encoding (wall)", "(CPU)", "memory above the tokenizer's"), [row])


def kills(result: Result) -> list[str]:
    """A line of figures."""
    lines = sum(run["lines"] for run in result["runs"])
    differ = sum(run["lines_that_differ"] for run in result["runs"])
    equal = all(run["final_weights_are_equal"] for run in result["runs"])
    row = (len(result["kills"]), lines, differ, "yes" if equal else "NO")
    return table(("kills", "lines of metrics", "that differ", "final weights equal"), [row])


def exactness(result: Result) -> list[str]:
    """The counts; the matrix is on its own page."""
    kinds = [cell[3] for part in result.values() for cell in part["cells"]]
    row = [len(kinds), *(kinds.count(kind) for kind in ("exact", "refused", "broken"))]
    lines = table(("cells", "exact", "refused by the plan", "broken"), [row])
    return [*lines, "", "With every reason: [the matrix of strategies](exactness.md)."]


TRL_BUFFER_MIB = 512
"""MiB that TRL's side of `policy_peak` allocates once whatever the group, and never touches: counted as a
live tensor, and no memory of the process."""


def policy_peak(result: Result) -> list[str]:
    """A row for each number of completions: peak and CPU time of the three forms."""
    forms = ("ours", "duplicated", "trl")
    rows = [
        (
            k,
            *(f"{one[form]['peak_mib']:,.0f} MiB" if form in one else "not measured" for form in forms),
            *(f"{one[form]['cpu_s']:.2f} s" if form in one else "" for form in forms),
            f"{1 - one['ours']['peak_mib'] / one['duplicated']['peak_mib']:.0%}",
            _of_trl(one),
        )
        for k, one in result["completions"].items()
    ]
    headers = (
        "k",
        "memtrain",
        "duplicated",
        "TRL",
        "CPU, memtrain",
        "duplicated",
        "TRL",
        "less than duplicated",
        "TRL without its buffer",
    )
    size = f"A prompt of {result['prompt_tokens']:,} tokens, completions of {result['completion_tokens']:,}."
    buffer = f"TRL's peaks hold {TRL_BUFFER_MIB} MiB that its step allocates and never touches; "
    return [size, f"{buffer}the last column leaves them out.", "", *table(headers, rows)]


def _of_trl(one: Mapping[str, Mapping[str, float]]) -> str:
    """TRL's peak without the buffer, and how many times memtrain's it is."""
    if "trl" not in one:
        return "not measured"
    peak = one["trl"]["peak_mib"] - TRL_BUFFER_MIB
    return f"{peak:,.0f} MiB, {peak / one['ours']['peak_mib']:.1f} times memtrain's"


def many_ranks(result: Result) -> list[str]:
    """A row for each cell."""
    rows: list[list[object]] = []
    for cell, reported in result["cells"].items():
        if "refused" in reported:
            rows.append([cell, "refused", "", "", reported["refused"]])
            continue
        apart = reported.get("furthest_from_one_process")
        peak, predicted = reported.get("peak_bytes_of_the_largest_rank"), reported.get("predicted_bytes")
        rows.append(
            [
                cell,
                mib(peak) if peak else "not measured",
                mib(predicted) if predicted else "",
                f"{apart:.1e}" if apart is not None else "",
                reported.get("resume", ""),
            ]
        )
    headers = ("method, engine, ranks", "peak of a rank", "predicted", "from one process", "after a kill")
    return table(headers, rows)


def on_a_gpu(result: Result) -> list[str]:
    """The planner's error, then a row a stage; faults stay."""
    plan, trace = result["plan"], result["trace"]
    lines: list[str] = []
    for name, reported in (("planned", plan), ("traced", trace)):
        if reported["count"]:
            error = f"median {reported['median_error']:.1%}, 95th percentile {reported['p95_error']:.1%}"
            lines.append(
                f"Peaks {name}, of {reported['count']} plans: {error}, worst {reported['worst_error']:+.1%}."
            )
    lines.append(f"Plans that were said to fit and did not: {', '.join(plan['false_fits']) or 'none'}.")
    if "commits" in result["where"]:
        lines.append(f"Results of the commits {', '.join(result['where']['commits'])}.")
    lines.append("")
    kinds = ("words", "skipped", "refused", "faults")
    said = {
        stage: text for kind in kinds for stage, text in result[kind].items() if not stage.startswith("grid/")
    }
    return lines + table(("stage", "result"), sorted(said.items()))


def vllm(result: Result) -> list[str]:
    """The figures as they are."""
    return table(
        ("", "found"),
        [(key.replace("_", " "), f"`{json.dumps(reported)}`") for key, reported in result["found"].items()],
    )


WRITTEN = {
    "The planner": (
        "## Precision",
        "",
        "What each way to train bfloat16 weights learns: [what bfloat16 training learns](precision.md).",
        "",
    )
}
"""Sections that have a page of their own, by the section that they stand before."""

SECTIONS = (
    Section(
        "The same work on a card",
        "same_work",
        "Rows of exactly 2,048 tokens, every token learned; LoRA of rank 16 on all maps, or all weights in "
        "bfloat16. The sides take turns, alone on the card; median of six steps after four, peak of tensors. "
        "*Over the fastest*: below 1 memtrain is slower. `benchmarks/same_work.py` measures it again.",
        same_work,
    ),
    Section(
        "Start-up",
        "start_up",
        "What a person waits for. TRL checks no configuration without training. The first step: until its "
        "loss is said, a tiny model and rows.",
        start_up,
    ),
    Section(
        "Packing",
        "packing",
        "The same lengths into sequences of 512. Ours is an index of pieces (tokens are read in training); "
        "TRL's is a new table with all tokens.",
        packing,
    ),
    Section(
        "Data preparation",
        "data_preparation",
        "From JSONL to packed rows: reading, tokenizing, storing, packing (bfd).",
        data_preparation,
    ),
    Section(
        "A first step of rows that nobody tokenized before",
        "cold_rows",
        "One command of one step, from the start of its process to its end; beside the tokenizer alone.",
        cold_rows,
    ),
    Section(
        "SFT against TRL",
        "sft_vs_trl",
        "The same weights, rows, order, batch and schedule; tokens a second of CPU time.",
        sft_vs_trl,
        "python benchmarks/sft_vs_trl.py --trl PYTHON",
    ),
    Section(
        "Beside the bare loop",
        "bare_loop",
        "Processor time of a step over that of a loop written by hand in plain PyTorch (sdpa, whole "
        "logits, fused AdamW): the limit. Rows are of one length and every token is trained on, so neither "
        "side has less to do. The mean has the steps in which tensors are counted and the one that is "
        "profiled, once in a run of five seconds of steps; the first step is left out. Both sides make "
        "their steps in turns in one process, in which no pass of Python's collector goes over what was "
        "loaded before them (docs/decisions/0019 has the meter's own cost).",
        bare_loop,
    ),
    Section(
        "Every method against TRL",
        "methods_vs_trl",
        "The same weights, rows, order, batch and optimizer; each side as it does by default but for "
        "float32, activations kept, and the reference of `dpo` and `kto` asked once before training. "
        "Lengths have a long tail, and TRL pads. Processor time of one thread; tokens are counted as each "
        "answer with its prompt. `same completions`: made-up ones in place of generation. Without that, "
        "`grpo` and `rloo` write their completions too. "
        "*As it stands*: TRL on a CPU, where every position goes through the head. *Compacting*: with the "
        "one flag patched by which it sends only trained positions there (`trainer/utils.py`, where Triton "
        "runs): nearer to a GPU's ratio, which is not measured. 11M: GSM8K and its judged "
        "solutions, drawn anew for every seed, 32,000 words, five intervals between steps, two seeds (in "
        "brackets), the same files saved by both sides. 0.9M and 25M: made-up rows, a vocabulary of a "
        "thousand, three seeds. Where one column was not measured the rows are older, and a run of memtrain "
        "saved more than TRL's.",
        methods_vs_trl,
        "python benchmarks/methods_vs_trl.py --trl PYTHON",
    ),
    Section(
        "Losses of preferences against TRL",
        "preferences_against_trl",
        "The same weights, rows and order.",
        preferences,
    ),
    Section(
        "A DPO step against TRL",
        "pairs_against_trl",
        "Resident memory of the steps, and CPU time, by prompt : answer; TRL pads, and computes it twice.",
        pairs,
    ),
    Section(
        "What preferences teach",
        "preferences_learn",
        "Right and wrong solutions of GSM8K problems, held out by problem: a small random model after `sft`, "
        "then each method from it, three seeds.",
        loss_tokens,
    ),
    Section(
        "What the online methods learn",
        "online_rewards",
        "Share of right answers on held-out problems of arithmetic, three seeds; curves in the file.",
        learnt_online,
    ),
    Section(
        "A prompt computed once",
        "shared_prompts",
        "The same DPO step in three forms, by prompt : answer.",
        shared_prompts,
    ),
    Section(
        "Group size: one long prompt, k completions",
        "policy_peak",
        "Peak of a GRPO update, ours, duplicated, and TRL's.",
        policy_peak,
    ),
    Section(
        "SFT, a strategy at a time", "waterfall_sft", "`memtrain bench smoke/sft-packed --ablate`.", waterfall
    ),
    Section("DPO, a strategy at a time", "waterfall_dpo", "`memtrain bench smoke/dpo`.", waterfall),
    Section(
        "GRPO, a strategy at a time",
        "waterfall_grpo",
        "`memtrain bench smoke/grpo`, fixed completions.",
        waterfall,
    ),
    Section(
        "Exactness of strategies with each other",
        "exactness",
        "`memtrain verify`'s checks, cell by cell.",
        exactness,
    ),
    Section(
        "The planner",
        "memory_tables",
        "On a CPU: predicted peaks against the real allocator; tables in [memory planning](memory.md).",
        memory_tables,
        "python benchmarks/memory_tables.py",
    ),
    Section(
        "Plans for GPUs against their traces",
        "plans_against_traces",
        "Plans for real models and cards, against traces without data. No GPU.",
        plans,
        "python benchmarks/plans_against_traces.py",
    ),
    Section(
        "Kernels of a step",
        "kernel_counts",
        "Operators that a GPU starts for one micro-batch of 16,384 tokens of Qwen3-0.6B (28 layers) in "
        "bfloat16, as planned for an H100, and for a decoded token: counted on tensors without data, not "
        "measured on a GPU.",
        kernels,
        "python benchmarks/kernel_counts.py",
    ),
    Section(
        "inspect-lengths", "inspect_lengths", "Beside the tokenizer's own batch encoding.", inspect_lengths
    ),
    Section("Killed and continued", "kill_and_resume", "Runs killed at random moments.", kills),
    Section(
        "Several processes",
        "many_ranks",
        "Losses against one process, the peak of the largest rank beside its prediction, and going on.",
        many_ranks,
    ),
    Section(
        "Context parallelism",
        "context_parallel",
        "Peak of a process when the tokens of a row are split over processes.",
        context_parallel,
    ),
    Section(
        "vLLM as sampler",
        "vllm_cpu",
        "On a CPU: the same samples, pushed weights, a killed engine.",
        vllm,
        "python benchmarks/vllm_cpu.py PYTHON -o FILE",
    ),
    Section(
        "On a GPU",
        "gpu",
        "The ladder of `make bench-gpu`: back ends, engines bit for bit, speed and MFU, decoding, small "
        "cards, TRL on the same rows, shared prompts, the planner's error over its grid.",
        on_a_gpu,
    ),
)


def page(results: Mapping[str, Result]) -> str:
    """The whole page."""
    lines = [INTRODUCTION]
    for section in SECTIONS:
        lines += [*WRITTEN.get(section.title, ()), f"## {section.title}", "", section.says, ""]
        result = results.get(section.file)
        if result is None:
            lines += ["Not measured.", ""]
            continue
        lines += [*section.rows(result), "", where(result, section), ""]
    return "\n".join(lines)


def where(result: Result, section: Section) -> str:
    """Device, date, commit and command of a result; else those of the file's last commit.

    Where its rows are of several runs, those of each.
    """
    runs = runs_of_rows(result)
    if len(runs) > 1:
        said = "; ".join(
            f"{device}, {date_of(commit)}, commit {commit[:7]} ({', '.join(rows)})"
            for (device, commit), rows in runs.items()
        )
        return f"Measured on {said}: `{section.command}`."
    reported: Result = (
        result.get("environment")
        or result.get("about")
        or next(
            (value for value in result.values() if isinstance(value, Mapping) and "commit" in value), result
        )
    )
    if "commit" not in reported and "commit" in result:
        reported = result
    device = reported.get("device") or reported.get("machine") or "CPU, 2 cores, one thread"
    committed = last_commit(section.file)
    # A result of a known commit is no younger for a later change of its file.
    made_at = date_of(str(reported["commit"])) if "commit" in reported else ""
    date = str(reported.get("date") or reported.get("made") or made_at or committed[1])[:10]
    commit = str(reported.get("commit") or committed[0])[:7]
    command = reported.get("command") or section.command
    if not command and section.file.startswith("waterfall"):
        command = f"{section.says.strip('.').split(',')[0].strip('`')}"
    # A script that was run in its own folder is named as it is from the tree's.
    command = re.sub(r"^python (?=\w+\.py)", "python benchmarks/", command)
    return f"Measured on {device}, {date}, commit {commit}: `{command}`."


def runs_of_rows(result: Result) -> dict[tuple[str, str], list[str]]:
    """Names of the rows of each run, by (device, commit), where rows say by which run they were made."""
    runs: dict[tuple[str, str], list[str]] = {}
    rows = result.get("rows", ())
    for row in rows if isinstance(rows, list) else ():
        made = row.get("environment") if "case" in row else None
        if made is not None:
            runs.setdefault((made["device"], made["commit"]), []).append(f"{row['model']} {row['case']}")
    return runs


def date_of(commit: str) -> str:
    """The day of a commit; nothing where git does not have it."""
    return _git("log", "-1", "--format=%as", commit).strip()


def last_commit(file: str) -> tuple[str, str]:
    """(commit, date) in which what a committed result says was last written; dashes where there is none.

    A commit that writes the same figures in another form is passed over.
    """
    path = f"benchmarks/results/{file}.json"
    found = ("-", "-")
    for line in _git("log", "--format=%h %as", "--", path).splitlines():
        commit, date = line.split()
        if found != ("-", "-") and _said_at(commit, path) != _said_at("HEAD", path):
            break
        found = (commit, date)
    return found


def _said_at(commit: str, path: str) -> object:
    text = _git("show", f"{commit}:{path}")
    return json.loads(text) if text else None


def _git(*words: str) -> str:
    root = Path(__file__).parents[1]
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout


def read_results(folder: Path) -> dict[str, Result]:
    """The results of a folder by their names."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def spread(ratio: Mapping[str, float]) -> str:
    """A ratio with its spread."""
    return f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})"


def turns(ratios: Sequence[float]) -> str:
    """The median of the ratios of all turns, with their spread."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def mib(num_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{num_bytes / MIB:,.1f} MiB"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results", help="folder of results")
    parser.add_argument("page", nargs="?", type=Path, default=HERE.parent / "docs" / "benchmarks.md")
    asked = parser.parse_args()
    results = read_results(asked.results)
    if not results:
        parser.error(f"{asked.results} has no results: a page of it would say nothing")
    asked.page.write_text(page(results))
    print(f"wrote {asked.page}")


if __name__ == "__main__":
    main()
