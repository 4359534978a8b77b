"""The tokenizer of a run: built in, from a folder, or from the hub; always a fast one, never remote code.

No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtrain.errors import DataError, MemtrainError, words_of
from memtrain.memory.model_shape.config_file import read_config_json, refuse_pipes, refuse_run_folder
from memtrain.recipes.reading.regular_file import read_regular
from memtrain.recipes.reading.token_files import ADD_TOKENS, tokens_of
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.tokenize import tiny_tokenizer
from memtrain.trainers.data.tokenize.growth import check_growth, check_growth_of_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BUILTIN = "builtin:tiny"
AS_PUBLISHED = "take tokenizer.json as published with the model, or name another place of it: model.tokenizer"
"""What to do about a tokenizer whose files are damaged."""


def tokenizer_of(model: Model) -> PreTrainedTokenizerFast:
    """The tokenizer that a recipe's `model:` section names.

    Raises: DataError when it cannot be loaded.
    """
    name = model.tokenizer or model.path
    assert name is not None, "model.config without model.tokenizer is refused by the recipe"
    revision = model.revision if model.tokenizer is None else None
    key = "model.path" if model.tokenizer is None else "model.tokenizer"
    tokenizer = load_tokenizer(name, revision=revision, chat_template=model.chat_template, key=key)
    return with_tokens(tokenizer, model.add_tokens)


def with_tokens(tokenizer: PreTrainedTokenizerFast, asked: Sequence[str]) -> PreTrainedTokenizerFast:
    """The tokenizer with tokens of a recipe added, each one that it does not have yet.

    Raises: DataError when one is there already, twice in the list, or has no text; or a file cannot be read.
    """
    if not asked:
        return tokenizer
    from transformers import AddedToken

    tokens = tokens_of(asked)
    known = tokenizer.get_vocab()
    for number, token in enumerate(tokens):
        if not token.strip() or token in known or token in tokens[:number]:
            why = "has no text" if not token.strip() else "is a token already"
            why = "is in the list twice" if token.strip() and token not in known else why
            raise DataError(f"'{token}' {why}", ADD_TOKENS, "remove it: an added token is a new one")
    # As it stands: neither split, nor lowered, nor stripped of the spaces around it.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return tokenizer


def load_tokenizer(
    name: str, *, revision: str | None = None, chat_template: str | None = None, key: str = "model.tokenizer"
) -> PreTrainedTokenizerFast:
    """The tokenizer of a hub id, a folder or `builtin:tiny`, with another chat template where one is given.

    `key`: the key that named it, for errors.
    Raises: DataError when there is none, it is not a fast one, or the template is missing.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from memtrain.trainers.model.loading.locate import find_origin, read_config

    if name.startswith("builtin:") and name != BUILTIN:
        raise DataError(
            f"there is no tokenizer '{name}'", "model.tokenizer", f"use {BUILTIN}, a folder or a hub id"
        )
    place = str(tiny_tokenizer.FOLDER) if name == BUILTIN else str(Path(name).expanduser())
    if not Path(place).is_dir() and name.startswith((".", "/", "~")):
        raise DataError(
            f"there is no folder {name}",
            key,
            "give a hub id (owner/name) or a folder",
        )
    refuse_run_folder(Path(place), "model.tokenizer")
    if Path(place).is_dir():
        refuse_pipes(Path(place), "model.tokenizer")
        check_growth_of_file(Path(place))
    if (Path(place) / "config.json").exists():
        read_config_json(Path(place), "model.tokenizer")
    folder = Path(place)
    if folder.is_dir() and not any(next(folder.glob(one), None) for one in TOKENIZER_FILES):
        raise _no_tokenizer(name, key)
    try:
        # Asks the hub once: transformers itself asks for every file that may exist, with retries.
        asked = {} if Path(place).is_dir() else find_origin(name, revision).kwargs()
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **asked)
    except BaseException as error:
        # Every kind of network, hub and parsing fault ends here; its own words say which.
        if isinstance(error, MemtrainError) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        if (Path(place) / "config.json").exists():
            # transformers reads it first: where that is what fails, it is not the tokenizer's fault.
            read_config(find_origin(place, None))
        fix = "check the name and the network; without one, give the path of a folder with tokenizer.json"
        if Path(place).is_dir():
            fix = AS_PUBLISHED
        raise DataError(f"cannot load the tokenizer '{name}': {words_of(error)}", key, fix) from None
    if isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.vocab_size < 2:
        raise _no_tokenizer(name, key)  # transformers makes an empty one of a configuration alone
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer '{name}' is a {type(tokenizer).__name__}, which has no fast form",
            "model.tokenizer",
            "give a tokenizer that comes with tokenizer.json",
        )
    check_growth(tokenizer)
    _check_works(tokenizer, name, key)
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    return tokenizer


def is_panic(error: BaseException) -> bool:
    """Whether the tokenizer's own program broke: its exception is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _check_works(tokenizer: PreTrainedTokenizerFast, name: str, key: str) -> None:
    """Raise DataError where a tokenizer breaks on a text, or adds tokens that it does not have."""
    fix = AS_PUBLISHED
    try:
        ids: list[int] = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
        tokenizer.backend_tokenizer.decode(ids)
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise DataError(f"the tokenizer '{name}' breaks on a text: {words_of(error)}", key, fix) from None
    known = set(tokenizer.get_vocab().values())
    if unknown := [one for one in ids if one not in known]:
        what = f"the tokenizer '{name}' makes the token {unknown[0]} of the text 'a', and has no such token"
        raise DataError(what, key, fix)


TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Names of the files that a tokenizer is read from."""


def _no_tokenizer(name: str, key: str) -> DataError:
    return DataError(
        f"'{name}' has no tokenizer: there is no vocabulary in its files",
        key,
        "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) into it, or name another place "
        "of them: model.tokenizer",
    )


def template_text(chat_template: str) -> str:
    """The Jinja text of a file, or of a shipped training template by its name.

    Raises: DataError when it is neither.
    """
    from memtrain.trainers.data.tokenize.chat_templates import NAMES, shipped_text

    if chat_template in NAMES:
        return shipped_text(chat_template)
    path = Path(chat_template).expanduser()
    if not path.is_file():
        known = ", ".join(NAMES)
        raise DataError(
            f"there is no chat template '{chat_template}'",
            "model.chat_template",
            f"give the path of a Jinja file, or one of {known}",
        )
    try:
        return read_regular(path, "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
        raise DataError(
            f"the chat template {path} cannot be read: {reason}",
            "model.chat_template",
            "name a Jinja file in UTF-8",
        ) from None


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Digest of all that decides which ids a text becomes: the fast tokenizer, its special tokens."""
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}\n{special}".encode()).hexdigest()[:32]
