"""The hub of datasets asked once, with a short wait: the libraries would retry for half a minute."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memtrain.errors import DataError, first_line_of
from memtrain.recipes.sections.data import Source

HUB_TIMEOUT_S = 3.0
"""Longest wait for the hub's answer to whether it has a dataset."""


@contextmanager
def loading_from_hub(source: Source, *, streaming: bool = False) -> Iterator[None]:
    """The body loads a dataset of the hub: from the hub's cache alone where the hub cannot be reached.

    Raises: DataError when the hub has no such dataset, or cannot be reached and the cache has none either,
    and for every other fault of the body: network, hub and parsing.
    """
    unreachable = ask_hub(source)
    if unreachable and streaming:
        raise DataError(*nowhere(source, unreachable))
    with hub_faults(source, unreachable), _cache_alone(bool(unreachable)):
        yield


def ask_hub(source: Source) -> str:
    """Reason why the hub cannot be asked for a dataset; empty where it has it. One request, no retries.

    Raises: DataError when the hub says that there is none, or that this account may not read it.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = source.source
    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    try:
        HfApi().dataset_info(name, revision=source.revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        fix = "accept its terms on the hub and log in with `hf auth login`"
        raise DataError(f"'{name}' is gated and this account has no access", "data", fix) from None
    except RevisionNotFoundError:
        fix = "give a branch, tag or commit of its page on the hub, or remove the key"
        raise DataError(f"'{name}' has no revision {source.revision}", "data", fix) from None
    except (RepositoryNotFoundError, HFValidationError):
        what = f"'{name}' is not a file or folder here, and the hub has no dataset of that name"
        raise DataError(what, "data", _spelling(name)) from None
    except Exception:  # each version of the hub's client has network errors of its own; the cache may have it
        return "the hub cannot be reached"
    return ""


@contextmanager
def hub_faults(source: Source, unreachable: str = "") -> Iterator[None]:
    """Every kind of network, hub and parsing fault as one DataError; its own first line says which."""
    try:
        yield
    except Exception as error:
        if unreachable:
            raise DataError(*nowhere(source, unreachable)) from None
        reason = first_line_of(error)
        raise DataError(
            f"cannot load '{source.source}' (split '{source.split}') from the Hugging Face hub: {reason}",
            "data",
            "check the name and the network; without one, download the files elsewhere and give their path",
        ) from None


def nowhere(source: Source, unreachable: str) -> tuple[str, str, str]:
    """(what, where, fix) for a name that is no file and that nobody could be asked for."""
    return (
        f"'{source.source}' is not a file or folder here, and as a hub dataset it is not in the cache: "
        f"{unreachable}",
        "data",
        f"{_spelling(source.source)}; for a dataset of the hub connect this machine, or download its files "
        "elsewhere and give their path",
    )


def _spelling(name: str) -> str:
    """Advice on a name: the nearest one beside it, or where relative paths begin."""
    path = Path(name)
    beside: dict[str, str] = {}
    for one in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        beside.update({one.stem: one.name, one.name: one.name})
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"did you mean '{path.with_name(beside[near[0]])}'?"
    return f"check the spelling; a relative path starts at the current folder, {Path.cwd()}"


@contextmanager
def _cache_alone(is_offline: bool) -> Iterator[None]:
    """datasets reads its cache and asks nobody, in the body."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or is_offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
