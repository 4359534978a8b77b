"""The `optim:` section: optimizer, schedule, and what keeps gradients in bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Fraction, Section

OptimizerKind = Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "muon", "sgd"]


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]


class Optim(Section):
    """Optimizer, learning rate and schedule."""

    kind: OptimizerKind = "adamw"
    """`adamw` keeps 2 numbers a weight; 8-bit a quarter of their bytes; `adafactor` almost none; `muon` one
    (matrices; the rest by AdamW); `paged_*` spill to host memory (bitsandbytes, CUDA)."""

    lr: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate. Full fine-tuning: about 1e-5; LoRA: about 2e-4."""

    betas: Annotated[tuple[float, float], BeforeValidator(_pair)] = (0.9, 0.999)
    """Decay of the first and second moment (AdamW)."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""

    momentum: Fraction = 0.95
    """Momentum of `muon`; `sgd` has none."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay on matrices; norms and biases are never decayed."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Schedule of the learning rate after warm-up. `wsd`: constant, then linear over the last fifth."""

    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps of linear warm-up."""

    warmup_ratio: Fraction | None = None
    """Warm-up as a fraction of all steps. If neither is set: 0.03."""

    min_lr_ratio: Fraction = 0.0
    """End of the schedule, as a fraction of `lr`."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this norm. null: never."""

    master_weights: bool | Literal["auto"] = "auto"
    """Keep float32 copies of bfloat16 weights in the optimizer: 4 more bytes a weight (plus 2 for each
    moment that is then float32), and small updates are not rounded away. `auto`: wherever bfloat16 weights
    are trained. false: pure bfloat16, in which usual learning rates lose most updates to rounding; the
    plan shows their share."""

    copies: Literal["auto", "float32", "split", "stochastic"] = "auto"
    """Storage of the float32 master copies of bfloat16 weights between steps. `float32`: whole copies, 4
    bytes a weight. `split`: only the bits that the bfloat16 weight lacks, 2 bytes; the same numbers, a
    little slower. `stochastic`: none; weights are rounded up or down at random, unbiased on average.
    `auto`: whole copies, or what memory.allow names."""

    compressed_moments: bool = False
    """Keep AdamW's moments in 8 bits between steps: 2.25 bytes a weight instead of 8, slightly rounded."""

    in_backward: Literal["auto", "on", "off"] = "auto"
    """Update each weight in the backward pass as soon as its gradient is ready, then free the gradient, so
    that gradients are never all in memory. Exact with one micro-batch a step, one process and
    max_grad_norm: null; refused otherwise. A step that runs out of memory cannot be repeated. `auto`:
    where nothing else fits."""

    neftune_alpha: Annotated[float, Field(gt=0)] | None = None
    """Noise on the embeddings in training (arXiv:2310.05914); 5 is usual."""

    @model_validator(mode="after")
    def _one_warmup(self) -> Optim:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                "the warm-up is set twice; set optim.warmup_steps or optim.warmup_ratio, not both"
            )
        return self
