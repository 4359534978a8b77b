"""The FlashAttention-3 back end: the Hopper kernels that the package `flash_attn_3` registers with torch."""

# T: tokens, H: query heads, K: key heads, D: head width.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Part
from memtrain.trainers.model.attention.two_part import attend_by


class HopperFlash:
    """A varlen kernel call for each part.

    The operators are called by the names of their arguments: the package's Python functions have changed
    theirs, the operators have not (hopper/flash_api.cpp since 847025a0 of June 2025;
    torch/nn/attention/_fa3.py calls them too). The backward pass writes into the gradients that it is given;
    its outputs are scratch.

    Source: Shah et al. 2024, arXiv:2407.08608.
    """

    softcap = 0.0
    """Cap of the scores; 0: none."""

    @classmethod
    def forward(
        cls, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`. One split of the keys, whose sums have one order."""
        out_THD, lse_HT, *_ = _operators().fwd(
            q=_in_rows(query_THD),
            k=_in_rows(key_TKD),
            v=_in_rows(value_TKD),
            cu_seqlens_q=part.cu_query,
            cu_seqlens_k=part.cu_key,
            max_seqlen_q=part.max_query,
            max_seqlen_k=part.max_key,
            softmax_scale=scale,
            is_causal=part.is_causal,
            softcap=cls.softcap,
            num_splits=1,
        )
        return out_THD, lse_HT

    @classmethod
    def backward(
        cls,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `two_part.Kernel`."""
        query_THD, key_TKD, value_TKD = _in_rows(query_THD), _in_rows(key_TKD), _in_rows(value_TKD)
        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        _operators().bwd(
            dout=_in_rows(grad_THD),
            q=query_THD,
            k=key_TKD,
            v=value_TKD,
            out=_in_rows(out_THD),
            softmax_lse=lse_HT,
            dq=dq_THD,
            dk=dk_TKD,
            dv=dv_TKD,
            cu_seqlens_q=part.cu_query,
            cu_seqlens_k=part.cu_key,
            max_seqlen_q=part.max_query,
            max_seqlen_k=part.max_key,
            softmax_scale=scale,
            is_causal=part.is_causal,
            softcap=cls.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq_THD, dk_TKD, dv_TKD


def _operators() -> Any:
    """The operators, registered by the import of the package."""
    import flash_attn_interface  # pyright: ignore[reportMissingImports]  # noqa: F401

    return torch.ops.flash_attn_3


def _in_rows(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a head side by side, as the kernels want them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


attend = attend_by(HopperFlash)
