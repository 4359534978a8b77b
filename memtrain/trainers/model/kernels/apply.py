"""Modules of a transformers model that compute in few kernels from now on, where their code is known.

A module is known by its code, not by its name: `memory/model_shape/families.py` names the families, and a
version of transformers that computes otherwise is refused before the first step.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import MethodType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.model.kernels.gated_product import mlp_forward
from memtrain.trainers.model.kernels.own_names import with_names
from memtrain.trainers.model.kernels.rms_norm import norm_forward
from memtrain.trainers.model.kernels.rotary import rotate

ROTARY = "apply_rotary_pos_emb"
NORM = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
MLP = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""
TURN = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
HALF_TURN = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""


def apply_kernels(model: PreTrainedModel, settings: Settings) -> None:
    """Let norms, rotary positions and gated products of `model` compute in few kernels, in place.

    Nothing is done unless `settings.kernels` is `fused`. Call it before adapters and checkpointing.

    Raises: LaunchError where this version of transformers has other code for one of them.
    """
    if settings.kernels != "fused":
        return
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            _replace(module, norm_forward, _is_code(type(module).forward, NORM))
        elif name.endswith("MLP"):
            is_known = _is_code(type(module).forward, MLP) and _is_silu(module)
            _replace(module, mlp_forward, is_known)
        elif name.endswith("Attention"):
            code: Any = type(module).forward
            _replace(module, with_names(code, {ROTARY: rotate}), _calls_rotary(type(module)))


def _replace(module: Any, forward: Callable[..., Any], is_known: bool) -> None:
    if not is_known:
        raise LaunchError(
            f"the code of {type(module).__name__} in transformers {transformers.__version__} differs from "
            "the code that the fused kernels replace",
            "model.kernels",
            "set model.kernels: transformers",
        )
    module.forward = MethodType(forward, module)


def _is_silu(module: Any) -> bool:
    return isinstance(module.act_fn, nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"


def _calls_rotary(kind: type) -> bool:
    """Whether this attention turns its queries and keys by the function that `rotate` stands for."""
    code: Any = inspect.unwrap(kind.forward)  # pyright: ignore[reportAttributeAccessIssue]
    family: Any = sys.modules[kind.__module__]
    is_called = ROTARY in code.__code__.co_names and code.__closure__ is None
    return (
        is_called and _is_code(family.apply_rotary_pos_emb, TURN) and _is_code(family.rotate_half, HALF_TURN)
    )


def _is_code(function: Any, known: str) -> bool:
    """Whether a function's statements are these, whatever its comments, types and line breaks."""
    return _statements(inspect.getsource(inspect.unwrap(function))) == _statements(known)


def _statements(source: str) -> list[str]:
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef), "A function was given."
    is_told = ast.get_docstring(function) is not None
    return [ast.dump(one) for one in function.body[is_told:]]
