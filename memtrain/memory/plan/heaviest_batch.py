"""The micro-batch that needs the most memory, and the outputs that its loss needs."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class HeadOutput(StrEnum):
    """Outputs that a loss needs from an LM head."""

    NLL = "nll"
    """A weighted sum, its weights known before: gradients may be made with it."""
    LOGPS = "logps"
    """Log-probs, from which the loss is computed."""
    STATISTICS = "statistics"
    """Log-probs, and entropies that are counted and not learned from."""
    ENTROPIES = "entropies"
    """Log-probs and entropies, both with gradients."""
    TEACHER = "teacher"
    """A divergence from a teacher, whose logits are made beside; gradients are made with it."""
    TOP_K = "top_k"
    """The same from a teacher's likeliest tokens."""


class ForeignStep(NamedTuple):
    """Parts of a step that another tool computes otherwise, for the plan of its run as it was."""

    logits: tuple[float, float, float, float]
    """(kept, forward, backward, evaluation) of a plain loss over full logits, in float32 copies of them."""
    is_foreach: bool
    """AdamW's step by torch's foreach kernels: the roots of all second moments are there at once."""


TRANSFORMERS = ForeignStep((1, 3.5, 3, 3.5), is_foreach=True)
"""transformers' Trainer. Its causal loss holds the model's logits in half precision, their float32 copy, that
copy shifted by a token, and the log-softmax; backward the log-softmax and two gradients. Its AdamW steps by
foreach (until 5.0).

Source: transformers 4.46 to 4.49, loss/loss_utils.py, ForCausalLMLoss (the versions before and after shift
labels, or have no half-precision copy: 3 in place of 3.5); torch, optim/adamw.py, _multi_tensor_adamw."""


class TeacherLoad(NamedTuple):
    """Bytes that a teacher adds to a micro-batch, and its work."""

    weights: int
    one_pass: int
    """Most that a layer of it holds in its pass, before the student's."""
    final: int
    """Held after its last layer: input and output of the final norm."""
    head: int
    """Whole weights of its head, where they lie in shards: from its pass until the loss is made."""
    each_scored: int
    """Of each scored token until its loss is made: hidden states, or likeliest tokens from a file."""
    num_columns: int
    """The vocabulary that both have."""
    relative: float
    """Parameters of the teacher over the student's."""
    logits: tuple[float, float, float, float]
    """(kept, forward, backward, evaluation) of the loss over whole logits, in float32 copies of the
    student's. Counted in trainers/losses/distill/full.py."""
    fetched_head: int = 0
    """Weights of its head while the loss is computed, where they live on the host."""


class MixedRows(NamedTuple):
    """A micro-batch of prompts with the answers of other rows, which KTO's baseline reads."""

    rows: int
    tokens: int
    longest: int
    scored_tokens: int
    """Most of any micro-batch."""

    def num_tokens(self, *, padding_free: bool) -> int:
        """Tokens that enter the model, padding included."""
        return self.tokens if padding_free else self.rows * self.longest


class HeaviestBatch(NamedTuple):
    """The micro-batch that needs the most memory."""

    rows: int
    """Sequences."""
    tokens: int
    """Tokens of the rows, without padding."""
    scored_tokens: int
    """Tokens that the loss scores; `tokens` where it is not known."""
    longest: int
    """Tokens of the longest sequence: padded rows are all as long."""
    asks: HeadOutput = HeadOutput.NLL
    """Outputs for the scored tokens that the loss needs."""
    foreign: ForeignStep | None = None
    """The step of another tool, where it is not memtrain's."""
    teacher: TeacherLoad | None = None
    """A teacher that the loss compares with."""
    mixed: MixedRows | None = None
    """The same prompts with the answers of others, where they are read so once more; None: they are not."""
    segments: int = 0
    """Stretches of the rows that attention keeps apart: documents of packed rows, or prompts and answers that
    lie apart; 0: as many as rows."""
    attended_tokens: float = 0.0
    """Length of the stretch that a token is in, mean over tokens; 0: that of a mean row. Of time alone."""

    @property
    def num_segments(self) -> int:
        """The same, counted."""
        return self.segments or self.rows
