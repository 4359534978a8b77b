"""A written model held against what it was made of: both read a row of tokens; their outputs are compared.

Both compute in float32, a layer at a time where their files can be read so. What the rounding of the written
weights moves is measured, not guessed: the written model reads the row once more, with each rounded weight
moved by up to one step of its precision. Where the difference is larger, it reads the row again with other
moves: where a model chooses (its experts), rounding turns a choice of some tokens over, of others each time.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import DataError, LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.store.token_store import META_FILE, TokenStore
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.layers_of_files import read_layers_when_called, without_data
from memtrain.trainers.model.loading.sharded_init import Kept, NeedsWhole
from memtrain.trainers.model.streamed.apply import layers_of

STEPS = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Most that rounding moves a number of a precision, as a share of it; of float32 what sums in another order
move a product."""
TIMES = 4.0
"""Differences that are taken, as a multiple of what rounding moved. Seen with one reading, of tiny models
from narrow and wide weights in float32, bfloat16 and float16: up to 1.02 times of Llama, Qwen2, Gemma 2 and
GPT-2; up to 4.15 times of mixtures (Qwen2-MoE, Qwen3-MoE, Mixtral), whose routers rounding turns over."""
LEAST = 1e-5
"""Differences that are always taken: sums of float32 in another order."""
DRAWS = 12
"""Most readings with moved weights. A choice that rounding turned over is turned over by about every third
of them."""
ROW_TOKENS = 64
"""Tokens of the row. Taste: the reading of the weights is what takes time."""

Make = Callable[[], PreTrainedModel | PeftModel]


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens that both models read."""

    ids: Tensor
    """[1, T]"""
    words: str
    """Its origin."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves of weights at random, as rounding would move them."""

    modules: Collection[str]
    """Modules whose weights are moved; none given: all."""
    step: float
    """Most that a weight is moved by, as a share of it."""
    draw: int
    """Number of the moves: alike for the same number and weight."""

    def take(self, name: str) -> bool:
        """Whether a weight is moved."""
        return not self.modules or name.rpartition(".")[0] in self.modules

    def of(self, name: str, numbers: Tensor, start: int) -> Tensor:
        """Numbers of a weight, from its number `start` on, after the moves."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.draw} {name}".encode()) + start)
        share = torch.rand(numbers.shape, generator=generator) * 2 - 1
        return numbers + numbers * share * self.step


@dataclass(frozen=True, slots=True)
class Difference:
    """Distance of two models' outputs on a row."""

    row: str
    kind: str
    """Outputs that were compared, in words."""
    mean: float
    largest: float
    rounding: float
    """Mean difference that rounding moved the outputs by: of each token the largest of all readings."""

    def words(self, other: str) -> str:
        """The finding as a sentence."""
        return (
            f"Compared with {other} on {self.row}: {self.kind} differ by {self.mean:.2g} on average, "
            f"{self.largest:.2g} at most; the rounding of its weights moves them by {self.rounding:.2g}."
        )


def row_of(plan: Plan, num_tokens: int) -> Row:
    """A held-out row of a run, or one that was trained on, or one of fixed tokens where none is kept.

    `num_tokens`: tokens that the model knows.
    """
    for split, words in ((plan.data.eval, "a held-out row"), (plan.data.train, "a row of its data")):
        if split is None or not (Path(split.folder) / META_FILE).is_file():
            continue
        try:
            ids = TokenStore.open(split.folder).row(0)[:ROW_TOKENS]
        except (DataError, OSError, IndexError, ValueError):
            continue
        if len(ids) > 1 and int(ids.max()) < num_tokens:
            return Row(torch.tensor(ids, dtype=torch.long)[None], f"{words} ({len(ids)} tokens)")
    fixed = torch.arange(1, ROW_TOKENS // 2 + 1) * 7919 % num_tokens
    return Row(fixed[None], f"a row of {fixed.numel()} fixed tokens")


def outputs(
    make: Make,
    row: Row,
    *,
    adapter: Path | None = None,
    read: Callable[[Any], Mapping[str, Callable[[], Tensor]]] | None = None,
    moves: Moves | None = None,
) -> tuple[Tensor, frozenset[str]]:
    """(outputs of a model on a row, weights that its adapter changes).

    `adapter`: put on the model. `read`: other numbers of some weights, by name. The outputs are the log-probs
    of the next tokens [T - 1, V], or the score [1, 1] of a model that scores sequences.
    """
    try:
        model, kept = without_data(make)
    except NeedsWhole:
        model, kept = make(), {}
    others = {} if read is None else read(model)
    kept = {name: _in_float32(name, one, others.get(name), moves) for name, one in kept.items()}
    base: Any = model
    made: Any = base if adapter is None else load_adapter(base, str(adapter))
    made.eval()
    if kept:
        read_layers_when_called(made, kept, torch.device("cpu"))
        for p in (p for p in made.parameters() if not p.is_meta):
            p.data = p.data.float()
    else:
        _set_weights(made, others, moves)
        _in_float32_when_called(made)
    with torch.no_grad():
        found: Tensor = made(input_ids=row.ids, use_cache=False).logits.float()
    is_score = found.dim() == 2
    return found if is_score else found[0, :-1].log_softmax(-1), changed_by(made)


def changed_by(model: nn.Module) -> frozenset[str]:
    """Names of the modules whose weights an adapter changes or replaces."""
    if not isinstance(model, PeftModel):
        return frozenset()
    found: set[str] = set()
    for name, _ in model.named_parameters():
        for mark in (".lora_", ".modules_to_save."):
            if mark in name:
                own = name.partition(mark)[0].removeprefix("base_model.model.")
                found.add(own.replace(".base_layer", ""))
    return frozenset(found)


def difference(
    plan: Plan,
    row: Row,
    expected: Tensor,
    written: Make,
    rounded: Collection[str],
    dtype: str,
    adapter: Path | None = None,
) -> Difference:
    """Distance of the model that was written from the outputs that were expected of it, and what rounding
    its weights to `dtype` moves.

    `rounded`: modules whose weights were rounded when they were written; none given: all. `adapter`: what
    was written, where it is an adapter of the model.
    """
    found, _ = outputs(written, row, adapter=adapter)
    is_score = METHODS[plan.recipe.method].head == "score"
    # Of all tokens the likely ones count: those that a text could go on with.
    counted = torch.ones_like(expected, dtype=torch.bool)
    if not is_score:
        counted = expected > expected.amax(-1, keepdim=True) - 12.0

    def by_token(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(counted, (one - other).abs(), 0.0).sum(-1) / counted.sum(-1)

    mean, by_rounding = float(by_token(found, expected).mean()), torch.zeros(len(expected))
    for draw in range(DRAWS):
        moved, _ = outputs(written, row, adapter=adapter, moves=Moves(rounded, STEPS[dtype], draw))
        by_rounding = torch.maximum(by_rounding, by_token(moved, found))
        if not mean > _most(float(by_rounding.mean())):  # a NaN is not mended by others
            break
    return Difference(
        row.words,
        "scores" if is_score else "log-probs",
        mean,
        float((found - expected).abs()[counted].max()) if counted.any() else float("nan"),
        float(by_rounding.mean()),
    )


def _most(rounding: float) -> float:
    """Difference that is taken, of what rounding moves."""
    return TIMES * rounding + LEAST


@contextmanager
def unchecked_folder(output: Path) -> Iterator[Path]:
    """The folder beside `output` that is written first: it takes that name when all is well inside, and is
    removed otherwise."""
    output = output.resolve() if output.is_symlink() else output
    beside = output.with_name(f".{output.name}.unchecked")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        beside.rename(output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def refuse_another(found: Difference, what: str, other: str, where: Path) -> None:
    """Raise LaunchError where the outputs are apart by more than rounding moves them: it is another model."""
    if found.mean <= _most(found.rounding):  # a NaN is not
        return
    raise LaunchError(
        f"{what} is not the same model as {other}: on {found.row} their {found.kind} differ by "
        f"{found.mean:.3g} on average ({found.largest:.3g} at most), and the rounding of its weights moves "
        f"them by {found.rounding:.2g}",
        str(where),
        "nothing was written; chat, evaluate and serve the run as it is, and please report this",
    )


def _in_float32(name: str, one: Kept, other: Callable[[], Tensor] | None, moves: Moves | None) -> Kept:
    """Numbers of a weight, or others in their place, as float32 and moved where they are to be."""

    def read(stretch: range) -> Tensor:
        if other is None:
            numbers = one.numbers(stretch).float()
        else:
            numbers = other().reshape(-1)[stretch.start : stretch.stop].float()
        return moves.of(name, numbers, stretch.start) if moves is not None and moves.take(name) else numbers

    return replace(one, dtype=torch.float32, read=read, here=None)


def _set_weights(model: nn.Module, others: Mapping[str, Callable[[], Tensor]], moves: Moves | None) -> None:
    for name, p in model.named_parameters():
        if name in others:
            p.data = others[name]().to(p.dtype)
        if moves is not None and moves.take(name):
            p.data = moves.of(name, p.data.float().reshape(-1), 0).view(p.shape)


def _in_float32_when_called(model: nn.Module) -> None:
    """Let a whole model compute in float32, with one layer at a time that is larger for it."""
    layers = layers_of(model)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    for p in (p for p in model.parameters() if id(p) not in inside):
        p.data = p.data.float()

    def widen(layer: nn.Module, args: Any) -> None:
        vars(layer)["_narrow"] = [(p, p.data) for p in layer.parameters()]
        for p in layer.parameters():
            p.data = p.data.float()

    def narrow(layer: nn.Module, args: Any, output: Any) -> None:
        for p, data in vars(layer).pop("_narrow"):
            p.data = data

    for layer in layers:
        layer.register_forward_pre_hook(widen)
        layer.register_forward_hook(narrow, always_call=True)
