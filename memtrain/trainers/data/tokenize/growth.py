"""How much a tokenizer may make of a text before it has tokens: a stranger's could fill the memory.

Its normalizer replaces and prepends texts, one step after another, each of which multiplies; nothing in the
library ends that, and it ends the process where memory runs out. So the steps are read before they run.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from memtrain.errors import DataError
from memtrain.recipes.reading.regular_file import open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_TIMES = 100.0
"""Bytes that a byte of text may become, all steps together; published tokenizers stay below 20."""
MOST_ADDED = 1000
"""Bytes, or special tokens, that may be added to a text; published ones add a few."""
MOST_FILE_BYTES = 2**28
"""Bytes of a tokenizer.json; the largest published ones have 40 MB."""
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
INSIDE = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys under which a sequence holds its steps."""


def check_growth_of_file(folder: Path) -> None:
    """Refuse the tokenizer.json of a folder before it is loaded: loading it normalizes its added tokens.

    Raises: DataError. A file that is missing or no JSON is the loader's to report.
    """
    path = folder / "tokenizer.json"
    try:
        with open_regular(path) as file:
            raw = file.read(MOST_FILE_BYTES + 1)
    except OSError:
        return
    if len(raw) > MOST_FILE_BYTES:
        raise _refused(f"is larger than {MOST_FILE_BYTES >> 20} MiB", str(path))
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        return
    if isinstance(given, Mapping):
        check_steps({name: cast(Mapping[str, Any], given).get(name) for name in STEPS}, str(path))


def check_growth(tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a loaded tokenizer, of a folder or the hub.

    Raises: DataError.
    """
    backend: Any = tokenizer.backend_tokenizer
    found = {name: getattr(backend, name) for name in STEPS}
    states = {name: json.loads(one.__getstate__()) for name, one in found.items() if one is not None}
    check_steps(states, tokenizer.name_or_path)


def check_steps(given: Mapping[str, Any], where: str) -> None:
    """Refuse steps that multiply a text, or add to it, without reason.

    Raises: DataError.
    """
    times: dict[str, float] = {}
    for name, one in given.items():
        times[name], added = 1.0, 0
        for step in _steps(one):
            more, own = _growth(step)
            times[name] *= more
            added = round(added * more) + own
            if added > MOST_ADDED:
                raise _refused(f"adds more than {MOST_ADDED:,} bytes or tokens to every text ({name})", where)
    # Decoders work on tokens' own texts, after the others.
    if (
        max(times.get("normalizer", 1.0) * times.get("pre_tokenizer", 1.0), times.get("decoder", 1.0))
        > MOST_TIMES
    ):
        raise _refused(f"may make more than {MOST_TIMES:g} bytes of each byte of a text", where)


def _steps(given: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a part, those of sequences one by one."""
    waiting = [given]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, Mapping):
            held = cast(Mapping[str, Any], one)
            inner = next((held[key] for key in INSIDE if isinstance(held.get(key), list)), None)
            if inner is None:
                yield held
            else:
                waiting[:0] = cast(list[Any], inner)


def _growth(step: Mapping[str, Any]) -> tuple[float, int]:
    """(bytes that a byte may become, bytes or tokens that are added to a text) of one step."""
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step.get("pattern"), len(str(step.get("content", "")).encode())), 0
    if kind == "Prepend":
        return 1.0, len(str(step.get("prepend", "")).encode())
    if kind == "Metaspace":
        return _replaced({"String": " "}, len(str(step.get("replacement", "")).encode())), 4
    if kind == "Precompiled":
        return _precompiled(str(step.get("precompiled_charsmap") or "")), 0
    if kind == "TemplateProcessing":
        held = step.get("special_tokens")
        tokens = list(cast(Mapping[str, Any], held).values()) if isinstance(held, Mapping) else []
        ids = [len(one.get("ids") or ()) for one in tokens if isinstance(one, Mapping)]
        pieces = max((len(step.get(key) or ()) for key in ("single", "pair")), default=0)
        return 1.0, pieces * max(ids, default=1)
    texts = [len(str(step[key]).encode()) for key in ("prefix", "suffix", "cls", "sep") if key in step]
    return 1.0, sum(texts)


def _replaced(pattern: Any, num_bytes: int) -> float:
    """Bytes that a byte may become where each match of a pattern is replaced by so many."""
    given: Mapping[str, Any] = cast(Mapping[str, Any], pattern) if isinstance(pattern, Mapping) else {}
    text, regex = given.get("String"), given.get("Regex")
    if isinstance(text, str) and text:
        return max(1.0, num_bytes / len(text.encode()))
    try:
        is_empty = not isinstance(regex, str) or re.compile(regex).match("") is not None
    except (re.error, RecursionError, OverflowError):
        is_empty = False  # Oniguruma knows more than Python.
    return max(1.0, float(num_bytes)) + is_empty * num_bytes


def _precompiled(charsmap: str) -> float:
    """Bytes that a byte of three may become by SentencePiece's table: its longest text."""
    try:
        table = base64.b64decode(charsmap)
    except (binascii.Error, ValueError):
        return 1.0
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(1.0, max(map(len, texts.split(b"\0")), default=0) / 3)


def _refused(what: str, where: str) -> DataError:
    return DataError(
        f"the tokenizer {what}: it would fill the memory",
        where,
        "set model.tokenizer to the published tokenizer of the model",
    )
