"""Rows of the embedding and of the head for tokens that a model does not have yet.

Each begins as the mean of the rows that are there, so that the probabilities of the known tokens hardly move
and nothing is drawn: the same rows come from the same model anywhere.

Source: Hewitt 2021, "Initializing new word embeddings for pretrained language models"
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html): the mean bounds the divergence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.trainers.model.loading.sharded_init import NeedsWhole, is_keeping


@torch.no_grad()
def grow_embeddings(model: PreTrainedModel, vocab_size: int, first_new: int) -> None:
    """Give the tokens from `first_new` to `vocab_size` rows, in the embedding and in a head of its own.

    Rows that the model holds in reserve are used first; a tied head stays tied. The caller's random state
    does not move. Raises: NeedsWhole where the weights have no data yet.
    """
    if is_keeping():
        raise NeedsWhole("the rows of added tokens begin as the mean of all others")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "A causal LM looks its tokens up in an embedding."
    if vocab_size > embedding.num_embeddings:
        with torch.random.fork_rng():
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
    for weight in {id(one): one for one in _tables(model)}.values():
        mean = weight[:first_new].double().mean(0)
        weight[first_new:vocab_size] = mean.to(weight.dtype)


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """Weights of the embedding, and of the head that gives a number for each token."""
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [table.weight for table in tables if table is not None]
