"""Rows and tokens of a run in words: by source, and those that were lost; no torch."""

from __future__ import annotations

from memtrain.errors import printable
from memtrain.memory.plan.length_profile import by_answer_words
from memtrain.trainers.protocols.events import DataEvent


def source_words(data: DataEvent) -> list[str]:
    """A sentence for each source of a mixture: its rows, tokens, loss tokens, and its share of the tokens."""
    total = max(1, sum(tokens for _, _, tokens, _ in data.sources))
    return [
        f"{data.split} from {printable(source)}: {_rows(rows)}, {_tokens(tokens, loss_tokens, data)} "
        f"({tokens / total:.1%} of the tokens)"
        for source, rows, tokens, loss_tokens in data.sources
    ]


def lost_words(data: DataEvent) -> str:
    """Losses by truncation and packing, in one sentence."""
    lost = []
    if data.rows_skipped:
        lost.append(f"{_rows(data.rows_skipped, 'bad row')} dropped")
    if data.rows_cut:
        sides = by_answer_words(data.loss_tokens_cut_by_answer)
        cut = _tokens(data.tokens_cut, data.loss_tokens_cut, data)
        lost.append(f"{_rows(data.rows_cut)} truncated ({cut}{sides})")
    if data.rows_dropped:
        dropped = _tokens(data.tokens_dropped, data.loss_tokens_dropped, data)
        lost.append(f"{_rows(data.rows_dropped)} dropped ({dropped})")
    if data.tokens_idle:
        lost.append(f"{data.tokens_idle:,} tokens in pieces without a loss token")
    words = "; ".join(lost) or "nothing"
    if data.rows_split:
        words += f" ({_rows(data.rows_split)} split into {data.fragments:,} pieces)"
    return words


def _tokens(tokens: int, loss_tokens: int, data: DataEvent) -> str:
    """Prompts have no loss tokens, and none to lose."""
    return _rows(tokens, "token") + (f", {_rows(loss_tokens, 'loss token')}" if data.loss_tokens else "")


def _rows(count: int, name: str = "row") -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
