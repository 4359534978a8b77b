"""Sections of the methods: their knobs, with the values of their papers as defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from memtrain.recipes.sections.base import Fraction, Section


class Sft(Section):
    """Supervised fine-tuning: cross-entropy on the loss tokens."""

    loss: Literal["nll", "dft"] = "nll"
    """`nll`: cross-entropy. `dft`: each token weighted by its own probability (arXiv:2508.05629)."""

    label_smoothing: Fraction = 0.0
    """Share of the target that is spread over the vocabulary."""

    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log(Z)^2, which keeps logits small (arXiv:2204.02311, section 5)."""

    @model_validator(mode="after")
    def _dft_stands_alone(self) -> Sft:
        if self.loss == "dft" and (self.label_smoothing or self.z_loss):
            named = "label_smoothing" if self.label_smoothing else "z_loss"
            raise ValueError(f"sft.{named} has no effect with loss dft; remove it, or set sft.loss to nll")
        return self
