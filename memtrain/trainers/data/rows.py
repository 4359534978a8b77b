"""Which rows of a store are learnt from and which are held out: mixtures and splits as indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memtrain.recipes.data import Data

Ints = NDArray[np.int64]


class Sourced(Protocol):
    """Rows that know their sources: a token store, or counts of one."""

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        ...

    def rows_of_source(self, source: int) -> Ints:
        """Numbers of the rows of one source of the recipe."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """Numbers of rows in a store."""

    train: Ints
    """Rows of one epoch, in order; a row of a small source may be there several times."""
    eval: Ints
    """Rows set aside, never among `train`."""


def choose_rows(data: Data, store: Sourced, seed: int) -> Chosen:
    """The rows of an epoch and the held-out rows: a pure function, the same in every process."""
    train, held_out = split_rows(store.num_rows, data.held_out, seed)
    weights = [source.weight for source in data.train]
    given = [weight for weight in weights if weight is not None]
    if len(given) < len(weights) or len(weights) == 1:
        return Chosen(train, held_out)
    is_train = np.zeros(store.num_rows, np.bool_)
    is_train[train] = True
    rows = [own[is_train[own]] for own in map(store.rows_of_source, range(len(weights)))]
    return Chosen(mixed(rows, given, seed), held_out)


def split_rows(num_rows: int, fraction: float, seed: int) -> tuple[Ints, Ints]:
    """(train, eval): `fraction` of the rows set aside, sampled with the seed, both in ascending order.

    At least one row is set aside when the fraction is above zero and there are two rows.
    """
    count = round(num_rows * fraction)
    if fraction > 0:
        count = min(max(count, 1), num_rows - 1)
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.sort(order[count:]), np.sort(order[:count])


def mixed(rows: list[Ints], weights: list[float], seed: int) -> Ints:
    """Rows of several sources in the given shares: as many in all as there are rows.

    Every source is used in whole passes and one sampled part of a pass; so that no row of a source is there
    twice more often than another. A share is rounded to whole rows, the largest remainders up.
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
        chosen += [own] * passes + [own[np.sort(order[:rest])]]
    return np.concatenate(chosen)
