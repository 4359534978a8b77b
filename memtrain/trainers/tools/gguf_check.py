"""A GGUF file held against the model that it was made of: every tensor, and the settings that programs read.

A converter renames tensors, stacks experts, adds one to Gemma's norms and reorders the rows of Llama's
queries and keys. Each tensor is found by the name that llama.cpp gives it and compared in place, then in the
orders that converters use, then as a set of numbers; what has no name of its own (fused projections) is
compared with the rest of its layer, as a set. Source: llama.cpp, gguf-py (`get_tensor_name_map`,
`quants.py`) and conversion/*.py; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from memtrain.memory.model_shape.config_file import read_config_json

Numbers = NDArray[np.float32]

ROUNDING = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Most that a type moves a number, as a share of it."""
SMALLEST_F16 = 2.0**-25
"""Most that float16 moves a number next to nothing: half of its smallest step."""
BLOCK = 32
"""Numbers of a block of Q8_0, which share a scale."""
STRETCH = 2**24
"""Numbers that are compared at once."""
NOT_WEIGHTS = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias|attention\.(masked_)?bias)$"
)
"""Buffers that old checkpoints hold and no converter takes."""
OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|mtp)")
"""Parts of a model that the file of its text does not hold."""
OF_CONVERTER = re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$")
"""Tensors that a converter makes of the configuration."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of an expert's weights, and those of the others."""
SETTINGS: dict[str, Sequence[str]] = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embd"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "rope.freq_base": ("rope_theta",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
}
"""Settings of a GGUF file that change what it computes, and their keys in config.json."""


class NotTheModel(Exception):
    """A GGUF file that is not the model it was made of; its text says in which."""


@dataclass(slots=True)
class Compared:
    """What was compared, and was the same."""

    in_place: int = 0
    """Tensors whose numbers stand where they stood, or in an order that is known."""
    as_sets: int = 0
    """Tensors whose numbers are the same in some order."""
    left_out: list[str] = field(default_factory=list[str])
    """Tensors that could not be compared."""
    largest: float = 0.0
    """Largest difference of two numbers."""

    def words(self, folder: Path) -> str:
        """The finding as a sentence."""
        sets = f", {self.as_sets} of them in another order" if self.as_sets else ""
        left = f" Not compared to the number: {_some(self.left_out)}." if self.left_out else ""
        return (
            f"Compared with {folder}: {self.in_place + self.as_sets} tensors hold its numbers{sets}; the "
            f"largest difference is {self.largest:.2g}, within the rounding of their types.{left}"
        )


def _some(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def can_compare() -> bool:
    """Whether the package that reads GGUF files is installed."""
    return importlib.util.find_spec("gguf") is not None


def compare(file: Path, folder: Path) -> Compared:
    """Hold a GGUF file against a model folder with safetensors files.

    Raises: NotTheModel where a tensor is missing, has another shape or other numbers, or where a setting is
    another; LaunchError where config.json is damaged.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map  # pyright: ignore[reportMissingImports]

    if not file.is_file() or not file.stat().st_size:
        raise NotTheModel("the converter ended without an error and wrote nothing")
    kind = ""
    try:
        reader: Any = GGUFReader(file)
        read = {
            name: one.contents() for name, one in reader.fields.items() if not name.startswith("tokenizer")
        }
        kind = str(read["general.architecture"])
        arch = next(one for one, name in MODEL_ARCH_NAMES.items() if name == kind)
        names: Any = get_tensor_name_map(arch, int(read[f"{kind}.block_count"]))
    except StopIteration:
        raise NotTheModel(f"its architecture {kind} is not known to the installed package gguf") from None
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise NotTheModel(f"it cannot be read: {type(error).__name__}: {error}") from None
    settings = {key.removeprefix(f"{kind}."): value for key, value in read.items()}
    config = read_config_json(folder / "config.json", str(folder / "config.json"))
    _compare_settings(settings, config.get("text_config") or config)
    written: dict[str, Any] = {one.name: one for one in reader.tensors}
    with _Weights(folder) as weights:
        return _compare_tensors(written, weights, names, settings)


def _compare_settings(written: dict[str, Any], config: dict[str, Any]) -> None:
    """Raises: NotTheModel."""
    rope = config.get("rope_parameters") or {}
    known = config | (rope if "rope_theta" in rope else rope.get("full_attention") or {})
    for name, keys in SETTINGS.items():
        value = next((known[key] for key in keys if isinstance(known.get(key), int | float)), None)
        there = written.get(name)
        if value is None or not isinstance(there, int | float):
            continue
        if abs(there - value) > 1e-6 * abs(value):
            raise NotTheModel(f"its {name} is {there:g} and {keys[0]} of config.json is {value:g}")


class _Weights:
    """The tensors of a model folder, read one at a time."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted({str(one) for one in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        else:
            files = [one.name for one in sorted(folder.glob("model*.safetensors"))]
        self._opened: list[Any] = [safe_open(folder / one, "pt") for one in files]
        self._where: dict[str, Any] = {name: one for one in self._opened for name in one.keys()}  # noqa: SIM118

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._where.clear()
        self._opened.clear()

    @property
    def names(self) -> list[str]:
        return sorted(
            self._where, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]
        )

    def size(self, name: str) -> int:
        """Numbers of a tensor."""
        return int(np.prod(self._where[name].get_slice(name).get_shape(), dtype=np.int64))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str) -> Any:
        """The tensor, in its own type."""
        return self._where[name].get_tensor(name)


def _compare_tensors(
    written: dict[str, Any], weights: _Weights, names: Any, settings: dict[str, Any]
) -> Compared:
    """Raises: NotTheModel."""
    found = Compared()
    sources: dict[str, list[str]] = defaultdict(list)
    nameless: list[str] = []
    for name in weights.names:
        if NOT_WEIGHTS.search(name) or OTHER_PARTS.search(name):
            continue
        target = _name_of(name, names)
        (sources[target] if target in written else nameless).append(name)
    _tied_heads(written, weights, sources, nameless)
    others: list[str] = []
    for target, parts in sources.items():
        one = written[target]
        if one.tensor_type.name not in (*ROUNDING, "Q8_0"):
            found.left_out.append(f"{target} ({one.tensor_type.name})")
        elif (in_place := _compare_one(one, parts, weights, settings, found)) is None:
            others.append(target)
        elif in_place:
            found.in_place += 1
        else:
            found.as_sets += 1
    unclaimed = [
        name
        for name, one in written.items()
        if name not in sources and not OF_CONVERTER.search(name) and not _is_empty(one)
    ]
    rest = [*nameless, *(part for name in others for part in sources[name])]
    named = {part: name for name in others for part in sources[name]}
    _compare_layers(rest, [*unclaimed, *others], named, weights, written, found)
    return found


def _name_of(name: str, names: Any) -> str:
    """The name of a weight in a GGUF file; of an expert's, that of the stack it is in. Empty: it has none."""
    plain = name.replace("model.language_model.", "model.").removeprefix("language_model.")
    expert = EXPERT.sub(".experts.", plain)
    for short, long in EXPERT_NAMES.items() if expert != plain else ():
        expert = expert.replace(f"block_sparse_moe.experts.{short}.", f"mlp.experts.{long}.")
    for one in (plain, plain.removeprefix("transformer."), expert):
        if found := names.get_name(one, try_suffixes=(".weight", ".bias")):
            return str(found)
    return ""


def _tied_heads(
    written: dict[str, Any], weights: _Weights, sources: dict[str, list[str]], nameless: list[str]
) -> None:
    """Compare a head that is written twice, or once, with the one weight that there is."""
    embedding = sources.get("token_embd.weight", [])
    if "output.weight" in written and "output.weight" not in sources and embedding:
        sources["output.weight"] = embedding
    if "lm_head.weight" in nameless and embedding and "output.weight" not in written:
        head, table = weights.read("lm_head.weight"), weights.read(embedding[0])
        if head.shape == table.shape and bool((head == table).all()):
            nameless.remove("lm_head.weight")


def _compare_one(
    one: Any, parts: Sequence[str], weights: _Weights, settings: dict[str, Any], found: Compared
) -> bool | None:
    """Whether a tensor holds the numbers of weights: in place (True) or in some order (False); None: not."""
    rows = int(np.prod(one.data.shape[:-1], dtype=np.int64)) if one.data.ndim > 1 else 1
    columns = one.n_elements // max(rows, 1)
    wanted = sum(weights.size(name) for name in parts)
    shape = weights.shape(parts[0])
    is_table = one.name in ("token_embd.weight", "output.weight") and shape[-1:] == (columns,)
    if wanted != one.n_elements and not (is_table and wanted > one.n_elements):
        return None
    for order in _orders(one.name, settings):
        off = 0.0
        for got, expected in _stretches(one, parts, weights, order, columns):
            off = max(off, _largest(got, expected, one.tensor_type.name, off))
            if not np.isfinite(off):
                break
        if np.isfinite(off):
            found.largest = max(found.largest, off)
            return True
    # A set of blocks is too coarse for a tensor that has a name: rows alone.
    if one.tensor_type.name == "Q8_0":
        return False if _same_rows([one], parts, weights) else None
    return _same_set([one], parts, weights, found) if wanted == one.n_elements else None


Order = Callable[[Numbers], Numbers]


def _orders(name: str, settings: dict[str, Any]) -> Iterator[tuple[Order, bool]]:
    """(what a converter may do with a weight, whether it needs the weight whole)."""
    yield (lambda x: x), False
    heads = settings.get("attention.head_count_kv" if "attn_k" in name else "attention.head_count")
    if re.search(r"attn_[qk]\.(weight|bias)$", name) and isinstance(heads, int) and heads > 0:
        yield (lambda x: _permuted(x, heads)), True
    if "norm" in name:
        yield (lambda x: x + np.float32(1)), False
    if name.endswith(("ssm_a", "ssm_a.weight")):
        yield (lambda x: -np.exp(x)), False
    yield (lambda x: np.ascontiguousarray(x.T) if x.ndim == 2 else x), True


def _permuted(x: Numbers, heads: int) -> Numbers:
    """Rows of queries or keys in the order of pairs. Source: llama.cpp, conversion/llama.py, `permute`."""
    if x.shape[0] % (2 * heads):
        return x
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)


def _stretches(
    one: Any, parts: Sequence[str], weights: _Weights, order: tuple[Order, bool], columns: int
) -> Iterator[tuple[Numbers, Numbers]]:
    """Numbers [rows, columns] of a tensor, and what they should be, some rows at a time."""
    change, is_whole = order
    data = one.data.reshape(-1, one.data.shape[-1])
    start = 0
    for name in parts:
        weight = weights.read(name)
        rows = min(weight.numel() // columns, len(data) - start)
        step = rows if is_whole else max(STRETCH // columns, 1)
        flat = weight if is_whole else weight.reshape(-1, columns)
        for first in range(0, rows, max(step, 1)):
            stretch = flat if is_whole else flat[first : min(first + step, rows)]
            expected = change(_float32(stretch)).reshape(-1, columns)
            yield _numbers(one, data[start + first : start + first + len(expected)]), expected
        start += rows


def _float32(tensor: Any) -> Numbers:
    return tensor.float().numpy()


def _numbers(one: Any, rows: Any) -> Numbers:
    """Rows of a tensor as float32."""
    from gguf.quants import dequantize  # pyright: ignore[reportMissingImports]

    return np.asarray(dequantize(rows, one.tensor_type), dtype=np.float32)


def _tolerance(expected: Numbers, kind: str) -> Numbers:
    """Most that rounding to a type moves each number."""
    if kind == "Q8_0":
        largest = np.abs(expected.reshape(-1, BLOCK)).max(-1, keepdims=True)
        most = largest * np.float32(0.5 / 127 + 2.0**-10) + np.float32(128 * SMALLEST_F16)
        return np.broadcast_to(most, (len(most), BLOCK)).reshape(expected.shape)
    room = np.abs(expected) * np.float32(ROUNDING[kind])
    return room + np.float32(SMALLEST_F16) if kind == "F16" else room


def _largest(got: Numbers, expected: Numbers, kind: str, least: float = 0.0) -> float:
    """Largest difference; infinite where one is above the rounding of its type, or no number."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(got - expected)
        is_same = bool((apart <= _tolerance(expected, kind)).all())
    return max(least, float(apart.max(initial=0.0))) if is_same else float("inf")


def _same_set(
    tensors: Sequence[Any], parts: Sequence[str], weights: _Weights, found: Compared
) -> bool | None:
    """False where tensors hold the numbers of weights in some order; else None.

    Both are rounded to the coarsest type of the tensors, so that no number is near enough to be another. Of
    Q8_0 the rows are compared, with their blocks; where the blocks are others, the numbers, to a step of
    the largest block: that is told as not compared.
    """
    kinds = {one.tensor_type.name for one in tensors}
    if not kinds <= {*ROUNDING, "Q8_0"}:
        found.left_out += [f"{one.name} ({one.tensor_type.name})" for one in tensors]
        return False
    if kinds == {"Q8_0"} and _same_rows(tensors, parts, weights):
        return False
    expected = np.concatenate([_float32(weights.read(name)).reshape(-1) for name in parts])
    got = np.concatenate([_numbers(one, one.data).reshape(-1) for one in tensors])
    if got.size != expected.size or not np.isfinite(got).all():
        return None
    room = np.float32(0)
    if "Q8_0" in kinds:
        room = np.abs(expected).max() * np.float32(0.5 / 127 + 2.0**-10)
    elif kinds != {"F32"}:
        coarsest = next(one.tensor_type for one in tensors if one.tensor_type.name != "F32")
        expected, got = (_rounded(one, coarsest) for one in (expected, got))
    expected.sort()
    got.sort()
    if not bool((np.abs(got - expected) <= room).all()):
        return None
    if room:
        found.left_out += [f"{one.name} (its blocks are of other numbers)" for one in tensors]
    return False


def _same_rows(tensors: Sequence[Any], parts: Sequence[str], weights: _Weights) -> bool:
    """Whether blocks of Q8_0 hold the rows of weights in some order."""
    from gguf.quants import quantize  # pyright: ignore[reportMissingImports]

    rows: list[Any] = [one.data.reshape(-1, one.data.shape[-1]) for one in tensors]
    made: list[Any] = []
    for name in parts:
        weight = _float32(weights.read(name))
        if weight.shape[-1] % BLOCK:
            return False
        made.append(quantize(weight.reshape(-1, weight.shape[-1]), tensors[0].tensor_type))
    if len({one.shape[-1] for one in (*rows, *made)}) != 1:
        return False
    sorted_rows = [
        np.sort(np.ascontiguousarray(np.concatenate(one)).view(f"V{one[0].shape[-1]}").reshape(-1))
        for one in (rows, made)
    ]
    return sorted_rows[0].tobytes() == sorted_rows[1].tobytes()


def _rounded(numbers: Numbers, kind: Any) -> Numbers:
    """Numbers as a type holds them."""
    from gguf.quants import dequantize, quantize  # pyright: ignore[reportMissingImports]

    with np.errstate(over="ignore"):
        return np.asarray(dequantize(quantize(numbers, kind), kind), dtype=np.float32)


def _is_empty(one: Any) -> bool:
    """Whether a tensor is a bias of zeros, which converters add where a layer has none."""
    return one.name.endswith(".bias") and one.n_elements < STRETCH and not _numbers(one, one.data).any()


def _compare_layers(
    names: Sequence[str],
    tensors: Sequence[str],
    named: dict[str, str],
    weights: _Weights,
    written: dict[str, Any],
    found: Compared,
) -> None:
    """Compare what is left over, layer by layer, as sets of numbers, where some of it has other names.

    `named`: weights whose tensors have their names, and do not hold their numbers.
    Raises: NotTheModel.
    """
    here, there = _by_layer(names), _by_layer(tensors)
    for layer in sorted(here.keys() | there.keys()):
        parts, ones = here.get(layer, []), [written[name] for name in there.get(layer, [])]
        is_renamed = not (set(parts) <= named.keys() and set(there.get(layer, ())) <= set(named.values()))
        if parts and ones and is_renamed and _same_set(ones, parts, weights, found) is False:
            found.as_sets += len(ones)
            continue
        raise NotTheModel(_reason(parts, ones, weights))


def _by_layer(names: Sequence[str]) -> dict[int, list[str]]:
    """Names by the number of their layer; -1: outside of the layers."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in names:
        number = re.search(r"(?:^|\.)(?:blk|layers|h|blocks|layer)\.(\d+)\.", name)
        found[int(number[1]) if number else -1].append(name)
    return found


def _reason(parts: Sequence[str], ones: Sequence[Any], weights: _Weights) -> str:
    """What is wrong with tensors that do not hold the numbers of weights."""
    if not ones:
        return f"{_some(parts)} of the model: not in it"
    if not parts:
        return f"it holds {_some([one.name for one in ones])}, which the model has not"
    said = f"{ones[0].name} does not hold the numbers of {parts[0]}"
    numbers = [_numbers(one, one.data) for one in ones]
    if not all(np.isfinite(one).all() for one in numbers):
        is_sound = all(np.isfinite(_float32(weights.read(name))).all() for name in parts)
        why = "numbers that its type cannot hold became infinite" if is_sound else "the model has such itself"
        return f"{said}: some are no finite numbers ({why})"
    sizes = sum(one.n_elements for one in ones), sum(weights.size(name) for name in parts)
    if sizes[0] != sizes[1]:
        return f"{said}: {sizes[0]} numbers in place of {sizes[1]}"
    if len(ones) == len(parts) == 1:
        flat = _float32(weights.read(parts[0])).reshape(-1)
        return f"{said}: they differ by up to {float(np.abs(numbers[0].reshape(-1) - flat).max()):.3g}"
    return said
