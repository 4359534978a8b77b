"""The `data:` section: which rows, in which format, and which of their tokens are trained on."""

from __future__ import annotations

import re
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from memtrain.recipes.sections.base import PositiveInt, Section, one_or_many

Format = Literal[
    "auto",
    "text",
    "prompt_completion",
    "messages",
    "alpaca",
    "question_answer",
    "ids",
    "preference",
    "unpaired",
    "prompt",
]

TextUnit = Literal["line", "paragraph", "document"]
StringsAre = Literal["text", "turns"]


class Columns(Section):
    """The user's column names, where they differ from memtrain's."""

    text: str | None = None
    """Column of plain text."""
    prompt: str | None = None
    """Column of the prompt (a string, or a list of messages)."""
    completion: str | None = None
    """Column of the completion."""
    messages: str | None = None
    """Column of the messages (`role`, `content`; or `from`, `value`)."""
    tools: str | None = None
    """Column of the tool definitions."""
    ids: str | None = None
    """Column of token ids."""
    labels: str | None = None
    """Column of labels beside `ids`: -100 where a token is not trained on."""
    chosen: str | None = None
    """Column of the preferred answer."""
    rejected: str | None = None
    """Column of the other answer."""
    margin: str | None = None
    """Column of the margin of a pair."""
    label: str | None = None
    """Column of the verdict of an unpaired row: true is desirable."""
    question: str | None = None
    """Column of the user's turn; with `answer`, two turns of a conversation."""
    answer: str | None = None
    """Column of the assistant's turn after `question`."""
    instruction: str | None = None
    """Column of Alpaca's instruction, the user's turn; with `output`."""
    input: str | None = None
    """Column of Alpaca's input, which follows the instruction."""
    output: str | None = None
    """Column of Alpaca's output, the assistant's turn."""
    system: str | None = None
    """Column of the system message (rows of messages, questions and answers, Alpaca's)."""
    history: str | None = None
    """Column of Alpaca's earlier turns: `[[question, answer], ...]`."""


class PromptFormat(Section):
    """Text of a prompt, in place of the chat template's turns: of rows with `instruction`, `output` or
    `question`, `answer`. The answer follows it as it stands, and then the end token."""

    text: str
    """The prompt; `{instruction}` (or `{question}`) and `{input}` stand for the row's columns."""

    with_input: str | None = None
    """The same for rows whose `input` is not empty. If not set: `text`."""

    system: str | None = None
    """Text before it where the row has a `system` column, for which `{system}` stands. If not set: such a
    column is not used."""

    @model_validator(mode="after")
    def _asks_something(self) -> PromptFormat:
        if not re.search(r"\{(instruction|question)\}", self.text):
            raise ValueError(
                "text shows nothing of the row; write {instruction} (or {question}) where the row's text goes"
            )
        return self

    @property
    def texts(self) -> dict[str, str]:
        """The texts that are set, by name."""
        return {name: str(text) for name, text in self.model_dump(exclude_none=True).items()}


class Source(Section):
    """A source of rows."""

    source: str
    """A file, a folder or a glob (JSONL, JSON, CSV, text, also packed with gzip, bzip2, xz or zstd; Parquet,
    Arrow), a hub id, or `builtin:arithmetic`. Files of a folder that are not read are named."""

    name: str | None = None
    """Configuration name of a hub dataset, or of a folder whose README.md lists configurations (`configs:`).
    Without it, the default one. Refused of any other source."""

    split: str = "train"
    """Split of a hub dataset, or of a folder that has `train`, `test` files or whose README.md lists splits.
    Refused of files that are of no split: they would be read whole."""

    revision: str | None = None
    """Branch, tag or commit of a hub dataset. Refused of any other source."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of this source in the mixture, relative to the others: rows are sampled (never just the first
    ones), different ones in each of eight epochs, then the same again; above one pass, rows repeat. If no
    source has one: every row of every source once."""

    limit: PositiveInt | None = None
    """Use at most this many rows, sampled with the seed."""

    format: Format = "auto"
    """Format of the rows of this source, when it differs from `data.format`."""

    columns: Columns | None = None
    """Column names of this source, when they differ from `data.columns`."""

    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template for the rows of this source, beside those of the same key in `data`."""

    system_prompt: str | None = None
    """System message of this source's conversations, when it differs from `data.system_prompt`."""

    text_unit: TextUnit | None = None
    """Unit of a row in the text files of this source, when it differs from `data.text_unit`."""

    strings_are: StringsAre | None = None
    """What strings of this source are, when it differs from `data.strings_are`."""

    prompt_format: PromptFormat | None = None
    """Text of this source's prompts, when it differs from `data.prompt_format`."""


def source_of(value: object) -> object:
    """A list of sources from a string, a mapping, or a list of either."""
    items = one_or_many(value)
    if not isinstance(items, tuple):
        return items
    several: tuple[object, ...] = items  # pyright: ignore[reportUnknownVariableType]
    return tuple({"source": item} if isinstance(item, str) else item for item in several)


Sources = Annotated[tuple[Source, ...], BeforeValidator(source_of)]


class HeldOutSource(Source):
    """A source of held-out rows."""

    set: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Name of the evaluation set of these rows. The short form is a mapping: `eval: {math: math.jsonl, chat:
    [a.jsonl, b.jsonl]}`. Every metric is then given by set as well (`math/loss`)."""


def held_out_sources(value: object) -> object:
    """A list of sources as `source_of`, or from a mapping of names of evaluation sets to sources."""
    if not isinstance(value, dict):
        return source_of(value)
    named = cast(dict[str, object], value)
    if not named or named.keys() & HeldOutSource.model_fields.keys():
        return source_of(named)
    return tuple(
        {"set": name, **cast(dict[str, object], one)} if isinstance(one, dict) else one
        for name, sources in named.items()
        for one in cast(tuple[object, ...], source_of(sources))
    )


HeldOutSources = Annotated[tuple[HeldOutSource, ...], BeforeValidator(held_out_sources)]


class Data(Section):
    """Data of the run: sources, formats and columns of the rows."""

    train: Annotated[Sources, Field(min_length=1)]
    """Source of the rows, or a list of sources (a mixture)."""

    eval: HeldOutSources = ()
    """Source or sources of the held-out rows, when these are rows of their own; or several sets of them, each
    with its name: `{math: math.jsonl, chat: chat.jsonl}`."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training rows that is set aside for evaluation, sampled with the seed. Rows of one
    prompt (pairs, rows with a verdict, prompts of online methods) go to one side together."""

    format: Format = "auto"
    """Format of a row. `auto` decides by the columns, by the rules in docs/recipe.md, from the first row."""

    columns: Columns = Columns()
    """Column names, where yours differ: `{question: ask, answer: reply}`. `question` and `answer` (or
    Alpaca's `instruction`, `input`, `output`) are turns of a conversation, which the chat template writes;
    `prompt` and `completion` are text as it stands, unless `strings_are` says otherwise."""

    strings_are: StringsAre | None = None
    """Strings in the columns `prompt`, `completion`, `chosen` and `rejected`. `turns`: the user's turn and
    the assistant's, which the chat template writes (`system_prompt` stands before them). `text`: text as it
    stands, one after the other, without a separator. If not set: text, and where the tokenizer has a chat
    template the run says that it is not used."""

    prompt_format: PromptFormat | None = None
    """Text of the prompts of rows with `instruction` or `question`: `{text: "Q: {question}\\nA: "}`. If not
    set: they are turns of a conversation, which the chat template writes."""

    text_unit: TextUnit = "line"
    """Unit of a row in a .txt file: `line` (blank lines are passed over), `paragraph` (up to a blank line),
    or `document` (the whole file, cut after a paragraph where it is longer than 32,768 characters). A longer
    unit is a longer row: more context to learn from, and more memory unless `length` cuts it."""

    completion_only_loss: bool | None = None
    """Train on the completion only. If not set: yes for prompt-completion rows."""

    assistant_only_loss: bool | None = None
    """Train on the assistant's turns only (rows of messages). If not set: yes, of `messages` and of
    completions in which others speak too. The turns are found by the generation marks of the chat template,
    by the text that it writes for each beginning of the conversation, or by what it writes before and after
    each turn; where they cannot be found, the run is refused. false: all turns. A message with `weight: 0`
    or `train: false` is never trained on, with this setting or without."""

    last_turn_only_loss: bool = False
    """Train on the assistant's last turn only (rows of messages)."""

    chat_template_kwargs: dict[str, JsonValue] = {}
    """Arguments of the chat template: `{enable_thinking: false}`. Those of a source override them, and
    those of a row (a column `chat_template_kwargs`) override both."""

    system_prompt: str | None = None
    """System message for every conversation that has none."""

    end_token: bool = True
    """End every row with the end-of-sequence token, and train on it, where the format does not end by
    itself."""

    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used stops the run, or is left out and counted."""

    streaming: bool = False
    """Read hub datasets over the network and copy only their tokens to the disk (4 bytes a token). A
    `limit` then takes rows from shuffled files through a buffer of 10,000 rows, not from the whole."""

    processes: PositiveInt = 1
    """Processes that tokenize."""

    cache_dir: str | None = None
    """Folder of tokenized rows. If not set: `$MEMTRAIN_CACHE`, else ~/.cache/memtrain."""

    @model_validator(mode="after")
    def _one_held_out(self) -> Data:
        if self.eval and self.eval_fraction:
            raise ValueError(
                "held-out rows are set twice; set data.eval (rows of their own) or data.eval_fraction, "
                "not both"
            )
        named = [source.set for source in self.eval]
        if any(named) and not all(named):
            raise ValueError("only some sources of data.eval have a set; name the set of all, or of none")
        weights = [source.weight for source in self.train]
        if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
            raise ValueError("only some sources of data.train have a weight; give it to all, or to none")
        return self

    @property
    def holds_out(self) -> bool:
        """Whether the run has held-out rows, which it evaluates."""
        return bool(self.eval or self.eval_fraction)

    @property
    def eval_sets(self) -> tuple[str, ...]:
        """Names of the evaluation sets, in their order; none where held-out rows have no names."""
        return tuple(dict.fromkeys(source.set for source in self.eval if source.set is not None))
