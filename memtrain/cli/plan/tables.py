"""The words of `memtrain plan`: verdict, owners by phase, decisions, and with --explain the rest."""

from __future__ import annotations

from pathlib import Path

import typer

from memtrain.cli.output.terminal import print_table, print_text, whole
from memtrain.cli.plan.answer import Answer, everything, figures_words, host_json, traced_need
from memtrain.memory.estimate.pricing import MARGIN_BYTES, MARGIN_SHARE, Priced
from memtrain.memory.estimate.static import overhead
from memtrain.memory.explain.reasons import gains, left_out, time_words
from memtrain.memory.explain.tables import as_run, difference, owner_table, verdict, with_vllm
from memtrain.memory.plan.length_profile import LengthReport, by_answer_words
from memtrain.memory.plan.plan import Decision
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB, count_of, gib, signed
from memtrain.memory.planner.engine_ranking import form_words
from memtrain.memory.planner.pinned_recipe import pins, yaml_lines
from memtrain.memory.planner.search import frontier
from memtrain.recipes.reading.shipped import configs_dir
from memtrain.trainers.tools.trace.client import Traced

QUIET = (
    "device", "max_steps", "oom_recovery", "preflight", "liger", "kernels", "loss_kernel", "budget",
    "num_processes",
)  # fmt: skip
"""Decisions that a plan tells in its first lines, or only with --explain."""


WHEN = {
    "data preparation": "while rows are laid out",
    "steps": "in the steps",
    "saving": "while a checkpoint is written",
}
"""Phases of the host's memory in words."""
TOLD_SHARE = 0.05
"""Share of a step that waits for the host, from which on it is said. Taste."""


def print_answer(made: Answer, *, explain: bool) -> None:
    """The plan: its fit, the owners of each phase, and the gain of each choice."""
    resolved = made.resolved
    name = recipe_name(made.question.loaded.path)
    starts_none = made.facts.shape.starts_no_run
    if starts_none:
        print_text(made.notes[0])
    by = "by arithmetic it " if starts_none else ""
    print_text(f"{name} on {made.question.hardware.words()}: {by}{_fits_words(made)}")
    for note in made.notes[1:] if starts_none else made.notes:
        print_text(note)
    if made.report is not None:
        print_text(rows_words(made.report))
    typer.echo()
    recipe = resolved.case.recipe
    shown = with_vllm(as_run(resolved.prediction, recipe), resolved.settings, recipe)
    print_table(*owner_table(shown, resolved.plain))
    typer.echo()
    rows = sum_rows(made)
    width = max(len(one) for one, _ in rows)
    for number, words in rows:
        typer.echo(f"{number.rjust(width)}  {words}")
    print_text(host_words(made))
    typer.echo()
    skipped = () if explain else QUIET
    print_table(
        ("setting", "value", "why"),
        [
            (one.setting, one.value, why_words(one))
            for one in resolved.decisions
            if one.setting not in skipped
        ],
    )
    typer.echo()
    print_text(
        f"Predicted speed: {made.tokens_per_s:,.0f} tokens/s, {seconds(made.step_s)} a step"
        f"{_rollout_words(made)}. It is computed, not measured: use it to compare plans."
    )
    if made.chosen.host_share >= TOLD_SHARE:
        print_text(
            f"The host is the limit: for {made.chosen.host_share:.0%} of a step the GPU waits for operators "
            "that Python has not launched yet. Larger micro-batches, or fewer and larger kernels "
            "(model.liger), shorten that."
        )
    if explain:
        _print_rest(made)
    else:
        typer.echo()
        print_text(
            "--explain: why other strategies were left out, the best plan of each size, and the lines "
            "that pin this plan. --trace: check the peak by a trace of the run's own step."
        )


def recipe_name(path: Path) -> str:
    """A recipe as it is asked for: a shipped one by its name, a file by its path from here."""
    shipped = configs_dir()
    if path.is_relative_to(shipped):
        return path.relative_to(shipped).as_posix().removesuffix(".yaml")
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else path)


def _fits_words(made: Answer) -> str:
    budget = made.resolved.prediction.budget_bytes or 0
    if made.fits is None:
        more = gib(made.chosen.need_bytes)
        return f"needs more than {more} of {gib(budget)}, and whether it fits is not known."
    return f"fits, needs {gib(made.chosen.need_bytes)} of {gib(budget)}."


def sum_rows(made: Answer) -> list[tuple[str, str]]:
    """From live tensors to the memory of the card, line by line: sizes and their owners."""
    settings, prediction = made.resolved.settings, made.resolved.prediction
    parts, slack = made.need_parts, overhead(settings).slack
    own = "CUDA context, cuBLAS" if settings.device == "cuda" else "interpreter, libraries"
    talks = settings.device == "cuda" and settings.num_processes > 1
    figures = figures_words(made.question.hardware)
    corrections = [
        (signed_gib(parts["correction"]), "correction by the measured peaks of earlier runs of this kind")
    ]
    return [
        (gib(parts["live"]), f"live tensors, highest in the {prediction.peak.phase}"),
        *(corrections if parts["correction"] else []),
        (gib(parts["allocator"]), f"the allocator's slack ({slack:.0%})"),
        (gib(parts["context"]), f"{own}{', NCCL' if talks else ''} ({figures})"),
        (
            gib(parts["margin"]),
            f"margin ({MARGIN_SHARE:.0%} and {gib(MARGIN_BYTES)}), for memory that the "
            "prediction does not see",
        ),
        (gib(made.need_bytes + parts["margin"]), f"of {gib(prediction.budget_bytes or 0)}"),
    ]


def _rollout_words(made: Answer) -> str:
    """The share of a step in which completions are written; empty where none are."""
    rollout = made.rollout
    if rollout is None:
        return ""
    parts = [f"{seconds(rollout.reading_s + rollout.writing_s)} of it generation"]
    if rollout.judging_s:
        parts.append(f"{seconds(rollout.judging_s)} reward models")
    return (
        f", {' and '.join(parts)} if every completion has the maximum length (percentages above are of the "
        "rest: the update)"
    )


def host_words(made: Answer) -> str:
    """The host's memory in a sentence: its need and its phase, each owner with its kind, and the disk."""
    host = host_json(made)
    phase, pinned = host["highest_phase"], host["pinned"]
    owners = sorted(host["phases"][phase].items(), key=lambda item: -item[1])
    named = [
        f"{name} {gib(size)}{' pinned' if name in pinned else ''}" for name, size in owners if size >= MIB
    ]
    words = f"Host memory: {gib(host['need_bytes'])} of {gib(host['memory_bytes'])}, highest {WHEN[phase]}"
    words += f" ({', '.join(named)})" if named else ""
    return words + (f"; on disk {gib(host['disk_bytes'])}." if host["disk_bytes"] else ".")


def signed_gib(num_bytes: int) -> str:
    """Size in GiB, with its sign."""
    return f"{'-' if num_bytes < 0 else '+'}{gib(abs(num_bytes))}"


def _print_rest(made: Answer) -> None:
    """Gains of the plan's strategies, strategies left out with their reasons, the best plan of each size, the
    pins."""
    resolved, chosen = made.resolved, made.chosen
    bought = gains(chosen, resolved.case.facts)
    if bought:
        typer.echo()
        print_table(
            ("without", "peak", "time"),
            [
                (
                    one.strategy,
                    gib(one.peak_bytes),
                    time_words(one.time_share) + _misses(one.need_bytes, made),
                )
                for one in bought
            ],
        )
    typer.echo()
    print_table(("left out", "why"), [(one.strategy, one.reason) for one in left_out(chosen, resolved.case)])
    typer.echo()
    _print_engines(made)
    _print_frontier(made)
    lines = yaml_lines(pins(resolved.case.asked, resolved.settings))
    if lines:
        typer.echo()
        print_text("To pin this plan, write into the recipe:")
        typer.echo("\n".join(f"  {line}" for line in lines))


def _print_engines(made: Answer) -> None:
    """Needs of each engine; nothing with one process."""
    rows = [
        (
            one.name,
            gib(one.best.need_bytes) if one.best is not None else "",
            seconds(one.best.step_s) if one.best is not None else "",
            one.words,
        )
        for one in made.engines
    ]
    if rows:
        print_text("Needs of each engine:")
        print_table(("engine", "needs", "a step", "why"), rows)
        typer.echo()


def _misses(need: int, made: Answer) -> str:
    budget = made.resolved.prediction.budget_bytes
    return "" if budget is None or need <= budget else "; does not fit"


def _print_frontier(made: Answer) -> None:
    best = frontier(everything(made))
    shown = thinned(best, chosen=made.chosen)
    rows = [
        (
            "*" if one.settings == made.chosen.settings or _same(one, made.chosen) else "",
            gib(one.need_bytes),
            f"{made.speed(one):,.0f}",
            settings_words(one.settings),
        )
        for one in shown
    ]
    print_text("The best plan of each size (* this one):")
    print_table(("", "needs", "tokens/s", "how"), rows)


def _same(one: Priced, other: Priced) -> bool:
    kept = {"recovery": (), "preflight": False, "zero_bucket": 0, "checkpoint_layout": "full"}
    return one.settings.model_copy(update=kept) == other.settings.model_copy(update=kept)


def thinned(best: list[Priced], *, chosen: Priced, most: int = 10) -> list[Priced]:
    """At most `most` of a frontier, evenly, the smallest, the largest and the chosen one among them."""
    if not any(_same(one, chosen) for one in best):
        best = sorted([*best, chosen], key=lambda one: one.need_bytes)
    if len(best) <= most:
        return best
    wanted = {round(at * (len(best) - 1) / (most - 1)) for at in range(most)}
    return [one for at, one in enumerate(best) if at in wanted or _same(one, chosen)]


def settings_words(settings: Settings) -> str:
    """The memory choices of settings in a few words."""
    parts = [form_words(settings)] if settings.num_processes > 1 else []
    if settings.adapter is not None:
        parts.append("LoRA" if settings.quantize == "none" else f"LoRA on {settings.quantize}")
    if settings.checkpoint_every:
        every = settings.checkpoint_every
        parts.append("checkpointing" if every == 1 else f"checkpointing every {every}")
    if settings.slice_tokens:
        parts.append(f"layers in slices of {settings.slice_tokens:,}")
    if settings.offload != "none":
        parts.append(f"offloading {settings.offload}")
    if settings.weights_offload:
        parts.append("weights and adapter on CPU" if settings.adapters_offload else "weights on CPU")
    if settings.in_backward:
        parts.append("step in backward")
    if settings.optimizer_offload:
        copies = settings.master_weights and settings.copies != "stochastic"
        parts.append(f"optimizer states{' and float32 copies' * copies} on CPU")
    if settings.optimizer != "adamw":
        parts.append(settings.optimizer)
    parts.append(f"{settings.loss} loss")
    size = (
        f"{settings.micro_tokens:,} tokens"
        if settings.micro_tokens
        else count_of(settings.micro_batch_size, "row")
    )
    return ", ".join([*parts, f"{size} at once"])


def seconds(value: float) -> str:
    """A time as people read it: `5.8 s`, `120 ms`."""
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1000:,.0f} ms"


def print_traced(made: Answer, traced: Traced | None, why_not: str, *, explain: bool) -> None:
    """Result of the trace beside the arithmetic."""
    typer.echo()
    if traced is None:
        print_text(f"The prediction is not checked by a trace: {why_not}.")
        return
    resolved = made.resolved
    found = traced.prediction.model_copy(update={"budget_bytes": resolved.prediction.budget_bytes})
    took = "remembered" if traced.is_remembered else f"{traced.seconds:.1f} s"
    print_text(f"Checked on the run's own step: {difference(resolved.prediction, found)} ({took}).")
    waiting = [f"{owner} {gib(size)}" for owner, size in traced.host_bytes.items() if size]
    if waiting:
        print_text(f"In host memory meanwhile: {', '.join(waiting)}.")
    if traced.reserved_bytes is not None and traced.least_bytes is not None:
        print_text(allocator_words(made, traced.reserved_bytes, traced.least_bytes, found.peak.num_bytes))
    elif resolved.settings.device == "cuda" and not explain:
        print_text("With --explain the trace goes through every layer, and replays CUDA's caching allocator.")
    if not explain:
        return
    typer.echo()
    print_table(*owner_table(found, resolved.plain))
    typer.echo()
    print_text(verdict(resolved.settings, found, resolved.chosen.need_bytes))


def allocator_words(made: Answer, reserved: int, least: int, live: int) -> str:
    """The allocator's part as its rules make it of the traced step, and whether the card holds it.

    `reserved`: bytes where nothing limits it; `least`: bytes that it can do with; `live`: of tensors.
    """
    settings, budget = made.resolved.settings, made.resolved.prediction.budget_bytes or 0
    need, most = traced_need(made, reserved), traced_need(made, least)
    words = (
        f"Replayed by the rules of CUDA's caching allocator: {gib(reserved)} reserved "
        f"({signed(reserved / live - 1)}; the plan takes {overhead(settings).slack:+.0%}), so {gib(need)} "
        "with context and margin"
    )
    if need <= budget:
        return f"{words}: it fits."
    if most <= budget:
        return (
            f"{words}, more than {gib(budget)}. It still fits, in {gib(most)}: the allocator releases "
            "cached blocks when it needs memory, which stalls the device each time."
        )
    return f"{words}, and {gib(most)} at least: it does not fit {gib(budget)} by this trace."


def why_words(one: Decision) -> str:
    """Reason of a setting's value, and its source."""
    words, _, given = one.source.rpartition(": ")
    source = f"{words}: {whole(given)}" if words else whole(given)
    return f"{one.reason} ({source})" if one.reason else source


def _were(count: int) -> str:
    return f"{count_of(count, 'row')} {'was' if count == 1 else 'were'}"


def _tokens(tokens: int, loss_tokens: int, report: LengthReport) -> str:
    """Prompts have no loss tokens, and none to lose."""
    loss = f", {count_of(loss_tokens, 'loss token')}" if report.num_loss_tokens else ""
    return count_of(tokens, "token") + loss


def rows_words(report: LengthReport) -> str:
    """Effects of truncation and packing, in one paragraph: every loss is reported here."""
    counted = _tokens(report.num_tokens, report.num_loss_tokens, report)
    parts = [f"{count_of(report.num_rows, 'row')}, {counted}"]
    if report.rows_cut:
        sides = by_answer_words(report.loss_tokens_cut_by_answer)
        lost = _tokens(report.tokens_cut, report.loss_tokens_cut, report)
        parts.append(f"{_were(report.rows_cut)} truncated ({lost}{sides})")
    if report.rows_dropped:
        lost = _tokens(report.tokens_dropped, report.loss_tokens_dropped, report)
        parts.append(f"{_were(report.rows_dropped)} dropped ({lost})")
    if report.rows_split:
        parts.append(f"{_were(report.rows_split)} split into pieces")
    if report.tokens_idle:
        parts.append(f"pieces without a loss token are left out ({report.tokens_idle:,} tokens)")
    if report.num_sequences != report.pieces:
        parts.append(
            f"{report.pieces:,} pieces in {report.num_sequences:,} sequences, {report.fill:.2%} full"
        )
    if not (report.tokens_cut or report.tokens_dropped):
        parts.append("no loss token is lost" if report.tokens_idle else "no row was truncated or dropped")
    return "; ".join(parts) + "."
