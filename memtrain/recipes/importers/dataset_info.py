"""LLaMA-Factory's dataset_info.json: what a name in `dataset:` stands for, as a source of a recipe.

Source: LLaMA-Factory 0.9.5, data/parser.py (the attributes), data/converter.py (what the columns become).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from memtrain.recipes.formats.fields import ROLES
from memtrain.recipes.reading.regular_file import read_regular

FILE = "dataset_info.json"
_FORMS = {"sft": ("alpaca", "messages"), "dpo": ("preference",) * 2, "kto": ("unpaired",) * 2}
"""The format of Alpaca's rows and of conversations, by method; `reward` is as `dpo`."""
_ROLE_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "assistant"),
    "system_tag": ("system", "system"),
}
"""Each tag of a role: its default, and the role of the chat template."""
_PAIRS = (("role", "content"), ("from", "value"))
_MEDIA = ("images", "videos", "audios")


@dataclass(slots=True)
class Named:
    """A name of `dataset:`: its source, and what of the entry a recipe does not say."""

    source: dict[str, object]
    lost: list[str] = field(default_factory=list[str])
    is_conversation: bool = False
    """Rows are conversations, whose first turns are kept where they are cut."""


def find_info(folder: str, beside: Path | None) -> Path | None:
    """The file of a `dataset_dir`: from where the command runs, and from the configuration's folder upwards.

    `beside`: folder of the configuration. Examples name `data`, seen from the folder that they are run in.
    """
    tried = [Path(folder)]
    if beside is not None:
        tried += [above / folder for above in (beside, *beside.resolve().parents[:3])] + [beside]
    return next((one / FILE for one in tried if (one / FILE).is_file()), None)


def read_info(path: Path) -> dict[str, Mapping[str, Any]]:
    """The entries of the file by their names.

    Raises: OSError or ValueError where it is no JSON object of objects.
    """
    read = json.loads(read_regular(path))
    if not isinstance(read, dict) or not all(isinstance(one, dict) for one in read.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        raise ValueError("it is not an object of entries")
    return cast(dict[str, Mapping[str, Any]], read)


def named(entry: Mapping[str, Any], folder: str, stage: str, method: str) -> Named:
    """The source of an entry. `folder`: where its files lie; `stage`: LLaMA-Factory's word for the method."""
    made = Named({"source": _origin(entry, folder)})
    where = "file_name" in entry
    if not where and "hf_hub_url" not in entry:
        kinds = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
        kind = next((one for one in kinds if one in entry), "nothing")
        made.lost.append(
            f"it is named by {kind}: copy its rows to a file, or name them on the Hugging Face hub"
        )
    for ours, key in (("name", "subset"), ("split", "split")):
        if entry.get(key) and not (key == "split" and (entry[key] == "train" or where)):
            made.source[ours] = entry[key]
    if entry.get("folder"):
        made.lost.append(f"folder: {entry['folder']}: name its files")
    if isinstance(entry.get("num_samples"), int):
        made.source["limit"] = entry["num_samples"]
    columns = cast(Mapping[str, Any], entry.get("columns") or {})
    if any(columns.get(kind) for kind in _MEDIA):
        made.lost.append("rows are text: images, videos and audio are not read")
    made.is_conversation = entry.get("formatting", "alpaca") != "alpaca"
    written = _conversation(made, entry, columns, method) if made.is_conversation else {}
    if not made.is_conversation:
        written = _texts(made, columns, stage, method, is_default="columns" not in entry)
    if written:
        made.source["columns"] = written
    return made


def _origin(entry: Mapping[str, Any], folder: str) -> str:
    for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"):
        if key in entry:
            return str(entry[key])
    return f"{folder}/{entry.get('file_name', '')}"


def _texts(
    made: Named, columns: Mapping[str, Any], stage: str, method: str, *, is_default: bool
) -> dict[str, object]:
    """Columns of Alpaca's rows; an entry with `columns` has none but those it names."""
    defaults = {"prompt": "instruction", "query": "input", "response": "output"} if is_default else {}
    named = {**defaults, **columns}
    prompt, query, answer = (named.get(key) for key in ("prompt", "query", "response"))
    if stage == "pt":
        made.source["format"] = "text"
        if is_default:
            made.lost.append(
                "the texts are the columns instruction and input together: here instruction alone"
            )
        return _other({"text": prompt}, {"text": "text"})
    if method == "sft":
        if not named.get("response"):
            made.lost.append("the entry names no column of answers (columns.response)")
        made.source["format"] = "alpaca"
        held = {"instruction": prompt, "input": query, "output": answer}
        if columns.get("history"):
            made.lost.append("answers of earlier turns (history) are trained on there, and are prompt here")
        extra = {key: columns.get(key) for key in ("system", "history")}
        return _other(held | extra, {key: key for key in (*held, *extra)})
    if method == "ppo":
        made.source["format"] = "alpaca" if query or answer else "prompt"
        if made.source["format"] == "prompt":
            made.source["strings_are"] = "turns"
            return _other({"prompt": prompt}, {"prompt": "prompt"})
        held = {"instruction": prompt, "input": query, "output": answer}
        return _other(held, {key: key for key in held})
    made.source["format"] = _FORMS.get(method, _FORMS["dpo"])[0]
    made.source["strings_are"] = "turns"
    if query and query in columns.values():
        made.lost.append(f"column {query} follows the prompt there: join the two columns")
    elif query:
        made.lost.append(
            f"a column {query} follows the prompt there, where rows have it: join the two columns"
        )
    if columns.get("system"):
        made.lost.append(f"column {columns['system']}: rows of {made.source['format']} have no system column")
    held = _answers(columns, method) | {"prompt": prompt}
    if method == "kto":
        held["completion"] = answer
    return _other(held, {key: key for key in held})


def _conversation(
    made: Named, entry: Mapping[str, Any], columns: Mapping[str, Any], method: str
) -> dict[str, object]:
    """Columns of conversations, whose tags are to be words that memtrain knows."""
    tags = cast(Mapping[str, Any], entry.get("tags") or {})
    pair = (tags.get("role_tag", "from"), tags.get("content_tag", "value"))
    odd = [f"{pair[0]}, {pair[1]} (here role, content or from, value)"] if pair not in _PAIRS else []
    for tag, (default, role) in _ROLE_TAGS.items():
        word = tags.get(tag) or default
        if tag in tags and tags[tag] and ROLES.get(str(word), "") != role:
            odd.append(f"{tag}: {word}")
    if odd:
        made.lost.append(f"tags {', '.join(odd)}: write the words that memtrain reads into the rows")
    made.source["format"] = _FORMS.get(method, _FORMS["dpo"])[1]
    messages = columns.get("messages") or "conversations"
    held: dict[str, Any] = {} if messages == "conversations" else {"messages": messages}
    held |= {key: columns[key] for key in ("tools", "system") if columns.get(key)}
    if method == "ppo":
        made.source["format"] = "prompt"
        held = {"prompt": messages}
    return _other(held | _answers(columns, method), {key: key for key in ("tools", "system", "messages")})


def _answers(columns: Mapping[str, Any], method: str) -> dict[str, Any]:
    if method in ("dpo", "reward"):
        return {key: columns.get(key) or key for key in ("chosen", "rejected")}
    return {"label": columns.get("kto_tag") or "kto_tag"} if method == "kto" else {}


def _other(held: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, object]:
    """The columns whose names are not memtrain's own."""
    return {key: str(name) for key, name in held.items() if name and name != ours.get(key, key)}
