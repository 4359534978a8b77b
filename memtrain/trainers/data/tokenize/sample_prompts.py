"""The prompts of `eval.samples` as token ids: rendered as a row's prompt would be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memtrain.errors import DataError
from memtrain.memory.plan.plan import SamplePrompt
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.formats.prompt import Prompt
from memtrain.recipes.sections.data import Data
from memtrain.trainers.data.tokenize.chat import specials_of, template_of
from memtrain.trainers.data.tokenize.encode import Encoder
from memtrain.trainers.data.tokenize.render import Rendering, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

KEY = "eval.samples.prompts"


def sample_prompts(
    prompts: tuple[str, ...], data: Data, tokenizer: PreTrainedTokenizerFast, *, is_chat: bool
) -> tuple[SamplePrompt, ...]:
    """The prompts with their tokens: of a run on conversations, a user's turn each, else plain text.

    Raises: DataError when the chat template refuses a prompt, or one has no token.
    """
    rendering = Rendering(
        chat_template=template_of(tokenizer),
        special_tokens=specials_of(tokenizer),
        end_token=None,
        completion_only=True,
        assistant_only=False,
        template_kwargs=dict(data.chat_template_kwargs),
    )
    pieces = []
    for number, text in enumerate(prompts):
        try:
            pieces += render(
                Prompt(prompt=_asked(text, data, is_chat=is_chat), tools=(), columns={}), rendering
            )
        except BadRow as error:
            raise DataError(f"prompt {number + 1} cannot be rendered: {error}", KEY, "change it") from None
    made = Encoder(tokenizer.backend_tokenizer.to_str()).encode(pieces)
    empty = [number for number, one in enumerate(made, start=1) if not len(one.ids)]
    if empty:
        raise DataError(f"prompt {empty[0]} has no token", KEY, "write at least a word, or remove it")
    return tuple(
        SamplePrompt(text=text, ids=tuple(int(one) for one in encoded.ids))
        for text, encoded in zip(prompts, made, strict=True)
    )


def _asked(text: str, data: Data, *, is_chat: bool) -> Any:
    if not is_chat:
        return text
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return (*system, {"role": "user", "content": text})
