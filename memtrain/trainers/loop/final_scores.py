"""The scores of a reward run's `final/` in plain transformers, compared with the trained model's."""

# A answers, T tokens of the longest prompt with its answer.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.build.components import Built
from memtrain.trainers.model.attention.own_positions import upstream_positions
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.reward_head import RewardScorer, head_of_rewards
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.model.loading.scoring_pad import with_scoring_pad
from memtrain.trainers.online.generation.transformers_sampler import own_attention
from memtrain.trainers.reference.reference import evaluating

MOST_ITEMS = 4
"""Rows that are looked at: the shortest ones. Taste."""

NEAR = 1e-5
"""Largest distance of a score in float32 on a CPU, over the largest of them (of 1 at least)."""

ELSEWHERE = 2e-2
"""The same in other precisions and on other devices, whose kernels round otherwise. Chosen: a score that is
read at another token is off by more than a tenth."""


@dataclass(frozen=True, slots=True)
class FinalScores:
    """Result of the comparison."""

    difference: float
    """Largest, over the largest score (over 1 at least)."""
    limit: float
    num_answers: int
    in_batches: bool
    """Whether answers were also scored as one padded batch: not where there is no token to pad with."""

    @property
    def fault(self) -> str:
        """Sentence that a user must know; empty where scores are the same."""
        if not self.difference <= self.limit:
            return (
                "plain transformers computes other scores with final/ than training did (off by "
                f"{self.difference:.2g} over {self.num_answers} answers): it takes its padding token for the "
                "end of each row. Set config.pad_token_id to the tokenizer's pad_token_id where the model is "
                "loaded (memtrain merge makes a model that has it)"
            )
        if not self.in_batches:
            return (
                "rows end in the only token that the tokenizer of final/ could pad with: score one row at a "
                "time in plain transformers"
            )
        return ""


def check_final_scores(built: Built, feed: AnswerFeed) -> FinalScores:
    """Score a few answers as in training, and by transformers' own class as `final/` configures it.

    Called by all ranks together: the weights may be in shards.
    """
    scorer = built.scorer
    assert isinstance(scorer, RewardScorer), "A reward model scores answers."
    device = local_device(feed.settings)
    sequences = np.argsort(feed.tokens, kind="stable")[:MOST_ITEMS]
    rows = [row for item in feed.items_of(sequences).tolist() for row in feed.whole_rows(item)]
    base = base_model(built.model)
    embedding: Any = base.get_input_embeddings()
    padded: Any = with_scoring_pad(built.tokenizer, embedding.num_embeddings)
    pad_id: int | None = padded.pad_token_id
    if base is not built.model:
        # An adapter is loaded on its base, with the base's own configuration.
        pad_id = base.config.get_text_config().pad_token_id
    with torch.no_grad(), evaluating(scorer):
        batch = feed.micro_batch(sequences).to(device)
        is_trained_A = scorer(batch.micro_batch.model_inputs(), batch.last_A).float().cpu()
        plain = _Plain(base, pad_id, device)
        with plain.as_loaded():
            found = [torch.cat([plain.scores([row]) for row in rows])]
            if pad_id is not None:
                found.append(plain.scores(rows))
    largest = max(1.0, float(is_trained_A.abs().max()))
    worst = max(float((one - is_trained_A).abs().max()) for one in found) / largest
    is_exact = device.type == "cpu" and trained_dtype(base) == torch.float32
    return FinalScores(worst, NEAR if is_exact else ELSEWHERE, len(rows), len(found) > 1)


def trained_dtype(base: nn.Module) -> torch.dtype:
    """The dtype of the layers."""
    embedding: Any = base.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    return embedding.weight.dtype


@dataclass(frozen=True, slots=True)
class _Plain:
    """transformers' own class, on the trained weights."""

    base: Any
    pad_id: int | None
    device: torch.device

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Inside, the model attends, counts positions and pads as it does when it is loaded from `final/`."""
        config = self.base.config.get_text_config()
        before = config.pad_token_id
        # In training the head is float32 whatever the layers are: it is the place that is looked at.
        widen = head_of_rewards(self.base).register_forward_pre_hook(lambda head, given: (given[0].float(),))
        config.pad_token_id = self.pad_id
        try:
            with own_attention(self.base), upstream_positions(self.base):
                yield
        finally:
            config.pad_token_id = before
            widen.remove()

    def scores(self, rows: list[np.ndarray]) -> Tensor:
        """float32 [A], of rows padded on the right."""
        width = max(map(len, rows))
        ids_AT = torch.full((len(rows), width), self.pad_id or 0)
        mask_AT = torch.zeros_like(ids_AT)
        for at, row in enumerate(rows):
            ids_AT[at, : len(row)] = torch.from_numpy(row.astype(np.int64))
            mask_AT[at, : len(row)] = 1
        given: dict[str, Any] = {"attention_mask": mask_AT.to(self.device)} if len(rows) > 1 else {}
        answer = self.base(input_ids=ids_AT.to(self.device), use_cache=False, **given)
        return answer.logits[:, 0].float().cpu()
