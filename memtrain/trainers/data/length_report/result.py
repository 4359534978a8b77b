"""The answer of `memtrain inspect-lengths`, as one value for the screen, the page and the JSON."""

from __future__ import annotations

from typing import Literal

from memtrain.recipes.sections.base import Section

VERSION = 1
"""Of the JSON. It is raised when a field changes its meaning or goes; new fields do not raise it."""

PackingKind = Literal["bfd", "bfd_split", "wrapped"]

Interval = tuple[float, float]
"""From, to: holds the true value 95 times in 100."""


class Extent(Section):
    """Rows that the numbers describe."""

    rows_read: int
    """Rows that were tokenized, bad ones included."""
    rows_kept: int
    """Rows whose numbers were kept one by one; the tables are made of these."""
    scale: float
    """Factor of the tables' counts of rows, tokens, sequences and steps; 1 where they are exact."""
    is_partial: bool
    """Reading was stopped: these are the first rows, and no sample."""
    sampled_of: int | None
    """Rows there are, where only a sample of them was read (--sample)."""
    is_cached: bool
    """Read from tokenized rows that a training run left in the cache."""

    @property
    def is_estimate(self) -> bool:
        """Whether the tables stand for more rows than they were made of."""
        return self.scale != 1


class Percentile(Section):
    """A point of a distribution."""

    percent: float
    tokens: int
    """The smallest length that this share of the rows does not exceed."""
    interval: tuple[int, int] | None
    """95 % confidence interval of the length, where the rows are a sample."""


class Bin(Section):
    """A bar: rows of `first` to `last` tokens."""

    first: int
    last: int
    rows: int


class Distribution(Section):
    """Lengths of the rows, or of one part of them."""

    name: str
    """`row`, a part of it (`prompt`, `completion`, `chosen`, `rejected`), `loss_tokens`, `turn` (an
    assistant's message, with assistant_only_loss), or `turns` (messages of a row)."""
    unit: Literal["tokens", "messages"]
    count: int
    total: int
    mean: float
    mean_interval: Interval | None
    """95 % confidence interval of the mean, where the rows are a sample."""
    smallest: int
    largest: int
    percentiles: tuple[Percentile, ...]
    bins: tuple[Bin, ...]


class LongRow(Section):
    """A row among the longest."""

    tokens: int
    where: str
    """`file:line`."""


class BadRows(Section):
    """Rows that cannot be trained on, of one kind."""

    what: str
    """Fault of the first of them."""
    fix: str
    where: str
    """`file:line` of the first of them."""
    rows: int


class Faulty(Section):
    """Rows that training refuses, or leaves out with `data.on_bad_row: skip`."""

    rows: int
    empty: int
    """Rows with fewer than two tokens: nothing to predict."""
    without_loss_tokens: int
    """Rows without a loss token."""
    kinds: tuple[BadRows, ...]
    """The most frequent first."""

    @property
    def words(self) -> str:
        """`3 bad rows, 1 of them empty. Most often: ... (2 times, first at rows.jsonl:4).`"""
        number = f"{self.rows:,} bad row{'' if self.rows == 1 else 's'}"
        first = self.kinds[0]
        if first.rows == self.rows:
            return f"{number}: {first.what} ({'' if self.rows == 1 else 'the first: '}{first.where})."
        named = ((self.empty, "empty"), (self.without_loss_tokens, "without a loss token"))
        parts = "".join(f", {count:,} {word}" for count, word in named if count)
        times = "once" if first.rows == 1 else f"{first.rows:,} times"
        return f"{number}{parts}. Most often: {first.what} ({times}, first at {first.where})."


class Loss(Section):
    """The losses of a way of truncation, in the fields of a training run's report."""

    truncation: Literal["keep_start", "keep_end", "drop"]
    rows_cut: int
    rows_dropped: int
    tokens_lost: int
    loss_tokens_lost: int


class Packing(Section):
    """A way of packing."""

    packing: PackingKind
    sequences: int
    fill: float
    rows_cut: int
    rows_dropped: int
    rows_split: int
    tokens_lost: int
    loss_tokens_lost: int
    steps: int
    """Optimizer steps of one epoch."""


class Padding(Section):
    """Padding, as a share of all the positions that are computed."""

    fixed: float
    """Micro-batches of `micro_batch_size` rows in random order."""
    grouped: float
    """The same with length.group_by_length."""
    padding_free: float
    """Rows laid end to end: only length.pad_to_multiple_of pads."""


class Cost(Section):
    """Prediction of the planner for a run with this max_length."""

    fits: bool | None
    """None where the need is known from below alone, and is within the budget."""
    peak_bytes: int | None
    """Predicted peak of live tensors on one device; None where nothing fits."""
    need_bytes: int | None
    """Memory of one device that the plan needs, margin included: what `fits` compares."""
    step_s: float | None
    """Predicted seconds of one optimizer step."""
    words: str
    """The settings that were chosen, or why nothing fits."""

    @property
    def fits_word(self) -> str:
        """Answer in a word."""
        return "not known" if self.fits is None else "yes" if self.fits else "no"


class Candidate(Section):
    """A max_length with its losses and costs."""

    max_length: int
    rows_longer: int
    """Rows with more tokens (with answers: prompt and longer answer together)."""
    longer_interval: Interval | None
    """95 % confidence interval of their share of the rows, where the rows are a sample."""
    losses: tuple[Loss, ...]
    lost_interval: Interval | None
    """95 % confidence interval of the share of loss tokens lost by the first of `losses` (of all tokens,
    where nothing is learned from the rows themselves), where the rows are a sample."""
    packings: tuple[Packing, ...]
    """Empty where the method does not pack."""
    padding: Padding
    steps: int
    """Optimizer steps of one epoch without packing."""
    cost: Cost | None


class Recommendation(Section):
    """Lines for the recipe, and their reason."""

    reason: str
    recipe: str
    """YAML lines to paste."""


class Batch(Section):
    """Batch for which steps and padding are counted."""

    rows: int | None
    tokens: int | None
    micro_batch_size: int


class Inspection(Section):
    """Answer of `memtrain inspect-lengths`."""

    version: int = VERSION
    memtrain: str
    """Version of memtrain."""
    dataset: str
    method: str
    format: str
    tokenizer: str
    counted_by: str = ""
    """Sentence on the tokenizer, where the user named none."""
    extent: Extent
    rows: int
    """Rows of one epoch: after sampling, mixture weights and the held-out fraction."""
    tokens: int
    loss_tokens: int
    """Loss tokens: tokens that are predicted and counted in the loss."""
    duplicates: int
    """Rows with the same tokens as an earlier row."""
    distributions: tuple[Distribution, ...]
    longest: tuple[LongRow, ...]
    faulty: Faulty
    batch: Batch
    candidates: tuple[Candidate, ...]
    recommendation: Recommendation
    notes: tuple[str, ...]
    """Further remarks that are needed to read the numbers."""

    def __repr__(self) -> str:
        """A line; `model_dump()` has every number."""
        about = "about " if self.extent.is_estimate else ""
        return (
            f"Inspection({self.dataset}: {about}{self.rows:,} rows, {self.tokens:,} tokens; "
            f"{self.recommendation.reason})"
        )

    __str__ = __repr__
