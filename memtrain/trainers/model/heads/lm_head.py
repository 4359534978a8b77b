"""Scoring tokens with a causal LM: backbone, scored positions, and the loss inside the LM head's call."""

# B rows, T tokens of a row, D hidden size, N scored tokens, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, masking_utils

from memtrain.errors import LaunchError
from memtrain.trainers.losses.head.linear import Pairs
from memtrain.trainers.losses.head.request import HeadForm, LogprobRequest, Request
from memtrain.trainers.losses.head.tiles import TILE_BYTES
from memtrain.trainers.model.attention.functions import NAMES
from memtrain.trainers.model.attention.row_layout import even_layout, packed_layout
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.heads.backbone import backbone_of, base_model, head_of
from memtrain.trainers.model.heads.captured_passes import CapturedPasses
from memtrain.trainers.model.heads.context_parallel_scoring import over_slices

if TYPE_CHECKING:
    from memtrain.trainers.model.experts.router_replay import RouterReplay


# Padded rows: under attention that takes one flattened row they are laid end to end, padding and all.


def hidden_states(
    model: PreTrainedModel, inputs: dict[str, Any], captured: CapturedPasses | None = None
) -> Tensor:
    """[B, T, D], or [1, B * T, D]: the backbone's last hidden states.

    captured: recordings, of which a training pass is replayed where it can be.
    """
    given, backbone = end_to_end(model, inputs), backbone_of(model)

    def run(inputs: dict[str, Any]) -> Tensor:
        with rows_alone():
            return backbone(**inputs, use_cache=False).last_hidden_state

    if captured is None or not captured.is_on or not torch.is_grad_enabled():
        return run(given)
    return captured.hidden(model, backbone, run, given)


@contextmanager
def rows_alone() -> Iterator[None]:
    """transformers is told inside that a row of its attention is one document, as every row of ours is.

    It would read the positions on the device to find out, and build a mask from them where the pass is
    captured.
    """
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _one_document
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _one_document(position_ids: Tensor) -> Any:
    return None


def end_to_end(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """A backbone's inputs [B, T] as one row [1, B * T] of B segments, where its attention needs a layout.

    As they are where there is a layout, or where the model attends by itself. Padding stands on the right,
    behind every token that is scored, so that a row needs no other mask.
    """
    if inputs.get("layout") is not None or model.config._attn_implementation not in NAMES.values():
        return inputs
    B, T = inputs["input_ids"].shape
    flat = {name: inputs[name].reshape(1, -1) for name in ("input_ids", "position_ids")}
    return inputs | flat | {"layout": even_layout(B, T, inputs["input_ids"].device)}


Inside = Callable[[Pairs, Tensor | None], Any]
"""Function inside a head's module call, on its summed products and its bias."""

_MULTIPLIES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDES = ("logits_scaling",)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_MULTIPLIES_DESPITE_ITS_NAME = ("hyperclovax", "hyperclovax_vision_v2")


class Scorer(nn.Module):
    """A causal LM (plain, or wrapped by PEFT) that answers requests about some of its positions.

    Wrap it for distribution as a whole: every parameter is used inside its forward. The loss runs inside
    the head's own module call, and inside those of its parts, so that FSDP2's and ZeRO-3's hooks have
    gathered whatever it reads. PEFT adapters are honoured as they are at the call (switched on or off).
    FSDP2's mixed precision must leave the answer in fp32: `output_dtype` None or fp32 (accelerate's own
    default is the dtype of the parameters).
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        is_chunked: bool = True,
        is_liger: bool = False,
        tile_bytes: int = TILE_BYTES,
        kernel: str = "torch",
    ) -> None:
        super().__init__()
        self.model = model
        base = base_model(model)
        self.form = head_form(base.config)._replace(
            is_chunked=is_chunked, is_liger=is_liger, tile_bytes=tile_bytes, kernel=kernel
        )
        open_head(head_of(base), type(base).__name__)
        self.context: ContextRanks | None = None
        """The ranks that hold each row together with this one; None: this rank holds whole rows."""
        self.replay: RouterReplay | None = None
        """Routers that can be told their choices; None where nothing records any."""
        self.captured: CapturedPasses | None = None
        """Recordings of training passes; None where each is computed operator by operator."""

    def forward(self, inputs: dict[str, Any], scored_index_N: Tensor, request: Request) -> Any:
        """The answer to `request` about rows `scored_index_N` of the flattened hidden states [B * T, D].

        `inputs` are the backbone's: `input_ids`, `position_ids`, `layout` for a flattened row. Padding
        stands on the right and needs no attention mask; `use_cache` is switched off here.
        """
        if self.context is None:
            return self.answered(self.hidden(inputs, scored_index_N), request)
        return over_slices(
            self.context,
            inputs,
            scored_index_N,
            lambda own, rows_n, which_n: self.answered(self.hidden(own, rows_n), request.about(which_n)),
        )

    def hidden(self, inputs: dict[str, Any], index_N: Tensor) -> Tensor:
        """Rows `index_N` of the flattened hidden states [N, D]."""
        hidden_BTD = hidden_states(base_model(self.model), inputs, self.captured)
        return hidden_BTD.flatten(0, 1).index_select(0, index_N)

    def answered(self, hidden_ND: Tensor, request: Request) -> Any:
        """The answer to `request` about hidden states."""
        head = head_of(base_model(self.model))
        answer = head(hidden_ND, inside=lambda pairs, bias: request.answer(pairs, bias, self.form))
        assert answer[0].dtype.itemsize >= 4, (
            "mixed precision rounded the loss: its output_dtype must be fp32"
        )
        return answer


def head_form(config: PretrainedConfig) -> HeadForm:
    """Changes of the logits by the model, by the names transformers gives them in `config`."""
    known = config.get_text_config().to_dict()
    scale = 1.0
    for name in _MULTIPLIES:
        scale *= known.get(name) or 1.0
    for name in _DIVIDES:
        factor = known.get(name) or 1.0
        scale *= factor if known.get("model_type") in _MULTIPLIES_DESPITE_ITS_NAME else 1.0 / factor
    caps = [cap for name in _CAPS if (cap := known.get(name))]
    return HeadForm(softcap=caps[0] if caps else None, scale=scale)


def open_head(head: nn.Module, owner: str) -> None:
    """Let `head(hidden, inside=f)` return f(pairs, bias) from inside the call; `head(hidden)` is as before.

    Raises LaunchError for heads that are not a sum of matrix products: DoRA, quantized or exotic layers.
    """
    if "_plain_forward" in vars(head):
        return
    if isinstance(head, ModulesToSaveWrapper):
        open_head(head.original_module, owner)
        for copy in head.modules_to_save.values():
            open_head(copy, owner)
        return
    if isinstance(head, LoraLayer):
        _refuse_variants(head, owner)
        open_head(head.get_base_layer(), owner)
        for up in head.lora_B.values():
            open_head(up, owner)
        _replace_forward(head, _lora_forward)
        return
    weight = getattr(head, "weight", None)
    if not isinstance(head, nn.Linear) or weight is None or not weight.dtype.is_floating_point:
        raise LaunchError(
            f"the LM head of {owner} is a {type(head).__name__}, not a matrix product in floating point",
            where="model.path",
            fix="use a model whose LM head is not quantized, and put no adapter but LoRA on it",
        )
    _replace_forward(head, _linear_forward)


def verify_head(scorer: Scorer) -> None:
    """Compare the scorer's log-probs with the model's own logits on one short random row.

    Run before the model is wrapped for distribution. Raises LaunchError when they differ by more than
    rounding: then the model does something to its logits that `head_form` does not know.
    """
    base = base_model(scorer.model)
    weight = next(base.get_input_embeddings().parameters())
    generator = torch.Generator().manual_seed(0)
    device = run_device(base)
    num_ids = min(weight.shape[0], base.config.get_text_config().vocab_size)
    ids_BT = torch.randint(0, num_ids, (1, 12), generator=generator).to(device)
    inputs: dict[str, Any] = {"input_ids": ids_BT}
    if base.config._attn_implementation in NAMES.values():
        layout = packed_layout([ids_BT.shape[1]]).to(device)
        inputs |= {"position_ids": layout.position_ids, "layout": layout}
    was_training = scorer.training
    scorer.eval()
    try:
        with torch.no_grad():
            index_N = torch.arange(ids_BT.shape[1] - 1, device=device)
            _check_reads_hidden(base, scorer.hidden(inputs, index_N))
            logp_N = scorer(inputs, index_N, LogprobRequest(ids_BT[0, 1:])).logp_N
            logits_NV = scorer.model(**inputs, use_cache=False).logits[0, :-1]
            plain_N = logits_NV.float().log_softmax(-1).gather(1, ids_BT[0, 1:, None])[:, 0]
    finally:
        scorer.train(was_training)
    worst = (logp_N.float() - plain_N).abs().max().item()
    # The model rounds its logits to their dtype before the softmax; tiles are not rounded.
    allowed = 1e-4 + 4 * torch.finfo(logits_NV.dtype).eps * max(1.0, logits_NV.abs().max().item())
    if not worst <= allowed:
        raise LaunchError(
            f"log-probs of {type(base).__name__} from its hidden states differ from those of its own logits "
            f"by {worst:.3g} (allowed {allowed:.3g})",
            where=str(base.config.name_or_path or base.config.model_type),
            fix="the model changes its logits in a way that memtrain does not know; please report it",
        )


def _check_reads_hidden(base: PreTrainedModel, hidden_ND: Tensor) -> None:
    """Raise LaunchError where a head reads something wider or narrower than the hidden states."""
    weight = cast(Tensor, next(head_of(base).parameters()))
    if weight.shape[-1] != hidden_ND.shape[-1]:
        raise LaunchError(
            f"the LM head of {type(base).__name__} reads vectors of {weight.shape[-1]}, and hidden states "
            f"have {hidden_ND.shape[-1]}: the model has a part between them",
            str(base.config.name_or_path or base.config.model_type),
            "use a decoder whose head reads its hidden states, such as Qwen/Qwen3-0.6B",
        )


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    vars(module)["_plain_forward"] = module.forward
    vars(module)["forward"] = MethodType(forward, module)


def _linear_forward(self: nn.Linear, hidden: Tensor, *args: Any, inside: Inside | None = None, **kwargs: Any):
    if inside is None:
        return cast(Any, self)._plain_forward(hidden, *args, **kwargs)
    return inside([(hidden, self.weight)], self.bias)


def _lora_forward(self: Any, hidden: Tensor, *args: Any, inside: Inside | None = None, **kwargs: Any):
    """PEFT's LoRA layer as more pairs: the base, then (scaling * A(dropout(hidden)), B) of each adapter."""
    if inside is None:
        return self._plain_forward(hidden, *args, **kwargs)
    if self.disable_adapters and self.merged:
        self.unmerge()
    is_plain = self.disable_adapters or self.merged
    names = [] if is_plain else [name for name in self.active_adapters if name in self.lora_A]

    def with_base(pairs: Pairs, bias: Tensor | None) -> Any:
        return _with_adapters(self, names, hidden, inside, pairs, bias)

    return self.base_layer(hidden, inside=with_base)


def _with_adapters(
    layer: Any, names: list[str], hidden: Tensor, inside: Inside, pairs: Pairs, bias: Tensor | None
) -> Any:
    """Answer of `inside` to `pairs` and those of the adapters of these names."""
    if not names:
        return inside(pairs, bias)
    name, *rest = names
    down = layer.lora_A[name]
    low_NR = down(layer.lora_dropout[name](hidden.to(down.weight.dtype)))

    # Nested calls, so that every weight is still gathered when the loss reads it.
    def with_up(up_pairs: Pairs, up_bias: Tensor | None) -> Any:
        scaled = [(low * layer.scaling[name], up) for low, up in up_pairs]
        added = _sum_bias(bias, up_bias, layer.scaling[name])
        return _with_adapters(layer, rest, hidden, inside, [*pairs, *scaled], added)

    return layer.lora_B[name](low_NR, inside=with_up)


def _sum_bias(bias: Tensor | None, up_bias: Tensor | None, scaling: float) -> Tensor | None:
    if up_bias is None:
        return bias
    return up_bias * scaling if bias is None else bias + up_bias * scaling


def _refuse_variants(layer: LoraLayer, owner: str) -> None:
    if layer.lora_variant:
        kinds = ", ".join(sorted({type(v).__name__ for v in layer.lora_variant.values()}))
        raise LaunchError(
            f"the adapter on the LM head of {owner} is not plain LoRA: {kinds}",
            where="model.adapter.target_modules",
            fix="leave lm_head out of them, or train it in full (modules_to_save)",
        )
