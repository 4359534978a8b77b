"""The arithmetic of a batch: rows or tokens of a step, over processes and micro-batches; said in one line."""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.memory.plan.length_profile import LengthProfile
from memtrain.memory.plan.units import count_of
from memtrain.memory.rules.ledger import DEFAULT_BATCH_SIZE, DecisionLog

COMFORTABLE_TOKENS = {"cuda": 16_384, "cpu": 4_096}
"""Tokens of a micro-batch beyond which a device gets hardly faster. Taste, until it is calibrated."""


@dataclass(frozen=True, slots=True)
class Micro:
    """Limits of one micro-batch of one rank."""

    rows: int
    tokens: int | None


def decide_batch(
    ledger: DecisionLog, num_replicas: int, *, num_sharing: int = 1
) -> tuple[int | None, int | None]:
    """(rows, tokens) of an optimizer step: exactly one is a number."""
    train = ledger.asked.recipe.train
    if train.batch_tokens is not None:
        ledger.decide("batch_tokens", f"{train.batch_tokens:,}", "", "train.batch_tokens")
        return None, train.batch_tokens
    rows = train.batch_size if train.batch_size is not None else DEFAULT_BATCH_SIZE
    ledger.decide("batch_size", rows, "" if train.batch_size else "the default", "train.batch_size")
    if rows < num_replicas:
        ledger.refuse(
            f"a step of {count_of(rows, 'row')} cannot be divided over {who(num_replicas, num_sharing)}",
            "train.batch_size",
            f"set train.batch_size to at least {num_replicas}, or cluster.processes to at most "
            f"{rows * num_sharing}",
        )
    return rows, None


def micro_batch_candidates(
    ledger: DecisionLog,
    profile: LengthProfile,
    batch: tuple[int | None, int | None],
    *,
    num_replicas: int,
    padding_free: bool,
    device: str,
    num_sharing: int = 1,
) -> list[Micro]:
    """The micro-batches to choose from, largest first; only one when the recipe says it."""
    train = ledger.asked.recipe.train
    most_rows = _most_rows(profile, batch, num_replicas)
    longest = profile.longest[0] if profile.longest else 1
    rows = train.micro_batch_size
    if rows != "auto" and rows > most_rows:
        ledger.refuse(
            f"train.micro_batch_size is {rows}, and each of {who(num_replicas, num_sharing)} has {most_rows} "
            "rows a step",
            "train.micro_batch_size",
            f"set it to at most {most_rows}, or raise the batch",
        )
    if train.micro_tokens != "auto":
        if not padding_free:
            ledger.refuse(
                "train.micro_tokens counts the tokens of concatenated rows, but this run pads its rows",
                "train.micro_tokens",
                "use train.micro_batch_size, or length.padding_free: true",
            )
        if train.micro_tokens < longest:
            ledger.refuse(
                f"train.micro_tokens is {train.micro_tokens}, and the longest sequence has {longest} tokens",
                "train.micro_tokens",
                f"set it to at least {longest}, or lower length.max_length",
            )
        return [Micro(most_rows if rows == "auto" else rows, train.micro_tokens)]
    if rows != "auto":
        return [Micro(rows, None)]
    if padding_free:
        return [Micro(most_rows, tokens) for tokens in _token_steps(longest, device, num_sharing)]
    return [Micro(count, None) for count in _row_steps(most_rows, longest, device, num_sharing)]


def who(num_replicas: int, num_sharing: int) -> str:
    """Takers of a step's rows: processes, or groups of them that hold the same rows."""
    if num_sharing == 1:
        return f"{num_replicas} process{'es' if num_replicas > 1 else ''}"
    return f"{num_replicas} group{'s' if num_replicas > 1 else ''} of {num_sharing} processes"


def worked_line(
    batch: tuple[int | None, int | None],
    micro_batch: Micro,
    num_replicas: int,
    profile: LengthProfile,
    *,
    num_sharing: int = 1,
) -> str:
    """The arithmetic of a step in words."""
    rows, tokens = batch
    step = count_of(rows, "row") if rows is not None else f"up to {tokens:,} tokens"
    per_step = rows if rows is not None else (tokens or 0) / profile.mean_tokens
    by_rows = per_step / num_replicas / micro_batch.rows
    by_tokens = (
        per_step * profile.mean_tokens / num_replicas / micro_batch.tokens if micro_batch.tokens else 0.0
    )
    rounds = max(1, round(max(by_rows, by_tokens) + 0.49))
    limits = [count_of(micro_batch.rows, "row")] if micro_batch.rows < per_step / num_replicas else []
    limits += [f"{micro_batch.tokens:,} tokens"] if micro_batch.tokens else []
    limit = f" of up to {' and '.join(limits)}" if limits else ""
    about = "about " if micro_batch.tokens and rounds > 1 else ""
    by = f"{who(num_replicas, num_sharing)} x " if num_replicas > 1 or num_sharing > 1 else ""
    return f"{step} = {by}{about}{count_of(rounds, 'accumulation step')}{limit}"


def _most_rows(profile: LengthProfile, batch: tuple[int | None, int | None], num_replicas: int) -> int:
    rows, tokens = batch
    if rows is None:
        shortest = max(1.0, min(profile.mean_tokens, float(profile.longest[-1] if profile.longest else 1)))
        rows = max(1, int((tokens or 0) / shortest))
    return max(1, min(-(-rows // num_replicas), profile.report.num_sequences))


def _token_steps(longest: int, device: str, num_sharing: int) -> list[int]:
    most = max(longest, num_sharing * COMFORTABLE_TOKENS[device])
    steps = [most]
    while steps[-1] // 2 > longest:
        steps.append(steps[-1] // 2)
    return [*steps, longest] if steps[-1] != longest else steps


def _row_steps(most_rows: int, longest: int, device: str, num_sharing: int) -> list[int]:
    comfortable = max(1, num_sharing * COMFORTABLE_TOKENS[device] // max(1, longest))
    steps = [min(most_rows, comfortable)]
    while steps[-1] > 1:
        steps.append(steps[-1] // 2)
    return steps


def refuse_uneven_groups(ledger: DecisionLog, rows: int | None) -> None:
    """Refuse a step that is no whole number of groups."""
    recipe = ledger.asked.recipe
    if recipe.online is None or rows is None:
        return
    count = recipe.generation.num_generations
    if rows % count:
        less, more = rows // count * count, (rows // count + 1) * count
        near = f"{less} or {more}" if less else f"{more}"
        ledger.refuse(
            f"a step of {rows} completions is not a whole number of groups of {count}",
            "train.batch_size",
            f"set train.batch_size to {near}, or generate.num_generations to a divisor of {rows}",
        )
