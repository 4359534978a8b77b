"""Shapes of well-known models, for planning where the hub cannot be asked: facts of their config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "known_models.json"
"""Written by benchmarks/known_models.py; each model with its source. Totals are held against the published
numbers of parameters by tests/memory/model_shape/test_known_models.py."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model of the table."""

    name: str
    """Without owner and words of copies: `qwen3-8b`."""
    config: Mapping[str, Any]
    """Shape keys of its config.json."""
    is_by_name: bool = False
    """The name that was asked for is another: a fine-tune's, which says the model and its size."""


def known_model(path: str) -> KnownModel | None:
    """The model of the table that a hub id, or a folder's name, says; None where it says none.

    A name says a model by its words: the family's in one piece and every size, no other size, and no word of
    another model of the family (`vl`, `mini`, `embedding`). `Qwen3-8B-bnb-4bit` is a copy of it,
    `DeepSeek-R1-0528-Qwen3-8B` is by its name.
    """
    asked = _words(path)
    found = [(one, rest) for one in _table() if (rest := _beyond(asked, _words(one))) is not None]
    most = max((len(_words(one)) for one, _ in found), default=0)
    found = [(one, rest) for one, rest in found if len(_words(one)) == most]
    if not found or any(_table()[one][0] != _table()[found[0][0]][0] for one, _ in found):
        return None
    name, rest = found[0]
    config, like = _table()[name]
    is_copy = like is None and all(_OF_COPIES.fullmatch(word) for word in rest)
    return KnownModel(like or name, config, is_by_name=not is_copy)


def known_config(path: str) -> Mapping[str, Any] | None:
    """Shape keys in the config.json of a model; None for one that the table does not have."""
    found = known_model(path)
    return None if found is None else found.config


def known_models() -> tuple[str, ...]:
    """Names of the models in the table, without their owner and variant."""
    return tuple(_table())


def not_trained(path: str) -> str | None:
    """Reason, by its name, that a model is none that memtrain trains, as a clause; None where the name says
    nothing."""
    words = _words(path)
    return next(
        (why for why, said in NOT_TRAINED.items() if any(re.fullmatch(said, one) for one in words)), None
    )


NOT_TRAINED: Mapping[str, str] = {
    "by its name it reads more than text, and memtrain trains text models": (
        r"vl|vlm|vision|llava|internvl\d?(_\d)?|omni|audio|paligemma|pixtral|voxtral|smolvlm2?|minicpm|\d\.\dv|.*ocr"
    ),
    "by its name it writes sound, and memtrain trains text models": (
        r"whisper|csm|tts|orpheus|llasa|outetts|xcodec2|snac"
    ),
    "by its name it is an encoder, and memtrain trains decoders": (
        r"(modern|ro|de)?bert(a)?|bge|gte|minilm|embed(ding)?|embeddinggemma|nomic|e5"
    ),
    "by its name it denoises whole texts, and memtrain trains decoders": r"diffusiongemma|llada",
}
"""Words in names of models that no run can train, by the reason."""

_OF_COPIES = re.compile(
    r"base|instruct|inst|it|pt|chat|hf|meta|nvidia|bnb|[48]bit|unsloth|dynamic|linearized|gptq|awq|fp8|bf16|nvfp4|nf4"
    r"|int[48]|qat|deduped|thinking|v1\.0|v0\.3|25\d\d"
)
"""Words of a copy's name that leave the shape as it is."""

_OTHERS = re.compile(
    r"visual|mini|small|medium|large|nano|micro|tiny|lite|air|flash|next|moe|mtp|draft|eagle3?|medusa|1m|"
    + "|".join(NOT_TRAINED.values())
)
"""Words of other models of a family."""

_SIZE = re.compile(r"(?:[ae]|\d+x)?\d+(?:\.\d+)?b|\d{2,}m|\d+[et]")
_DATE = re.compile(r"\d{4}")
_VERSION = re.compile(r"\d+(?:\.\d+)*")
_JOINED = re.compile(r"(?<![a-z])(llama|gemma|phi|mistral|olmo|tulu)(?=\d)")


@cache
def _words(path: str) -> tuple[str, ...]:
    """The words of a model's name: `("llama", "3.1", "8b")`."""
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    return tuple(word for word in re.split(r"[-_:@ ]+", _JOINED.sub(r"\1-", name)) if word)


def _beyond(asked: tuple[str, ...], known: tuple[str, ...]) -> frozenset[str] | None:
    """The words of a name beyond those of a model of the table; None where the name does not say it."""
    sizes = [word for word in known if _SIZE.fullmatch(word)]
    if sorted(sizes) != sorted(word for word in asked if _SIZE.fullmatch(word)):
        return None
    first = next((at for at, word in enumerate(known) if word in sizes or _DATE.fullmatch(word)), len(known))
    family, after = known[:first], known[first:]
    starts = [at for at in range(len(asked)) if asked[at : at + len(family)] == family]
    rest = frozenset(asked) - frozenset(known)
    if not starts or not frozenset(after) <= frozenset(asked) or any(map(_OTHERS.fullmatch, rest)):
        return None
    # A word after the family may be another of its generations: gemma-2 is no gemma, falcon-h1 no falcon.
    following = {word for at in starts for word in asked[at + len(family) : at + len(family) + 1]} & rest
    following = {word for word in following if not _OF_COPIES.fullmatch(word)}
    is_other = following and (len(family) == 1 or any(map(_VERSION.fullmatch, following)))
    return None if is_other and sizes else rest


@cache
def _table() -> dict[str, tuple[Mapping[str, Any], str | None]]:
    """(the configuration, the model of the table that it is a fine-tune of) of each name."""
    models = json.loads(TABLE.read_text())["models"]
    own = {name: one["config"] for one in models if "config" in one for name in one["names"]}
    tuned = {name: one["like"] for one in models if "like" in one for name in one["names"]}
    return {
        **{name: (config, None) for name, config in own.items()},
        **{name: (own[like], like) for name, like in tuned.items()},
    }
