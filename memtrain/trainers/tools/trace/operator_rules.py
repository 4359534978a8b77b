"""Answers for operators that need numbers where tensors have none, and other facts for a fake run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from memtrain.memory.hardware.flash_kernels import Call, flash_bytes, hopper_bytes
from memtrain.trainers.losses.head.tiles import (
    LogitRule,
    ScoreOptions,
    TileScores,
    empty_scores,
    is_fused,
    logit_spans,
)
from memtrain.trainers.tools.trace.fake_host import HOST
from memtrain.trainers.tools.trace.row_slices import standing_slices

aten = torch.ops.aten
_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)


def _scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Yes for a question, one for a number: a loss that is finite, a mask that allows."""
    try:
        return func(*args, **kwargs)
    except _UNKNOWN:
        tensor: Tensor = args[0]
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        return func(*args, **kwargs)
    except _UNKNOWN:
        return True


def _nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Largest result: all elements are kept, the most memory that can be asked for."""
    tensor: Tensor = args[0]
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.long, device=_device(tensor))


def _masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor: Tensor = args[0]
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=_device(tensor))


def _device(tensor: Tensor) -> torch.device:
    return getattr(tensor, "fake_device", tensor.device)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of an operation in place, which allocates nothing: the tensor comes back as it is, and time is
    saved."""
    return kwargs["out"] if "out" in kwargs else args[0]


def _index_add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of picked rows are added into zeros in place; under a dispatch mode autograd takes the form
    that makes another tensor.

    Source: torch 2.13, torch/csrc/autograd/FunctionsManual.cpp, index_select_backward_symint.
    """
    node = torch._C._current_autograd_node()
    is_of_picked = node is not None and node.name() == "IndexSelectBackward0"
    return args[0] if is_of_picked else func(*args, **kwargs)


def _grouped_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Product of each expert's rows, or the gradient of each one's matrix; kernels of a CPU take float32, the
    function that answers without data refuses it.

    Source: torch 2.13, _meta_registrations.py, `_meta_grouped_mm_common`.
    """
    left, right = args[0], args[1]
    if left.dtype == torch.bfloat16:
        return func(*args, **kwargs)
    ends_E = args[2] if len(args) > 2 else kwargs["offs"]
    rows = (left.shape[0], right.shape[-1])
    shape = rows if right.dim() == 3 else (ends_E.shape[0], *rows)
    return torch.empty(shape, dtype=left.dtype, device=_device(left))


ALONE = 4
"""References to a tensor that its operator and a mode see, where the engine of autograd holds it alone."""


def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Sum of two gradients of one tensor, in the place of the first as autograd's engine makes it.

    The engine adds in place where nothing else holds the first or its storage, as what a view is of does (of
    products of rows in three dimensions); under a mode that sees its operators it never does. In half
    precision torch's own allocator counted a third tensor, on a CPU. Source: torch 2.13,
    torch/csrc/autograd/input_buffer.cpp, `can_accumulate_inplace`.
    """
    first, second = args[0], args[1]
    is_alike = isinstance(second, Tensor) and first.shape == second.shape
    is_alike = is_alike and first.dtype == second.dtype == torch.float32
    is_held = first._is_view() or first._use_count() > ALONE
    if is_alike and not kwargs and _calls_engine() and not is_held:
        return first
    return func(*args, **kwargs)


def _calls_engine() -> bool:
    """Whether an operator was called by autograd's engine itself, and not by a function's backward pass."""
    if torch.is_grad_enabled() or torch._C._current_autograd_node() is None:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in _BETWEEN):
            return frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return False


_BETWEEN = (
    "trace/operator_rules.py",
    "memory_meter/live_tensors.py",
    "torch/_subclasses",
    "torch/utils",
    "torch/_compile.py",
    "torch/_dynamo",
    "torch/_ops.py",
)
"""Files of modes that see an operator on its way."""

_MATH_IN_PLACE = (
    "add_ sub_ mul_ div_ exp_ log_ neg_ sqrt_ rsqrt_ tanh_ square_ pow_ clamp_ lerp_ addmm_ addcmul_ "
    "addcdiv_ copy_ fill_ zero_ masked_fill_ scatter_add_ index_add_"
)
_INTO = ("out", "dtype_out")
_PRODUCTS_INTO = ("mm", "addmm", "bmm")


def _rules_in_place() -> dict[Any, Callable[..., Any]]:
    rules: dict[Any, Callable[..., Any]] = {}
    for name in _MATH_IN_PLACE.split():
        packet = getattr(aten, name)
        rules |= {getattr(packet, overload): _in_place for overload in packet.overloads()}
    for name in _PRODUCTS_INTO:
        packet = getattr(aten, name)
        rules |= {getattr(packet, one): _in_place for one in packet.overloads() if one in _INTO}
    return rules


RULES: dict[Any, Callable[..., Any]] = {
    **_rules_in_place(),
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten._grouped_mm.default: _grouped_mm,
    aten.index_add.default: _index_add,
    aten.add.Tensor: _added,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
}
"""Replacements of these operators in a Recorder."""


def _call(args: tuple[Any, ...]) -> Call:
    """Shape of a call of torch's own backward kernel, which stands for the others in a trace."""
    query_THD, key_TKD, cu_query, longest, is_causal = args[1], args[2], args[6], args[8], args[11]
    tokens, heads, head_dim = query_THD.shape
    return Call(
        tokens=tokens,
        keys=key_TKD.shape[0],
        segments=cu_query.numel() - 1,
        longest=longest,
        heads=heads,
        key_heads=key_TKD.shape[1],
        head_dim=head_dim,
        itemsize=key_TKD.itemsize,
        is_causal=is_causal,
    )


def kernel_scratch(attention: str) -> dict[Any, Callable[..., int]]:
    """Scratch of kernels in bytes under an attention back end, where no operator returns it."""
    of_call = hopper_bytes if attention == "flash3" else flash_bytes
    return {aten._flash_attention_backward.default: lambda args, kwargs, out: of_call(_call(args))}


@contextmanager
def with_operator_rules(device_kind: str, *, skips_tiles: bool = True) -> Iterator[None]:
    """Code takes the branches it takes in a real run on `device_kind` (`cpu` or `cuda`).

    transformers sees no tracing in fake tensors (it would build masks that a run never builds), and the
    head's products go by the kernel that CUDA has: it widens nothing and allocates nothing.

    skips_tiles: a tiled loss goes through the tiles at its ends and leaves out those between, and a layer
        does so with the slices of a row: the same peak, and a fraction of the operators.
    """
    from transformers import masking_utils

    from memtrain.trainers.losses.head import linear, tiles
    from memtrain.trainers.model.experts import grouped
    from memtrain.trainers.model.kernels import rms_norm
    from memtrain.trainers.model.quantized import nf4
    from memtrain.trainers.model.streamed import apply
    from memtrain.trainers.optim import offload as optim_offload

    undo = [
        _replaced(masking_utils, "is_tracing", lambda tensor=None: False),
        _replaced(grouped, "ends_on_host", _even_ends),
    ]
    if skips_tiles:
        undo += [_replaced(module, "spans", logit_spans) for module in (linear, tiles)]
        undo.append(_replaced(apply, "slices_of", standing_slices))
    if device_kind == "cuda":
        undo.append(_replaced(tiles, "sums_half_in_fp32", lambda device, dtype: True))
        undo.append(_replaced(tiles, "_multiply_", _kernel_without_temporaries))
        undo.append(_replaced(linear, "is_fused", _is_fused_on_cuda))
        undo.append(_replaced(linear, "fused_gradient_", _gradient_in_place))
        undo.append(_replaced(linear, "fused_scores", _scores_without_temporaries))
        undo.append(_replaced(optim_offload, "HOST", HOST))
        undo.append(_replaced(rms_norm, "normalized", _one_norm_kernel))
        undo.append(_replaced(rms_norm, "norm_gradients", _norm_kernels))
        undo.append(_replaced(nf4, "has_kernels", lambda tensor: True))
        undo.append(_replaced(nf4, "unpacked_by_kernel", _unpacked_without_temporaries))
        # Weights are packed before anything is counted.
        undo.append(_replaced(nf4, "_packed_by_kernel", nf4.packed))
        undo.append(_replaced(torch.nn.functional, "dropout", _fused_dropout))
        undo.append(_replaced(torch.nn.functional, "scaled_dot_product_attention", _drops_inside))
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _even_ends(ends_E: Tensor, num_rows: int) -> list[int]:
    """Ends of equal parts: which expert gets how many tokens is not known."""
    count = len(ends_E)
    return [(expert + 1) * num_rows // count for expert in range(count)]


def _unpacked_without_temporaries(codes: Tensor, absmax: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=codes.device)


def _kernel_without_temporaries(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    out.add_(1.0)


def _is_fused_on_cuda(rule: LogitRule, wide: torch.dtype, device: torch.device) -> bool:
    return is_fused(rule, wide, torch.device("cuda"))


def _scores_without_temporaries(tile_TV: Tensor, targets_T: Tensor, options: ScoreOptions) -> TileScores:
    return empty_scores(len(tile_TV), options, tile_TV.dtype, tile_TV.device)


def _gradient_in_place(tile_TK: Tensor, *given: Any, narrow: torch.dtype | None = None) -> Tensor:
    tile_TK.mul_(1.0)
    return tile_TK if narrow is None else tile_TK.view(narrow)[:, : tile_TK.shape[1]]


def _one_norm_kernel(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """aten._fused_rms_norm on CUDA: the output, and a number a token."""
    return x * 1.0, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


def _norm_kernels(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """aten._fused_rms_norm_backward on CUDA: a kernel for the input, two for the weight (sums of blocks, and
    theirs, which are small).

    Source: torch 2.13, aten/src/ATen/native/cuda/layer_norm_kernel.cu, LayerNormBackwardKernelImplInternal.
    """
    return x * 1.0 if needs[0] else None, (weight * 1.0).mul_(1.0) if needs[1] else None


def _fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA's kernel keeps a mask of bytes; a CPU keeps one of numbers."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


_sdpa = torch.nn.functional.scaled_dot_product_attention


def _drops_inside(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """CUDA's fused attention drops scores as it makes them, and keeps a seed; a CPU's takes none to drop.

    Source: torch 2.13, native/transformers/cuda/sdp_utils.cpp: neither kernel's list of constraints has
    dropout.
    """
    return _sdpa(*args, **kwargs)


def _replaced(module: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)
