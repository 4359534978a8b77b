"""Recommended max_length, with the reason in one sentence and the lines of the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from memtrain.memory.plan.units import count_of
from memtrain.recipes.sections.length import Length
from memtrain.trainers.data.length_report.format import share
from memtrain.trainers.data.length_report.result import (
    Batch,
    Candidate,
    Distribution,
    Packing,
    Recommendation,
)

ALLOWED_LOSS = 0.001
"""Share of the loss tokens (of prompts: of the rows) that may be lost. Taste: below the noise of a run."""
FEW_PROMPTS_CUT = 0.01
"""Share of rows that may be cut where that costs their prompts no loss token (keep_end). Taste."""
WORTH_PACKING = 0.1
"""Share of padding from which packing is recommended. Taste."""
SHORT_ANSWER = 64
"""Tokens below which texts beside prompts are taken for results and not for worked answers. Taste."""
FEW_SPLIT = 0.05
"""Share of rows that may be split where a much shorter max_length is mentioned. Taste."""


def recommend(
    candidates: Sequence[Candidate],
    *,
    rows: int,
    loss_tokens: int,
    length: Length,
    batch: Batch,
    answers: Sequence[Distribution] = (),
    writes_answers: bool = False,
) -> Recommendation:
    """The smallest candidate that loses next to nothing; where a budget is given, the largest that fits.

    `answers`: lengths of answers beside prompts. `writes_answers`: the method writes the answers itself, and
    max_length is the limit of prompts.
    """
    if writes_answers:
        return _of_prompts(candidates, rows, answers)
    enough = [one for one in candidates if _is_enough(one, rows, loss_tokens)]
    wanted = enough[0] if enough else candidates[-1]
    fitting = [one for one in candidates if one.cost is None or one.cost.fits is not False]
    if not fitting:
        return _nothing_fits(candidates)
    within = [one for one in fitting if one.max_length <= wanted.max_length] or fitting
    chosen = within[-1]
    packing = _packing(chosen, length, loss_tokens)
    parts = [_keeps(chosen, rows, loss_tokens, packing)]
    if chosen is not wanted:
        parts.append(f"the longest that fits the budget ({wanted.max_length:,} does not)")
    if chosen.cost is not None and chosen.cost.fits is None:
        parts.append(f"whether it fits is not known: it needs {chosen.cost.words}")
    below = [one for one in candidates if one.max_length < chosen.max_length]
    if below and chosen is wanted:
        parts += _lost_below(below[-1], rows, loss_tokens)
    sentence = ", ".join(parts)
    if packing is not None and length.packing == "none":
        sentence += (
            f"; packed ({packing.packing}) the sequences are {packing.fill:.1%} full, "
            f"where micro-batches of {batch.micro_batch_size} rows are {chosen.padding.fixed:.0%} padding"
        )
    split = _split_instead(candidates, chosen, rows)
    if split is not None and packing is not None and packing.packing == "bfd":
        sentence += (
            f"; with packing bfd_split {split.max_length:,} loses nothing either: "
            f"{share(split.rows_longer, rows)} of the rows continue in another sequence"
        )
    lines = ["length:", f"  max_length: {chosen.max_length}"]
    lines += [f"  packing: {packing.packing}"] if packing is not None else []
    lines += [f"  truncation: {length.truncation}"] if length.truncation is not None else []
    return Recommendation(reason=sentence + ".", recipe="\n".join(lines) + "\n")


def _lost_below(below: Candidate, rows: int, loss_tokens: int) -> list[str]:
    """Loss of the next shorter candidate; nothing where it loses nothing."""
    lost = below.losses[0]
    if lost.loss_tokens_lost:
        return [f"where {below.max_length:,} would lose {share(lost.loss_tokens_lost, loss_tokens)}"]
    return [f"where {below.max_length:,} would cut {share(lost.rows_cut, rows)} of the rows"] * bool(
        lost.rows_cut
    )


def _is_enough(one: Candidate, rows: int, loss_tokens: int) -> bool:
    """Whether next to no loss token is lost, and next to no prompt is cut where answers are kept."""
    losses = one.losses[0]
    cuts_prompts = losses.truncation == "keep_end" and losses.rows_cut > FEW_PROMPTS_CUT * rows
    return losses.loss_tokens_lost <= ALLOWED_LOSS * loss_tokens and not cuts_prompts


def _keeps(chosen: Candidate, rows: int, loss_tokens: int, packing: Packing | None) -> str:
    lost = chosen.losses[0].loss_tokens_lost if packing is None else packing.loss_tokens_lost
    touched = packing if packing is not None else chosen.losses[0]
    if not lost and not touched.rows_cut and not touched.rows_dropped:
        how = "" if not chosen.rows_longer else ", longer rows continue in another sequence"
        return f"max_length {chosen.max_length:,} loses nothing{how}"
    losses = [f"cuts {touched.rows_cut:,}"] if touched.rows_cut else []
    losses += [f"leaves out {touched.rows_dropped:,}"] if touched.rows_dropped else []
    kept = f"{max(loss_tokens - lost, 0) / max(loss_tokens, 1):.2%}" if lost else "all"
    lost_rows = f"{' and '.join(losses)} of {rows:,} rows"
    return f"max_length {chosen.max_length:,} keeps {kept} of the loss tokens and {lost_rows}"


def _packing(chosen: Candidate, length: Length, loss_tokens: int) -> Packing | None:
    """The recipe's own packing; else one where padding is worth it: splitting where cutting would cost."""
    by_name = {one.packing: one for one in chosen.packings}
    if length.packing != "none":
        return by_name[length.packing]
    if not by_name or chosen.padding.fixed < WORTH_PACKING:
        return None
    cuts_much = by_name["bfd"].loss_tokens_lost > ALLOWED_LOSS * loss_tokens
    return by_name["bfd_split" if cuts_much else "bfd"]


def _split_instead(candidates: Sequence[Candidate], chosen: Candidate, rows: int) -> Candidate | None:
    """A candidate of at most half the length, at which few rows are longer."""
    few = [one for one in candidates if one.rows_longer <= FEW_SPLIT * rows]
    return few[0] if few and 2 * few[0].max_length <= chosen.max_length else None


def _nothing_fits(candidates: Sequence[Candidate]) -> Recommendation:
    smallest = candidates[0]
    assert smallest.cost is not None, "Without a price everything fits."
    return Recommendation(
        reason=f"even {smallest.max_length:,} does not fit: {smallest.cost.words}.",
        recipe=f"length:\n  max_length: {smallest.max_length}\n",
    )


def _of_prompts(
    candidates: Sequence[Candidate], rows: int, answers: Sequence[Distribution]
) -> Recommendation:
    enough = [one for one in candidates if one.rows_longer <= ALLOWED_LOSS * rows]
    chosen = enough[0] if enough else candidates[-1]
    longer = f"{chosen.rows_longer:,} of {rows:,} are longer" if chosen.rows_longer else "none is longer"
    reason = f"prompts of at most {chosen.max_length:,} tokens: {longer}"
    lines = ["length:", f"  max_prompt: {chosen.max_length}"]
    if not answers:
        reason += "; nothing in the rows shows how long completions get"
        return Recommendation(reason=reason + ".", recipe="\n".join(lines) + "\n")
    column = max(answers, key=_typical_end)
    end = _typical_end(column)
    texts = count_of(column.count, "text")
    reason += f"; 99% of the {texts} in column '{column.name}' have at most {end:,} tokens"
    if end < SHORT_ANSWER:
        reason += ": bare results, which do not show how long completions get"
    else:
        reason += ", and a reasoning model writes more than that"
        size = next(size for size in _sizes() if size >= end)
        lines.insert(1, f"  max_length: {chosen.max_length + size}")
        lines += ["generate:", f"  max_tokens: {size}"]
    return Recommendation(reason=reason + ".", recipe="\n".join(lines) + "\n")


def _typical_end(one: Distribution) -> int:
    """The 99th percentile."""
    return next(point.tokens for point in one.percentiles if point.percent == 99)


def _sizes() -> list[int]:
    return sorted({2**power * half // 2 for power in range(4, 30) for half in (2, 3)})
