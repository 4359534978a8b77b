"""Facts of a recipe's chat template before a row is read: its arguments, its marks, the ends of turns.

No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memtrain.errors import DataError
from memtrain.memory.plan.plan import TurnEnd
from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.formats.fields import Messages
from memtrain.recipes.sections.data import Data, Source
from memtrain.trainers.data.tokenize.render import Rendering, conversation
from memtrain.trainers.data.tokenize.turns import turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RESERVED = (
    "messages",
    "tools",
    "documents",
    "chat_template",
    "conversations",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""Variables that memtrain gives the template itself."""


def template_of(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """The chat template of a tokenizer, its default one where it has several."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def specials_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Special tokens by name (`eos_token`, ...), as templates use them."""
    return {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)
    }


def template_kwargs(data: Data, source: Source) -> dict[str, Any]:
    """Arguments of the chat template for the rows of a source."""
    return {**data.chat_template_kwargs, **source.chat_template_kwargs}


def check_template_kwargs(given: Mapping[str, Any], template: str | None, is_chat: bool) -> None:
    """Raise DataError for arguments that nothing reads, or that are not the user's to give."""
    where = "data.chat_template_kwargs"
    if not given:
        return
    if not is_chat or template is None:
        raise DataError(
            f"{where} has no effect: no row of the source is a conversation",
            where,
            "remove it; the chat template is not used for strings",
        )
    for name in given:
        if name in RESERVED:
            raise DataError(f"{where} holds '{name}', which memtrain sets itself", where, f"remove '{name}'")
        if name not in template:
            raise DataError(
                f"the chat template never reads '{name}'", where, f"remove '{name}', or correct its spelling"
            )


def turn_end_of(tokenizer: PreTrainedTokenizerFast, given: Mapping[str, Any]) -> TurnEnd | None:
    """The special token that ends the assistant's turns; None where the template writes none."""
    template = template_of(tokenizer)
    if template is None:
        return None
    rendering = Rendering(
        template,
        specials_of(tokenizer),
        None,
        completion_only=False,
        assistant_only=False,
        template_kwargs=dict(given),
    )

    def render(messages: Messages, generation_prompt: bool) -> str:
        return conversation(messages, (), rendering, generation_prompt=generation_prompt)[0]

    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    token = turn_end(render, list(added))
    if token is None:
        return None
    eos = tokenizer.eos_token
    return TurnEnd(token=token, token_id=added[token], eos_token=str(eos) if eos is not None else None)


def trained_words(made_of: dict[str, Any]) -> str:
    """Parts of a store's rows that are trained on; empty for prompts, of which nothing is."""
    rendering, kind = made_of["rendering"], made_of["kind"]
    forms = {FORMS[reading["form"]].stored_as or reading["form"] for reading in made_of["readings"]}
    if kind == "prompt":
        return ""
    if rendering["last_turn_only"]:
        return "the last turn of the assistant only (data.last_turn_only_loss)"
    if rendering["assistant_only"] and not rendering["by_default"]:
        return "the assistant's turns (data.assistant_only_loss)"
    if FORMS[kind].num_answers:
        return "the answers"
    words = {
        "messages": "the assistant's turns (data.assistant_only_loss: false trains on all)"
        if rendering["assistant_only"]
        else "all turns (data.assistant_only_loss: false)",
        "prompt_completion": "completions only"
        if rendering["completion_only"]
        else "prompts and completions",
        "text": "whole rows",
        "ids": "whole rows, or the tokens that their labels select",
    }
    kinds = {"messages": "conversations", "prompt_completion": "prompts with completions", "text": "texts"}
    if len(forms) == 1:
        return "".join(words[form] for form in words if form in forms)
    return "; ".join(f"of {kinds.get(form, form)} {words[form]}" for form in words if form in forms)
