"""State of a run: all that a checkpoint needs beside the weights and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TrainState:
    """State of a run. Plain values only: it is saved as it is."""

    step: int = 0
    """Optimizer steps made."""
    eval_loss: float | None = None
    """Held-out loss after `step`, where it was measured; of another metric, what is lower is better."""
    best_loss: float | None = None
    best_step: int | None = None
    """Step of `best_loss`."""
    watched: str = ""
    """Metric that `eval_loss` is of (early_stopping.py)."""
    gained_loss: float | None = None
    """Value of `eval_loss` at the last gain."""
    stale_evals: int = 0
    """Evaluations since the last gain."""
    high_steps: int = 0
    """Steps in a row, up to this one, of a loss above the threshold of `train.loss_watchdog`."""
    num_recoveries: int = 0
    """Times that memory ran out and the step was made all the same."""
    micro_batch_limit: int | None = None
    """Tokens (padding included) of the lightest micro-batch that ran out: as heavy ones are split."""
    switched_on: list[str] = field(default_factory=list)
    """Strategies that were switched on because memory ran out, in their order (recover.py)."""
    loss_scale: float = 2.0**16
    """Factor of the loss in float16 (loss_scaling.py)."""
    scaled_steps: int = 0
    """Steps since the scale last changed."""
    skipped_steps: int = 0
    """Steps that moved nothing, for their gradients overflowed float16."""
