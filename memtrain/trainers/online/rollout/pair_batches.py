"""The best and the worst completion of each prompt as a feed: a sequence is a pair, never divided."""

# A answers, Q prompts.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, PolicyMicro

Ints = NDArray[np.int64]


class PairFeed(PolicyFeed):
    """The pairs of the rollout at hand: sequence q is that of prompt q, and weighs 1.

    The chosen answer of a prompt has advantage 1, the rejected one -1; the prompt is theirs together.
    """

    @property
    def weights(self) -> Ints:
        """1 for each prompt."""
        return np.ones(self._at_hand.num_prompts, np.int64)

    @property
    def loss_tokens(self) -> Ints:
        """Tokens of both answers of each pair."""
        window = self._at_hand
        of_pairs = window.length_A * (window.advantage_A != 0)
        return np.bincount(window.prompt_A, weights=of_pairs, minlength=window.num_prompts).astype(np.int64)

    def sequences_of(self, answers: Ints) -> Ints:
        """The prompts of some answers, in order."""
        return np.unique(self._at_hand.prompt_A[answers])

    def answers_of(self, sequences: Ints) -> Ints:
        """Chosen and rejected answer of each prompt, prompt after prompt."""
        window = self._at_hand
        chosen, rejected = np.flatnonzero(window.advantage_A > 0), np.flatnonzero(window.advantage_A < 0)
        both = np.full((window.num_prompts, 2), -1, np.int64)
        both[window.prompt_A[chosen], 0] = chosen
        both[window.prompt_A[rejected], 1] = rejected
        return both[sequences].reshape(-1)

    def deal(self, answers: Ints, *, micro_batch_size: int, micro_tokens: int | None) -> list[Ints]:
        """The pairs in micro-batches of so many answers, a pair at least, and `tokens` counted for them."""
        window = self._at_hand
        prompts = self.sequences_of(answers)
        self._tokens = np.zeros(window.num_prompts, np.int64)
        made: list[list[int]] = [[]]
        for prompt in prompts.tolist():
            cost = self._group_tokens(self.answers_of(np.array([prompt])).tolist())
            self._tokens[prompt] = cost
            held = made[-1]
            is_full = 2 * len(held) + 2 > micro_batch_size or (
                micro_tokens is not None and int(self._tokens[held].sum()) + cost > micro_tokens
            )
            if held and is_full:
                made.append(held := [])
            held.append(prompt)
        return [np.array(micro_batch, np.int64) for micro_batch in made]

    def micro_batch(self, sequences: Ints) -> PolicyMicro:
        """Some pairs with their prompts; none gives a micro-batch that teaches nothing."""
        return super().micro_batch(self.answers_of(sequences))
