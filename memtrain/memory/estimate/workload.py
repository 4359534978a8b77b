"""The workload of a memory estimate: batches, tokens and the outputs that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.settings import Settings

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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


@dataclass(frozen=True)
class Workload:
    """A micro-batch on a model under some settings, in the letters of the formulas."""

    settings: Settings
    shape: ModelShape
    batch: HeaviestBatch

    @cached_property
    def a(self) -> int:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.settings.dtype]

    @cached_property
    def is_half(self) -> bool:
        """Float32 copies are made where norms and losses compute wide."""
        return self.a == 2

    @cached_property
    def sums_half_wide(self) -> bool:
        """A kernel of the device adds products of half precision in float32: on every GPU, which a run makes
        sure of before its first step (trainers/build/components.py)."""
        return self.is_half and self.settings.device == "cuda"

    @cached_property
    def fuses_tiles(self) -> bool:
        """Triton's kernels turn a tile of logits into its gradient in its own place, in half precision."""
        return self.settings.loss_kernel == "triton" and not self.shape.logit_softcap

    @cached_property
    def is_fused(self) -> bool:
        """Norms and gated products keep their inputs alone; never in another tool's run."""
        return self.settings.kernels == "fused" and self.batch.foreign is None

    @cached_property
    def trains_all(self) -> bool:
        """Every weight is trained, none is frozen."""
        return self.settings.adapter is None

    @cached_property
    def N(self) -> int:  # noqa: N802
        """Tokens that enter the model on one process, padding included."""
        return -(-self.num_whole // self.settings.context_parallel)

    @cached_property
    def num_whole(self) -> int:
        """The same of all processes that hold the same rows."""
        if self.settings.padding_free:
            tokens, rows = self.batch.tokens, 1
        else:
            tokens, rows = self.batch.longest, self.batch.rows
        multiple = self.settings.pad_to_multiple_of
        return rows * (-(-tokens // multiple) * multiple if multiple else tokens)

    @cached_property
    def S(self) -> int:  # noqa: N802
        """Tokens that the loss scores: the last of a row predicts nothing."""
        whole = max(0, min(self.batch.scored_tokens, self.batch.tokens - self.batch.rows))
        # A slice may be all answer.
        return whole if self.settings.context_parallel == 1 else min(whole, self.N)

    @cached_property
    def passes(self) -> tuple[Workload, ...]:
        """The passes of an evaluation: the micro-batch itself, and prompts with the answers of others."""
        mixed = self.batch.mixed
        if mixed is None:
            return (self,)
        return self, replace(self, batch=self.batch._replace(**mixed._asdict(), mixed=None, segments=0))

    @cached_property
    def computed(self) -> dict[tuple[Any, ...], Any]:
        """Results of formulas that several owners and moments ask for; see `once`."""
        return {}


Words = ParamSpec("Words")
Result = TypeVar("Result")


def once(
    formula: Callable[Concatenate[Workload, Words], Result],
) -> Callable[Concatenate[Workload, Words], Result]:
    """The formula of a workload, computed once for each and looked up after that; it returns nothing that
    its callers change."""

    @wraps(formula)
    def of(load: Workload, *words: Words.args, **named: Words.kwargs) -> Result:
        key = (formula, words, *named.values())
        if key not in load.computed:
            load.computed[key] = formula(load, *words, **named)
        return load.computed[key]

    return of
