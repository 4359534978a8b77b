"""Axolotl's datasets: where rows are, what their `type` makes of them, and which tokens are trained on.

Source: axolotl 0.19.0 (and commit 067b021c): utils/schemas/datasets.py, prompters.py, prompt_strategies/,
prompters.py and prompt_strategies/.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from memtrain.recipes.formats.fields import ROLES
from memtrain.recipes.importers.tool import ToolReading
from memtrain.recipes.trl.translation import Lost

_ASKED = "Below is an instruction that describes a task"
_ALPACA = (
    f"{_ASKED}. Write a response that appropriately completes the request.",
    f"{_ASKED}, paired with an input that provides further context. Write a response that appropriately "
    "completes the request.",
)
_CONCISE = (
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that "
    "appropriately and concisely completes the request.\n\n",
    "Below is an instruction from a USER that describes a task, paired with an input that provides further "
    "context. The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n",
)
_IM = "<|im_start|>{}\n{}<|im_end|>\n"
_STYLES: Mapping[str, tuple[str, str, str]] = {
    "instruct": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    ),
    "chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\nASSISTANT:",
        "USER: {instruction}\n{input}\nASSISTANT:",
    ),
    "chatml": (
        _IM.format("system", "{system}"),
        _IM.format("user", "{instruction}") + "<|im_start|>assistant\n",
        _IM.format("user", "{instruction}\n{input}") + "<|im_start|>assistant\n",
    ),
    "phi": (
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    ),
}
"""(system, without an input, with one) of AlpacaPrompter's styles."""
_ORCA = (
    "### System:\n{system}\n",
    "### Human:\n{instruction}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
)


@dataclass(frozen=True, slots=True)
class RowType:
    """What a `type` of rows is in a recipe."""

    format: str = ""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    prompt_format: Mapping[str, str] | None = None
    template: str = ""
    """Chat template whose text the type writes itself."""
    are_turns: bool = False
    """Strings are turns, which that template writes."""
    note: str = ""


def _written(style: tuple[str, str, str], systems: tuple[str, str] | None = None) -> dict[str, str]:
    """The prompt format of a style: with fixed system texts (without an input, with one), or the row's."""
    system, text, with_input = style
    if systems is None:
        return {"text": text, "with_input": with_input, "system": system}
    before = [system.replace("{system}", one) if one else "" for one in systems]
    return {"text": before[0] + text, "with_input": before[1] + with_input}


def _alpaca(style: str = "instruct", systems: tuple[str, str] = _ALPACA, **columns: str) -> RowType:
    return RowType("alpaca", columns, _written(_STYLES[style], systems))


def _tldr() -> RowType:
    asks = "USER: Summarize the following article as a TL;DR.\n{instruction}\nASSISTANT:"
    return RowType("alpaca", {"instruction": "article", "output": "summary"}, {"text": asks})


_OF_ORCA = {"instruction": "question", "output": "response", "system": "system_prompt"}
_NO_SYSTEM = ("", "")
_ROWS: Mapping[str, RowType] = {
    **{f"alpaca:{style}": _alpaca(style) for style in _STYLES},
    "alpaca": _alpaca(),
    "gpteacher": _alpaca(output="response"),
    "oasst": _alpaca(instruction="INSTRUCTION", output="RESPONSE"),
    "summarizetldr": _tldr(),
    "alpaca_chat.load": _alpaca("chat"),
    "alpaca_chat.load_concise": _alpaca("chat", _CONCISE),
    "alpaca_chat.load_no_prompt": _alpaca("chat", _NO_SYSTEM),
    "alpaca_chat.load_qa": RowType(
        "question_answer", {}, {"text": _written(_STYLES["chat"], _CONCISE)["text"]}
    ),
    "alpaca_chat.load_camel_ai": _alpaca("chat", _CONCISE, instruction="message_1", output="message_2"),
    "alpaca_instruct.load": _alpaca(),
    "alpaca_instruct.load_no_prompt": _alpaca("instruct", _NO_SYSTEM),
    "alpaca_w_system.load": RowType("alpaca", {}, _written(_STYLES["chat"])),
    "alpaca_w_system.load_chat": RowType("alpaca", {}, _written(_STYLES["chat"])),
    "alpaca_w_system.load_instruct": RowType("alpaca", {}, _written(_STYLES["instruct"])),
    "alpaca_w_system.load_open_orca": RowType("alpaca", _OF_ORCA, _written(_ORCA)),
    "alpaca_w_system.load_open_orca_chatml": RowType("alpaca", _OF_ORCA, _written(_STYLES["chatml"])),
}
"""Types of `datasets` whose rows a prompt format writes, by their loaders' names."""

_PAIRS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "icr": {"prompt": "input"},
    "intel": {"prompt": "question"},
    "prompt_pairs": {},
    "ultra": {},
    "argilla": {"prompt": "instruction"},
    "argilla_chat": {},
}
"""Columns of the types of pairs and verdicts that write a template of their own (`chatml.intel`)."""

TEMPLATES: Mapping[str, str] = {
    "chatml": "chatml",
    "falcon_h1": "falcon-h1",
    "gemma": "gemma",
    "gemma3": "gemma3",
    "gemma3n": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4",
    "llama3": "llama3",
    "llama4": "llama4",
    "mistral_v2v3": "mistral",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3",
    "qwen_25": "qwen2.5",
}
"""Chat templates of Axolotl's and the shipped ones that write the same text of a whole conversation."""

_LOADERS = ("json", "csv", "parquet", "arrow", "text")
_EARLIER = "a key of earlier versions of Axolotl's: name the columns in `data.columns`"
_PART = "a part of the rows: `limit` of the source takes as many, sampled from all"
_REASONING = "a reasoning has its own field in the rows, named as the chat template reads it"
_LOST: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "shards": (_PART, ()),
    "shards_idx": (_PART, ()),
    "skip": ("the first rows of a source are read too: write the others into a file", (0,)),
    "train_on_eos": (
        "the end token of a trained turn is trained on, as `turn` has it: mark other tokens by rows of token "
        "ids with `labels`",
        ("turn",),
    ),
    "train_on_eot": ("the end of a trained turn is trained on, as `turn` has it", ("turn",)),
    "drop_system_message": ("remove the system messages from the rows", (False,)),
    "split_thinking": (f"{_REASONING}: write it there", (False,)),
    "message_field_training": ("name the field `train` in the messages (false: not trained on)", ("train",)),
    "message_field_training_detail": (
        "whole messages are trained on or not (`train: false`): rows of token ids with `labels` mark parts",
        (),
    ),
    "field_system": ("Axolotl reads the column `system` whatever is written here, and so is it here", ()),
    "logprobs_field": ("probabilities of a teacher: `memtrain score-teacher` writes them", ()),
    "temperature": ("of a teacher's probabilities: `distill.temperature`", ()),
    "trust_remote_code": ("no dataset's code is run", (False,)),
    "input_transform": ("your own function: write its rows into a file", ()),
    **dict.fromkeys(
        ("conversation", "input_format", "field_human", "field_model"),
        (_EARLIER, ()),
    ),
    **dict.fromkeys(
        ("step_separator", "max_completion_length", "train_on_last_step_only"), ("of rewards for steps", ())
    ),
    **dict.fromkeys(
        ("length", "sequence_length", "min_input_id", "max_input_id", "seed"),
        ("made-up rows: write a file, or train on `builtin:arithmetic`", ()),
    ),
}
"""Keys of a dataset without a counterpart: (why, and the way out; values that say nothing)."""

_READ = (
    "path", "name", "split", "revision", "type", "data_files", "ds_type", "preprocess_shards", "field",
    "text_column", "field_messages", "field_tools", "field_chosen", "field_rejected", "roles",
    "roles_to_train", "message_property_mappings", "message_field_role", "message_field_content",
    "chat_template", "chat_template_jinja", "field_thinking", "template_thinking_key",
)  # fmt: skip
"""Keys of a dataset that are read, or say nothing."""


def listed(value: object) -> list[object]:
    """A list, or the one thing that stands for it; none where there is nothing."""
    if value in (None, "", [], {}):
        return []
    return cast(list[object], value) if isinstance(value, list) else [value]


def datasets(reading: ToolReading) -> None:
    """Sources of rows, in training and held out, and the roles that are trained on."""
    key = "datasets" if reading.get("datasets") else "pretraining_dataset"
    trained = _all_of(reading, key, held_out=False)
    if trained:
        reading.set_recipe("data.train", trained)
    held = _all_of(reading, "test_datasets", held_out=True)
    share = reading.get("val_set_size")
    if held:
        reading.set_recipe("data.eval", held)
    elif isinstance(share, float | int) and not isinstance(share, bool) and share:
        if share < 1:
            reading.set_recipe("data.eval_fraction", share)
        else:
            reading.lose("val_set_size", "a number of rows: `data.eval_fraction` is their fraction")
    if key == "pretraining_dataset" and trained:
        _pretraining(reading)
    elif any(one.get("format") == "text" for one in trained):
        _completion(reading)
    _trained_tokens(reading, trained)


def _all_of(reading: ToolReading, key: str, *, held_out: bool) -> list[dict[str, object]]:
    given = listed(reading.get(key))
    made: list[dict[str, object]] = []
    for number, one in enumerate(given):
        entry: Mapping[str, Any] = (
            cast(Mapping[str, Any], one) if isinstance(one, Mapping) else {"path": str(one)}
        )
        if key == "pretraining_dataset":
            entry = {"type": "pretrain", **entry}
        made += _Dataset(reading, entry, f"{key}[{number}]" if len(given) > 1 else key, held_out).sources()
    return made


@dataclass(slots=True)
class _Dataset:
    """An entry of `datasets`, and where it stands."""

    reading: ToolReading
    given: Mapping[str, Any]
    place: str
    held_out: bool

    def get(self, key: str) -> Any:
        value = self.given.get(key)
        return None if value == "" else value

    def lose(self, key: str, why: str) -> None:
        self.reading.lost.append(Lost(f"{self.place}.{key}", self.given.get(key), why))

    def note(self, text: str) -> None:
        self.reading.notes.append(f"{self.place}: {text}")

    def sources(self) -> list[dict[str, object]]:
        """The sources of a recipe that the entry is: one a file or a name."""
        rest: dict[str, object] = {}
        for key, value in self.given.items():
            if key in _LOST:
                why, harmless = _LOST[key]
                if not any(type(one) is type(value) and one == value for one in (None, *harmless)):
                    self.lose(key, why)
            elif key not in _READ and value is not None:
                near = difflib.get_close_matches(key, [*_READ, *_LOST], n=1)
                asks = f"; did you mean {near[0]}?" if near else ""
                self.lose(key, f"not a known key of Axolotl's datasets{asks}")
        rest |= self._rows()
        self._turns()
        self._template()
        places = self._places()
        is_local = all(_is_local(one) for one in places)
        rest = {**self._part(is_local=is_local), **rest}
        names = [] if is_local else listed(self.get("name"))
        return [
            {"source": one, **({"name": name} if name else {}), **rest}
            for one in places
            for name in names or [None]
        ]

    def _places(self) -> list[str]:
        """The files, or the dataset of the hub."""
        path, files = str(self.get("path") or ""), [str(one) for one in listed(self.get("data_files"))]
        if not files:
            if "://" in path:
                self.lose("path", "an address: download it, and name the file")
            return [path]
        if path in ("", *_LOADERS) or _is_local(path):
            return files
        self.lose(
            "data_files",
            "files of a dataset on the hub: download them and name them as sources (without that all of the "
            "dataset is read)",
        )
        return [path]

    def _part(self, *, is_local: bool) -> dict[str, object]:
        """The split, a part of it, and the revision."""
        made: dict[str, object] = {}
        asked = str(
            self.get("split") or ("test" if self.held_out and not self.reading.get("rl") else "train")
        )
        found = re.fullmatch(r"([\w.-]+)(?:\[:(\d+)\])?", asked)
        if found is None:
            whole = re.match(r"[\w.-]+", asked)
            self.lose(
                "split",
                "a part of the rows, or several splits: write them into a file, or set `limit` of the source "
                f"(here all of {whole[0] if whole else 'train'} is read)",
            )
            asked = whole[0] if whole else "train"
        else:
            asked = found[1]
            if found[2]:
                made["limit"] = int(found[2])
                self.note(f"the first {found[2]} rows there are as many here (limit), sampled from all")
        if asked != "train" and not is_local:
            made["split"] = asked
        if self.get("revision") and not is_local:
            made["revision"] = str(self.get("revision"))
        return made

    def _rows(self) -> dict[str, object]:
        """Format, columns and prompts, by the `type`."""
        kind = self.get("type")
        found = self._user_defined(cast(Mapping[str, Any], kind)) if isinstance(kind, Mapping) else None
        if found is None:
            found = self._known("" if kind is None else str(self.get("type")))
        columns = {**found.columns, **self._columns()}
        made: dict[str, object] = {"format": found.format} if found.format else {}
        if columns:
            made["columns"] = columns
        if found.prompt_format is not None:
            made["prompt_format"] = dict(found.prompt_format)
        if found.are_turns:
            made["strings_are"] = "turns"
        if found.template and "model.chat_template" not in self.reading.direct:
            self.reading.set_recipe("model.chat_template", found.template, f"{kind} writes it")
        if found.note:
            self.note(found.note)
        return made

    def _columns(self) -> dict[str, str]:
        named = {"messages": "field_messages", "tools": "field_tools", "text": "field"}
        named |= {"chosen": "field_chosen", "rejected": "field_rejected"}
        made = {ours: str(self.get(key)) for ours, key in named.items() if self.get(key)}
        if self.get("text_column") and not made.get("text"):
            made["text"] = str(self.get("text_column"))
        if self.reading.method == "dpo" and "messages" in made:
            made["prompt"] = made.pop("messages")
        return {ours: name for ours, name in made.items() if name != ours}

    def _known(self, kind: str) -> RowType:
        base, _, last = kind.partition(".")
        if self.reading.method in ("dpo", "kto", "reward"):
            return self._answers(kind, base, last or "default")
        if self.reading.method == "grpo":
            if kind:
                self.lose("type", "your own function: write its rows into a file, with a column prompt")
            return RowType()
        if kind in _ROWS or f"{kind}.load" in _ROWS:
            return _ROWS.get(kind) or _ROWS[f"{kind}.load"]
        if base == "completion" or kind in ("pretrain", "text"):
            return RowType("text")
        if kind.startswith(("chat_template", "messages")):
            return RowType("messages")
        if kind == "":
            return RowType()  # Rows of token ids, known by their columns.
        self.lose("type", "write the same prompts by `data.prompt_format`, or rows of prompt and completion")
        return RowType()

    def _answers(self, kind: str, base: str, last: str) -> RowType:
        if kind == "" or base in ("passthrough", "chat_template", "orpo"):
            return RowType()
        if base == "bradley_terry":
            self.note("the column `system` of pairs is not read here: write them as messages where it counts")
            return RowType(columns={"prompt": "input"}, are_turns=True)
        if base in ("chatml", "llama3") and last in _PAIRS:
            note = "a column `system` of such rows is not read here: write them as messages where it counts"
            return RowType(columns=_PAIRS[last], template=base, are_turns=True, note=note)
        self.lose("type", "your own function, or an unknown one: write its rows into a file")
        return RowType()

    def _user_defined(self, given: Mapping[str, Any]) -> RowType:
        """The columns and texts of a type that is a mapping."""
        if self.reading.method in ("dpo", "kto", "reward"):
            names = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
            names |= {"completion": "completion", "label": "label"}
            columns = {
                ours: str(given[f"field_{key}"]) for ours, key in names.items() if given.get(f"field_{key}")
            }
            texts = [
                key
                for key in ("prompt_format", "chosen_format", "rejected_format", "completion_format")
                if given.get(key) and given[key] != "{" + key.removesuffix("_format") + "}"
            ]
            if texts or given.get("field_system"):
                self.lose("type", "texts around prompts and answers: write them into the rows")
            return RowType(columns={ours: name for ours, name in columns.items() if ours != name})
        names = {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}
        columns = {
            ours: str(given[f"field_{key}"]) for ours, key in names.items() if given.get(f"field_{key}")
        }
        columns = {ours: name for ours, name in columns.items() if ours != name}
        system = str(given.get("system_format") or "{system}")
        texts = {
            "text": str(given.get("no_input_format") or "{instruction} "),
            "with_input": str(given.get("format") or "{instruction} {input} "),
        }
        if given.get("system_prompt"):
            before = system.replace("{system}", str(given["system_prompt"]))
            texts = {name: before + text for name, text in texts.items()}
            self.note(
                "its system_prompt stands before every prompt here, also where a row has a system column"
            )
        else:
            texts["system"] = system
        if "{instruction}" not in texts["text"]:
            # Rows are then known by their input alone.
            texts["text"] = texts["with_input"]
        if "{instruction}" not in texts["text"]:
            self.lose("type", "a format without {instruction}: write the prompts into the rows")
            return RowType("alpaca", columns)
        return RowType("alpaca", columns, texts)

    def _turns(self) -> None:
        """Fields of messages, and the words of their roles."""
        fields = self._mapping("message_property_mappings")
        legacy = {"role": self.get("message_field_role"), "content": self.get("message_field_content")}
        fields |= {name: value for name, value in legacy.items() if value}
        pair = (fields.pop("role", "role"), fields.pop("content", "content"))
        key = "message_property_mappings" if self.get("message_property_mappings") else "message_field_role"
        if pair not in (("role", "content"), ("from", "value")):
            self.lose(key, "name the fields role and content, or from and value, in the rows")
        elif any(name != theirs for name, theirs in fields.items()):
            self.lose(key, "name the other fields as the chat template does, in the rows")
        read = str(self.get("template_thinking_key") or "reasoning_content")
        if str(self.get("field_thinking") or "reasoning_content") != read:
            self.lose("field_thinking", f"the template reads it as {read}: rename the field of the messages")
        roles = self._mapping("roles")
        odd = [
            str(word)
            for role, words in roles.items()
            for word in listed(words)
            if ROLES.get(str(word)) != ROLES.get(str(role), role)
        ]
        if odd:
            self.lose("roles", f"the roles {', '.join(odd)} are not known here: rename them in the rows")

    def _mapping(self, key: str) -> dict[str, Any]:
        """A mapping of the entry; an empty one, and named, where it is none."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.lose(key, "it is no mapping")
        return dict(cast(Mapping[str, Any], value)) if isinstance(value, Mapping) else {}

    def _template(self) -> None:
        """A chat template of one dataset."""
        own, all_have = self.get("chat_template"), self.reading.get("chat_template")
        if own in (None, "tokenizer_default", all_have) and not self.get("chat_template_jinja"):
            return
        if all_have is None and str(own) in TEMPLATES:
            self.reading.set_recipe("model.chat_template", TEMPLATES[str(own)])
        else:
            key = "chat_template_jinja" if self.get("chat_template_jinja") else "chat_template"
            self.lose(key, "one template writes all rows: `model.chat_template` names a Jinja file")


def _is_local(place: str) -> bool:
    """Whether a source is a file or folder: it is here, or named like one."""
    if place.startswith(("./", "../", "/", "~")) or re.search(
        r"\.(jsonl?|csv|parquet|arrow|txt)(\.\w+)?$", place
    ):
        return True
    return bool(place) and Path(place).exists()


def _pretraining(reading: ToolReading) -> None:
    """Documents that share sequences: packed apart from each other, or end to end."""
    if reading.config.get("streaming") is not False:
        reading.set_trl("streaming", True, "pretraining_dataset")
    packs = reading.on("sample_packing")
    if packs and reading.get("pretrain_multipack_attn") is not False:
        reading.set_recipe("length.packing", "bfd_split", "pretrain_multipack_attn keeps documents apart")
        reading.notes.append(
            "pretraining_dataset: documents are cut into windows of sequence_len, which overlap by up to 256 "
            "tokens there, and do not here"
        )
        return
    reading.set_recipe("length.packing", "wrapped")
    reading.set_recipe("length.cross_document_attention", True, "documents of a sequence see each other")
    if not packs:
        reading.notes.append(
            "pretraining_dataset without sample_packing: each document is cut at sequence_len there, and the "
            "rest of it is left out; here it is trained on too, in the next sequence"
        )


def _completion(reading: ToolReading) -> None:
    """Texts longer than a sequence, which are cut into several."""
    reading.set_recipe("length.packing", "bfd_split", "texts are cut into rows of sequence_len")
    if not reading.on("sample_packing"):
        reading.notes.append(
            "type: completion: a text is cut into rows of sequence_len, each a row of the batch there; here "
            "they share sequences too (without sample_packing the nearest that keeps every token)"
        )


def _trained_tokens(reading: ToolReading, trained: list[dict[str, object]]) -> None:
    """Which tokens are in the loss: answers, unless inputs are asked for.

    Source: prompt_strategies/chat_template.py, StrategyLoader; prompt_tokenizers.py.
    """
    if reading.method != "sft":
        return
    formats = {str(one.get("format", "")) for one in trained}
    chats = "messages" in formats
    if reading.get("train_on_inputs"):
        if chats:
            reading.set_trl("assistant_only_loss", False, "train_on_inputs")
        if formats & {"alpaca", "question_answer"}:
            reading.set_trl("completion_only_loss", False, "train_on_inputs")
        return
    if not chats:
        return
    entries = [
        cast(Mapping[str, Any], one) for one in listed(reading.get("datasets")) if isinstance(one, Mapping)
    ]
    odd = False
    for number, one in enumerate(entries):
        roles = one.get("roles_to_train")
        if roles is None:
            continue
        words = [str(role) for role in listed(roles)]
        if not words or any(ROLES.get(word) != "assistant" for word in words):
            odd = True
            place = f"datasets[{number}]" if len(entries) > 1 else "datasets"
            why = (
                "turns of the assistant alone, or all turns (as here), are trained on "
                "(`data.assistant_only_loss`)"
            )
            reading.lost.append(Lost(f"{place}.roles_to_train", roles, why))
    reading.set_trl("assistant_only_loss", not odd, "datasets")
