"""The workload of a memory estimate: batches, tokens and the outputs that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from memtrain.memory.model_shape.layer_record import ModelRecord
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    def record(self) -> ModelRecord | None:
        """What layers hold, measured; None where they could not be passed."""
        return self.shape.record

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
