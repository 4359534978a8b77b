"""A padding token that never ends a row, for models that score a sequence at its last token.

transformers' classes of sequences read the score at the rightmost token that is not the padding token. Where
that is the end-of-sequence token too, the last token of every row is taken for padding, and the score is read
at a place that was never trained.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

SPARE = ("pad", "reserved", "unused", "placeholder", "extra")
"""Parts of the names of special tokens that no text holds, the surest first."""

NEW = "<|pad|>"


def scores_sequences(model: nn.Module) -> bool:
    """Whether a model (without its adapter's wrapper) gives one number for a sequence."""
    return type(model).__name__.endswith("ForSequenceClassification")


def with_scoring_pad(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy that pads with another token than its end token.

    `num_rows`: rows of the model's embedding. The pad token is, in this order: its own; a special token that
    is kept free; a new one, where the embedding has a row to spare; the unknown token; none (transformers
    then takes one row at a time, and reads its last token).
    """
    held: Any = tokenizer
    if held.pad_token_id is not None and held.pad_token_id not in _ends(held):
        return tokenizer
    made: Any = deepcopy(held)
    spare = _spare(held)
    unknown = held.unk_token_id
    if spare is not None:
        made.pad_token = spare
    elif _next_id(held) < num_rows:
        made.add_special_tokens({"pad_token": NEW})
    elif unknown is not None and unknown not in _ends(held):
        made.pad_token = held.unk_token
    else:
        made.pad_token = None
    return made


def _ends(tokenizer: Any) -> set[int]:
    return {tokenizer.eos_token_id} - {None}


def _spare(tokenizer: Any) -> str | None:
    """A special token that is kept free; None where there is none."""
    named = set(tokenizer.all_special_ids)
    known = [
        str(token)
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and number not in named
    ]
    found = (token for word in SPARE for token in known if re.search(rf"(?i)(^|[^a-z]){word}", token))
    return next(found, None)


def _next_id(tokenizer: Any) -> int:
    """The id that a new token would get."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
