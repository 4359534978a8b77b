"""Training rows and held-out rows of a store: mixtures and splits as indices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.sections.data import Data
from memtrain.recipes.sections.training import Train

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

HAS_PROMPTS = tuple(name for name, form in FORMS.items() if form.has_prompts)
"""Formats of which rows of one prompt are held out together: a prompt that was trained on is no test."""


class Sourced(Protocol):
    """Rows that know their sources: a token store, or counts of one."""

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        ...

    def rows_of_source(self, source: int) -> Ints:
        """Numbers of the rows of one source of the recipe."""
        ...

    @property
    def prompts(self) -> Hashes | None:
        """[R] hash of the prompt of each row, 0 where it is empty; None for formats outside `HAS_PROMPTS`."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Numbers of rows in a store."""

    train: Ints
    """Rows of the first epoch, in order; a row of a small source may be there several times."""
    eval: Ints
    """Rows set aside, never among `train`."""
    later: tuple[Ints, ...] = ()
    """Rows of each later epoch that draws others, as many as the first has. The epochs after them begin
    again with the first."""


MOST_EPOCHS = 8
"""Epochs that draw rows of their own, of a mixture; and LAID_ROWS, the most rows of all of them. Taste."""
LAID_ROWS = 20_000_000


def choose_rows(data: Data, store: Sourced, seed: int, epochs: int = 1) -> Chosen:
    """The rows of `epochs` epochs and the held-out rows: a pure function, the same in every process.

    Only a mixture with weights that takes a part of a source draws others in every epoch.
    """
    prompts = store.prompts if data.eval_fraction else None
    train, held_out = split_rows(store.num_rows, data.eval_fraction, seed, prompts)
    weights = [source.weight for source in data.train]
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights) or len(weights) == 1:
        return Chosen(train, held_out)
    is_train = np.zeros(store.num_rows, np.bool_)
    is_train[train] = True
    rows = [own[is_train[own]] for own in map(store.rows_of_source, range(len(weights)))]
    wanted = max(1, min(epochs, MOST_EPOCHS, LAID_ROWS // max(1, len(train))))
    first, *later = (mixed(rows, given, seed, epoch) for epoch in range(wanted))
    if later and all(np.array_equal(first, one) for one in later):
        later = []
    return Chosen(first, held_out, tuple(later))


def epochs_of(train: Train) -> int:
    """Epochs that a run may begin: as many as draw rows of their own, where only its steps are given."""
    return MOST_EPOCHS if train.max_steps is not None else math.ceil(train.epochs or 1)


def split_rows(num_rows: int, fraction: float, seed: int, prompts: Hashes | None = None) -> tuple[Ints, Ints]:
    """(train, eval): `fraction` of the rows set aside, sampled with the seed, both in ascending order.

    Rows of one prompt stay together; the fraction is met as nearly as they allow. At least one prompt is set
    aside when the fraction is above zero and there are two.
    """
    group_of = np.arange(num_rows) if prompts is None else _by_first_row(prompts)
    sizes = np.bincount(group_of)
    order = np.random.default_rng(seed).permutation(len(sizes))
    filled = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[order])])
    count = int(np.abs(filled - round(num_rows * fraction)).argmin())
    if fraction > 0:
        count = min(max(count, 1), len(sizes) - 1)
    is_held = np.zeros(len(sizes), np.bool_)
    is_held[order[:count]] = True
    return np.flatnonzero(~is_held[group_of]), np.flatnonzero(is_held[group_of])


def _by_first_row(prompts: Hashes) -> Ints:
    """[R] number of each row's prompt, in the order of their first rows; an empty one is alone."""
    _, first, group_of = np.unique(prompts, return_index=True, return_inverse=True)
    first_row = np.where(prompts == 0, np.arange(len(prompts)), first[group_of])
    return np.unique(first_row, return_inverse=True)[1].astype(np.int64)


def span_hashes(ids: NDArray[np.int32], starts: Ints, ends: Ints) -> Hashes:
    """uint64 [R]: hash (xxh3) of the ids of each span, 0 for an empty one."""
    from xxhash import xxh3_64_intdigest

    whole = np.ascontiguousarray(ids).view(np.uint8).data
    size = ids.itemsize
    spans = zip((starts * size).tolist(), (ends * size).tolist(), strict=True)
    digests = [xxh3_64_intdigest(whole[start:end]) if end > start else 0 for start, end in spans]
    return np.array(digests, np.uint64)


def mixed(rows: list[Ints], weights: list[float], seed: int, epoch: int = 0) -> Ints:
    """Rows of several sources in the given shares: as many in all as there are rows.

    Every source is used in whole passes and one sampled part of a pass; so that no row of a source is there
    twice more often than another. The part goes on, in every epoch, where it ended in the one before: over
    the epochs too, no row is drawn twice more often than another. A share is rounded to whole rows, the
    largest remainders up.
    """
    total = sum(len(own) for own in rows)
    shares = np.array([weight if len(own) else 0.0 for own, weight in zip(rows, weights, strict=True)])
    exact = shares / max(shares.sum(), 1e-300) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: round(exact.sum()) - int(counts.sum())]] += 1
    chosen: list[Ints] = []
    for number, (own, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        passes, rest = divmod(count, len(own)) if len(own) else (0, 0)
        order = np.random.default_rng([seed, number]).permutation(len(own))
        drawn = order[(epoch * rest + np.arange(rest)) % max(1, len(own))]
        chosen += [own] * passes + [own[np.sort(drawn)]]
    return np.concatenate(chosen)
