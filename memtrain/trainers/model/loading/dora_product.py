"""DoRA's product B A, of which it takes norms, made without an identity matrix as wide as the map's input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

_plain: Any = vars(DoraLinearLayer).get("get_lora_weight")
"""PEFT's own; 0.18 has none, and keeps its identity."""


def multiply_without_identity() -> None:
    """Let PEFT's DoRA multiply B by A itself; for the rest of the process.

    PEFT 0.21 sends an identity of I x I float32 numbers through A and B, 784 MiB at the last map of an 8B
    model's MLP, and keeps it until the map is computed: FSDP gathers an adapter's weights as its modules are
    called. FSDP2 has gathered the whole layer by then; under ZeRO-3 the product is PEFT's. Nothing learns
    from it: the norms are constants (arXiv:2402.09353, section 4.3).
    """
    DoraLinearLayer.get_lora_weight = _product


@torch.no_grad()
def _product(self: Any, lora_A: nn.Linear, lora_B: nn.Linear, adapter_name: str | None = None) -> Tensor:  # noqa: N803
    """[O, I]: B A, to the bit what PEFT makes of the identity."""
    if hasattr(lora_A.weight, "ds_id"):
        made: Tensor = _plain(self, lora_A, lora_B, adapter_name=adapter_name)
        return made
    # In the layout in which A comes out of the identity, so that the same kernel multiplies.
    return F.linear(lora_A.weight.t().contiguous(), lora_B.weight).t()
