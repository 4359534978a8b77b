"""The teacher of a tile: its hidden states with its own head, or its likeliest tokens from a file."""

# N scored tokens, T tokens of one tile, V vocabulary, D width of one pair, K tokens that are kept

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from memtrain.trainers.losses.head.tiles import LogitRule


class WholeTeacher(NamedTuple):
    """Hidden states and head of a teacher: its logits are made in the tile of the student's."""

    hidden: tuple[Tensor, ...]
    """[N, D] of each pair."""
    weight: tuple[Tensor, ...]
    """[V, D] of each pair."""
    bias_V: Tensor | None
    rule: LogitRule
    """From its head's outputs to its logits at temperature 1."""

    @property
    def num_columns(self) -> int:
        """Tokens of its vocabulary."""
        return self.weight[0].shape[0]

    def about(self, which_n: Tensor) -> WholeTeacher:
        """The same of some of the tokens."""
        return self._replace(hidden=tuple(one[which_n] for one in self.hidden))


class TopKTeacher(NamedTuple):
    """The K likeliest tokens at each place, at the temperature of the loss; all others are one event."""

    ids_NK: Tensor
    """int32."""
    logp_NK: Tensor
    """float32."""
    tail_N: Tensor
    """float32, the log-prob of all others together."""

    def about(self, which_n: Tensor) -> TopKTeacher:
        """The same of some of the tokens."""
        return TopKTeacher(self.ids_NK[which_n], self.logp_NK[which_n], self.tail_N[which_n])


Teacher = WholeTeacher | TopKTeacher
