"""Two forward passes of the training module while sampling: prompts end to end, then one token a row.

Both are one flattened row to the model, whose attention asks the `Pass` that travels as the keyword argument
`rollout`. No cache object of transformers is involved, nor a mask.
"""

# T tokens of the row, H query heads, K key heads, D head width.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import NAMES
from memtrain.trainers.model.attention.functions import UNSUPPORTED, is_tempered, tempered
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout
from memtrain.trainers.model.offload.weights import compute_device
from memtrain.trainers.model.streamed.layer_keys import SliceLayout
from memtrain.trainers.online.generation.kv_cache import KVCache, RowPositions, attend

NAME = "memtrain_rollout"
"""The name that transformers knows this attention by."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Subject of a forward pass: prompts that are read (`layout`), or rows that are written (`at`)."""

    keys: KVCache
    backend: AttentionBackend
    layout: Layout | SliceLayout | None = None
    first_group: int = 0
    """Slot of the first prompt."""
    bounds: tuple[int, ...] = ()
    """Of the prompts in their row."""
    at: RowPositions | None = None

    @property
    def row(self) -> Layout | None:
        """The layout of the prompts, where streamed layers may cut it."""
        return self.layout if isinstance(self.layout, Layout) else None

    def of_slice(self, layout: SliceLayout) -> Pass:
        """The same for one slice of the prompts."""
        return replace(self, layout=layout)


def register() -> None:
    """Make the attention known to transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def read_prompts(
    model: nn.Module,
    prompts: list[tuple[int, ...]],
    keys: KVCache,
    first_group: int,
    backend: AttentionBackend,
) -> Tensor:
    """Logits [prompts, V] of the token after each prompt; their keys are kept in slots from `first_group`."""
    device = compute_device(model)
    keys.begin_pass()
    layout = packed_layout([len(prompt) for prompt in prompts], device)
    ids_T = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    last = torch.tensor(layout.within.query_bounds[1:], device=device) - 1
    return model(
        input_ids=ids_T[None],
        position_ids=layout.position_ids,
        use_cache=False,
        logits_to_keep=last,
        rollout=Pass(keys, backend, layout, first_group, layout.within.query_bounds),
    ).logits[0]


def write_tokens(
    model: nn.Module, ids_R: Tensor, keys: KVCache, at: RowPositions, backend: AttentionBackend
) -> Tensor:
    """Logits [R, V] of the token after `ids_R`, the newest token of each row."""
    keys.begin_pass()
    at.look()
    return model(
        input_ids=ids_R[None],
        position_ids=places_of(at)[None],
        use_cache=False,
        rollout=Pass(keys, backend, at=at),
    ).logits[0]


def places_of(at: RowPositions) -> Tensor:
    """int64 [R], the place of each row's newest token in its prompt with its completion."""
    return at.prompt_G[at.group_R] + at.written_R


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    rollout: Pass | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' form: query [1, H, T, D] to output [1, T, H, D]; no attention weights."""
    assert rollout is not None, "The model must pass `rollout` on to its attention."
    begin = rollout.layout.part.begin if isinstance(rollout.layout, SliceLayout) else 0
    # Slices of a streamed layer are one turn.
    turn = rollout.keys.turn - 1 if begin else rollout.keys.next_turn()
    if not begin:
        _note_window(rollout.keys, others.get("sliding_window"))
    if rollout.layout is not None:
        bounds = list(rollout.bounds)
        rollout.keys.put_prompts(turn, key[0], value[0], bounds, rollout.first_group, begin)
        read = _function_of(rollout.backend)
        return read(
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            layout=rollout.layout,
            **others | {"dropout": 0.0},
        )
    at = rollout.at
    assert at is not None, "A pass reads prompts or writes tokens."
    _check(module, at, others)
    if is_tempered(module):
        query = tempered(module, query, places_of(at))
    key_RKD, value_RKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    own = rollout.keys.write(turn, key_RKD, value_RKD, at)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    prompts = rollout.keys.prompts[turn]
    return attend(query[0].transpose(0, 1), own, prompts, at, scale)[None], None


def _note_window(keys: KVCache, window: int | None) -> None:
    if window is not None and (keys.window is None or window < keys.window):
        keys.window = window


def _function_of(backend: AttentionBackend) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[NAMES[backend]]


def _check(module: nn.Module, at: RowPositions, others: dict[str, Any]) -> None:
    """Raise LaunchError for options that this attention would silently ignore."""
    found = next((meaning for key, meaning in UNSUPPORTED.items() if others.get(key) is not None), None)
    window = others.get("sliding_window")
    if window is not None and window < at.longest_prompt + at.longest_written + 1:
        found = f"a sliding window of {window:,} tokens"
    if found:
        raise LaunchError(
            f"{type(module).__name__} has {found}, which the native sampler does not compute",
            "generate.backend",
            "set generate.backend: transformers, or keep prompt and completion within the window",
        )
