"""Counts beside the tokens of the rows: messages of conversations, answers beside prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memtrain.recipes.formats.fields import BadRow
from memtrain.trainers.data.sources.readers import Line
from memtrain.trainers.data.tokenize.encode import few_at_once
from memtrain.trainers.data.tokenize.plain_rows import MOST_ROW_CHARS
from memtrain.trainers.data.tokenize.workers import Job

Ints = NDArray[np.int64]
LONGEST_COUNTED = 2**20


class Side:
    """Counts by value, so that memory does not grow with the rows."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.wants_rows = any(reading.form == "messages" for reading in job.readings)
        self.messages = np.zeros(1, np.int64)
        """Rows by their number of messages."""
        self.answers: dict[str, Ints] = {}
        """Rows by the tokens of each text column beside a prompt."""
        self._tokenizer = None

    def watched(self, rows: Iterator[tuple[int, Line]]) -> Iterator[tuple[int, Line]]:
        """The same rows, their messages counted as they pass."""
        if not self.wants_rows:
            return rows
        return map(self._passed, rows)

    def _passed(self, one: tuple[int, Line]) -> tuple[int, Line]:
        self.row(*one)
        return one

    def row(self, stream: int, line: Line) -> None:
        """Count the messages of a row."""
        reading, row = self.job.readings[stream], line[1]
        if isinstance(row, BadRow) or reading.form != "messages":
            return
        messages = row.get(reading.names.messages)
        if isinstance(messages, list):
            self.messages = counted(self.messages, np.array([len(messages)]))

    def columns(self, lines: Sequence[str]) -> None:
        """Tokenize the text columns beside prompts: answers that say how long completions get."""
        texts: dict[str, list[str]] = {}
        for line in lines:
            for name, value in json.loads(line).items():
                # No answer is longer than a row may be: such a column is something else.
                if isinstance(value, str) and len(value) <= MOST_ROW_CHARS:
                    texts.setdefault(name, []).append(value)
        for name, values in texts.items():
            for some in few_at_once(values):
                found = self.tokenizer.encode_batch_fast(values[some], add_special_tokens=False)
                tokens = np.array([len(one) for one in found], np.int64)
                self.answers[name] = counted(self.answers.get(name, np.zeros(1, np.int64)), tokens)

    @property
    def tokenizer(self):
        """The tokenizer of the rows, without padding and truncation."""
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self.job.tokenizer_json)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        return self._tokenizer


def counted(counts: Ints, values: Ints) -> Ints:
    """`counts[n]`: how many times n was met, with `values` added."""
    more = np.bincount(np.minimum(values, LONGEST_COUNTED), minlength=len(counts))
    more[: len(counts)] += counts
    return more


def spread_out(counts: Ints) -> Ints:
    """The sorted values that were counted."""
    return np.repeat(np.arange(len(counts)), counts)
