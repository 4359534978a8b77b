"""The tokenizer of `builtin:tiny`: a byte-level BPE of 1,024 tokens, trained on `builtin:arithmetic`.

The trained files lie beside this module in `tiny_tokenizer_files/`; `python -m
memtrain.trainers.data.tokenize.tiny_tokenizer` writes them again. Any text makes the round trip: every byte
is a
token. Digits are tokens of their own, so that arithmetic can be learnt. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memtrain.trainers.data.sources import builtin_arithmetic as arithmetic

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FOLDER = Path(__file__).parent / "tiny_tokenizer_files"
NUM_TOKENS = 1024
SPECIAL_TOKENS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
TRAINING_ROWS = 2000
WORD_REPEATS = 20
"""Repeats of each common word: rarer than the arithmetic, more often than its fragments."""

COMMON_WORDS = """
the of and to in a is that for it was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now people
my made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should
home big give air line set own under read last never us left end along while might next sound below saw
something thought both few those always looked show large often together asked house world going want school
important until form food keep children feet land side without boy once animal life enough took sometimes four
head above kind began almost live page got earth need far hand high year mother light parts country father let
night following picture being study second eyes soon times story boys since white days ever paper hard near
sentence better best across during today others however sure means knew try told young miles sun ways thing
whole hear example heard several change answer room against top turned learn point city play toward five using
himself usually money seen car morning given trees problem total cost dollars each store friend friends sold
bought dog cat water table green blue black red brown summer winter spring morning evening travel train bus
road street river mountain machine computer language model write reader letter message music dance garden
flower bread cheese fruit sugar coffee kitchen window market school teacher student doctor hours minutes week
price half twice times more less left per cent question user assistant system
"""

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def training_texts() -> Iterator[str]:
    """Training texts of the tokenizer."""
    for row in arithmetic.rows(TRAINING_ROWS, arithmetic.SPLITS["train"], "text"):
        yield str(row["text"])
    for word in dict.fromkeys(COMMON_WORDS.split()):
        yield f" {word}" * WORD_REPEATS


def trained() -> Tokenizer:
    """The tokenizer, trained anew: the same every time."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_texts(), trainer)
    return tokenizer


def write(folder: Path) -> None:
    """Write the tokenizer in the Hugging Face format."""
    folder.mkdir(parents=True, exist_ok=True)
    trained().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    write(FOLDER)
