"""The start-up check on the real model: no row sees another, and each computes as it does alone."""

# T: tokens of a row, D: hidden width.

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.length_rules import length_rules, probe_lengths, reached
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import NAMES, attention_switched
from memtrain.trainers.model.attention.functions import FIX, own_implementation
from memtrain.trainers.model.attention.own_positions import upstream_positions
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.heads.backbone import backbone_of, base_model
from memtrain.trainers.model.heads.context_parallel_scoring import sliced

LENGTHS = (13, 9)
"""Tokens of the two rows, or of a prompt and of each of its two completions: short, and not alike."""

SEEN = {torch.float32: 1e-6, torch.float16: 2e-4, torch.bfloat16: 2e-3}
"""Largest movement of a row's hidden states when another row changes, over the largest one. Exactly 0 for a
plain model in any dtype (same shapes, same kernels); the room is half a rounding step of the largest."""

SEEN_REGROUPED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The same for experts and quantized weights, whose sums are grouped with other tokens."""

ALONE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Largest distance of a row from itself alone under the model's own attention, over the largest hidden state:
the rounding of two kernels, TF32 among them. Chosen, with room for depth and for GPUs; tiny random models of
16 families stay under 8e-7 in fp32 and 2.5e-2 in bf16 (measured: CPU)."""

ALONE_ON_CPU = 2e-4
"""The same in float32 on a CPU, which has no TF32. Chosen: LongRoPE and dynamic NTK that follow a neighbour
move tiny random models by 6e-4 and more, kernels by 3e-7 (measured: CPU)."""

LONGEST_EAGER = 1024
"""Tokens up to which a row alone is computed by transformers' eager form, the furthest from our kernels;
above, its scores of row length squared would not fit."""

ALONE_REGROUPED = {torch.float32: 2e-3, torch.float16: 2e-1, torch.bfloat16: 2e-1}
"""The same where rounding may send a token to another expert."""

REGROUPING = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "quantization_config",
)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Measurements of the check, each over the largest hidden state.

    seen: how far one row moves when the other row's tokens change. alone: how far a row is from itself alone.
    For a packed row, and for a shared prompt (None where it was not asked for).
    """

    packed_seen: float
    packed_alone: float
    shared_seen: float | None
    shared_alone: float | None


def verify_isolation(
    model: nn.Module,
    backend: AttentionBackend,
    *,
    shared_prompts: bool = True,
    longest: int | None = 0,
    together: int | None = 0,
) -> Isolation:
    """Run `model` (plain or PEFT) on two rows of random tokens, together and alone, without gradients.

    On two short ones, and at every length where the configuration says that something changes
    (`memory.length_rules`) and that rows of the run come to: `longest` tokens of a row, `together` of rows
    that lie end to end; None is without bound. A window is guarded in every call instead.

    The model, its training flags, its attention and the random state are left as they were. Call it before
    the model is wrapped for distribution.

    Raises:
        LaunchError: the rows see each other, or differ from themselves alone; it names the model's class.
    """
    base = base_model(model)
    _check_takes_layout(base)
    rules = length_rules(base.config.to_dict())
    pairs = [LENGTHS, *probe_lengths(rules, longest, together)]
    # What a prompt computes follows the length of each row that it is in: a plan then shares none.
    shares = [pair[0] for pair in pairs if reached(rules, pair[0] + LENGTHS[0], "row") is None]
    with undisturbed(base), torch.no_grad():
        packed = _worst(_measured(base, backend, pair, None) for pair in pairs)
        shared = (None, None)
        if shared_prompts and shares:
            shared = _worst(_measured(base, backend, LENGTHS, prompt) for prompt in shares)
    return Isolation(*packed, *shared)


def _worst(measured: Iterable[tuple[float, float]]) -> tuple[float, float]:
    seen, different = zip(*measured, strict=True)
    return max(seen), max(different)


def verify_causal(model: nn.Module) -> float:
    """Run `model` on a row, and on the same row with another end, under the attention that it has now.

    How far the end moves what stands before it, over the largest hidden state.

    Raises:
        LaunchError: it does, so that the loss would ask a token about what it has seen.
    """
    base = base_model(model)
    generator = torch.Generator().manual_seed(0)
    row, other = (draw(base, sum(LENGTHS), generator) for _ in range(2))
    other[: LENGTHS[0]] = row[: LENGTHS[0]]
    with undisturbed(base), torch.no_grad():
        hidden, beside_other = (_hidden(base, ids)[: LENGTHS[0]] for ids in (row, other))
    seen = _distance([beside_other], [hidden], hidden.abs().max().float())
    if not seen <= seen_bound(base, hidden):
        raise LaunchError(
            f"{type(base).__name__} is not causal: tokens attend to later tokens (off by {seen:.1e})",
            str(base.config.name_or_path or base.config.model_type),
            "choose a decoder; for an encoder that can be one, set is_decoder: true in its config.json",
        )
    return seen


def seen_bound(model: PreTrainedModel, hidden_TD: Tensor) -> float:
    """Largest allowed movement of a row's hidden states when another row changes, over the largest one."""
    return _bound(model, hidden_TD, SEEN_REGROUPED if _regroups(model) else SEEN)


def verify_slices(model: nn.Module, backend: AttentionBackend, ranks: ContextRanks) -> float:
    """Run `model` on two short documents, whole and in the slices of `ranks`, without gradients.

    The largest difference of the hidden states, over the largest of them; called by all ranks together.
    Whatever mixes tokens beside attention (a convolution, a count of the row's tokens) shows here.

    Raises:
        LaunchError: the slices are not the row; it names the model's class.
    """
    base = base_model(model)
    layout = packed_layout([3 * ranks.size + 1, 5 * ranks.size - 1]).to(run_device(base))
    ids_T = draw(base, layout.num_tokens, torch.Generator().manual_seed(0))
    whole = {"input_ids": ids_T[None], "position_ids": layout.position_ids, "layout": layout}
    own, own_layout = sliced(whole, ranks)
    with undisturbed(base), torch.no_grad(), attention_switched(base, NAMES[backend]):
        expected = _hidden(base, ids_T, layout)
        found = backbone_of(base)(**own, use_cache=False)[0][0]
    different = _distance([found], [expected[own_layout.index]], expected.abs().max().float())
    worst = ranks.gather(torch.tensor([different], device=ids_T.device)).max().item()
    bounds = ALONE_REGROUPED if _regroups(base) else ALONE
    if not worst <= _bound(base, found, bounds):
        raise LaunchError(
            f"{type(base).__name__}: a row in slices on {ranks.size} processes differs from the whole row "
            f"(off by {worst:.1e})",
            "cluster.context_parallel",
            "remove it for this model",
        )
    return worst


def draw(model: PreTrainedModel, length: int, generator: torch.Generator) -> Tensor:
    """int64 [length], ids that every vocabulary has."""
    vocabulary = min(128, model.config.get_text_config().vocab_size)
    return torch.randint(0, vocabulary, (length,), generator=generator).to(run_device(model))


def _measured(
    model: PreTrainedModel, backend: AttentionBackend, lengths: tuple[int, int], prompt_len: int | None
) -> tuple[float, float]:
    """`(seen, alone)` of `Isolation`, once both are within bounds.

    Of rows of `lengths`; or, of completions of such lengths, which share a prompt of `prompt_len` tokens.
    """
    device = run_device(model)
    is_packed = prompt_len is None
    kind = "a packed row" if is_packed else "a shared prompt"
    layout = packed_layout(lengths) if is_packed else shared_layout([(prompt_len, lengths)])
    layout = layout.to(device)
    generator = torch.Generator().manual_seed(0)

    def drawn(*wanted: int) -> list[Tensor]:
        return [draw(model, length, generator) for length in wanted]

    prompt = [] if prompt_len is None else drawn(prompt_len)
    rows, others = drawn(*lengths), drawn(*lengths)

    def together(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        try:
            hidden_TD = _hidden(model, torch.cat([*prompt, first, second]), layout)
        except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError) as error:
            # A class whose attention is of another kind trips over one that is not its own, each in its way.
            what = f"{type(model).__name__} does not run under {backend} attention ({error})"
            raise LaunchError(what, "model.attention", FIX) from error
        rows_TD = hidden_TD[layout.num_prompt_tokens :]
        return rows_TD[: lengths[0]], rows_TD[lengths[0] :]

    with attention_switched(model, NAMES[backend]):
        first, second = together(*rows)
        _, second_beside_other = together(others[0], rows[1])
        first_beside_other, _ = together(rows[0], others[1])
    with attention_switched(model, own_kernel(model, layout.longest_span)), upstream_positions(model):
        alone = [_hidden(model, torch.cat([*prompt, row]))[-len(row) :] for row in rows]

    largest = max(hidden_TD.abs().max() for hidden_TD in alone).float()
    seen = _distance([first_beside_other, second_beside_other], [first, second], largest)
    different = _distance([first, second], alone, largest)
    # A NaN is neither below nor above: `not <=` makes it a fault.
    if not seen <= seen_bound(model, first):
        fault = f"the rows of {kind} influence each other (hidden states change by {seen:.1e})"
    elif not different <= alone_bound(model, first):
        fault = f"{kind} differs from its rows computed alone (off by {different:.1e})"
    else:
        return seen, different
    of = lengths if is_packed else (prompt_len, *lengths)
    if of not in (LENGTHS, (LENGTHS[0], *LENGTHS)):
        fault += f", at lengths where its configuration changes something: {', '.join(map(str, of))} tokens"
    raise LaunchError(f"{type(model).__name__} under {backend} attention: {fault}", "model.attention", FIX)


def own_kernel(model: PreTrainedModel, num_tokens: int) -> str:
    """The model's own attention for a row alone: eager, or where its scores are too many, torch's SDPA."""
    return "eager" if num_tokens <= LONGEST_EAGER else own_implementation(model)


def alone_bound(model: PreTrainedModel, hidden_TD: Tensor) -> float:
    """Largest allowed distance of a row from itself alone, over the largest hidden state."""
    if hidden_TD.device.type == "cpu" and {hidden_TD.dtype, _embedding(model).dtype} == {torch.float32}:
        return ALONE_ON_CPU
    return _bound(model, hidden_TD, ALONE_REGROUPED if _regroups(model) else ALONE)


def _hidden(model: PreTrainedModel, ids_T: Tensor, layout: Layout | None = None) -> Tensor:
    """[T, D], the last hidden states; without a layout, of a row alone."""
    kwargs = {"position_ids": layout.position_ids, "layout": layout} if layout is not None else {}
    hidden_TD: Tensor = backbone_of(model)(input_ids=ids_T[None], use_cache=False, **kwargs)[0][0]
    if not hidden_TD.isfinite().all():
        raise _not_finite(model)
    return hidden_TD


def _not_finite(model: PreTrainedModel) -> LaunchError:
    """The error about hidden states that are no finite numbers: of weights that are none, or of a precision
    that they do not fit into."""
    where = str(model.config.name_or_path or model.config.model_type)
    counts = {name: int((~p.detach().isfinite()).sum()) for name, p in model.named_parameters()}
    wrong = {name: count for name, count in counts.items() if count}
    if wrong:
        name = next(iter(wrong))
        more = f", and {len(wrong) - 1:,} more weights have some" if len(wrong) > 1 else ""
        return LaunchError(
            f"the weights of the model are no finite numbers: {name} has {wrong[name]:,} of them "
            f"(NaN or infinite){more}",
            where,
            "take the weights of another checkpoint, or download them again",
        )
    return LaunchError(
        f"the model's hidden states overflow in {str(model.dtype).removeprefix('torch.')}",
        where,
        "set model.dtype to bfloat16 or float32",
    )


def _distance(found: Sequence[Tensor], expected: Sequence[Tensor], largest: Tensor) -> float:
    pairs = zip(found, expected, strict=True)
    return max(((a.float() - b.float()).abs().max() / largest).item() for a, b in pairs)


def _bound(model: PreTrainedModel, hidden_TD: Tensor, bounds: Mapping[torch.dtype, float]) -> float:
    """The bound of the coarsest dtype in play: of the weights, of the result, of autocast."""
    dtypes = {_embedding(model).dtype, hidden_TD.dtype}
    if torch.is_autocast_enabled(hidden_TD.device.type):
        dtypes.add(torch.get_autocast_dtype(hidden_TD.device.type))
    return max(bounds[dtype] for dtype in dtypes if dtype in bounds)


def _embedding(model: PreTrainedModel) -> Tensor:
    return cast(Tensor, model.get_input_embeddings().weight)


def _regroups(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config().to_dict()
    return any(config.get(key) for key in REGROUPING)


def _check_takes_layout(model: PreTrainedModel) -> None:
    parameters = inspect.signature(backbone_of(model).forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise LaunchError(
            f"{type(model).__name__} does not hand the boundaries of packed rows on to its attention",
            "model.attention",
            FIX,
        )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside; every module's flag and the random states as before after it."""
    was_training = [module for module in model.modules() if module.training]
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    model.eval()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for module in was_training:
            module.training = True
