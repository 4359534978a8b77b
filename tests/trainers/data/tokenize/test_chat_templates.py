"""Rendering: the same text as the model's own template, with the trained words marked."""

import re

import pytest

from memtrain.errors import DataError
from memtrain.recipes.formats import messages, preference, prompt, prompt_completion, text
from memtrain.recipes.formats.fields import BadRow, Names
from memtrain.recipes.reading.field_docs import sentences_of
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.tokenize.chat_templates import MARKS, NAMES, shipped_text, training_template
from memtrain.trainers.data.tokenize.render import Rendering, conversation, render

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
BYE, CIAO = {"role": "user", "content": "bye"}, {"role": "assistant", "content": "ciao"}
SYSTEM = {"role": "system", "content": "Be brief."}
TALK = (SYSTEM, HI, YO, BYE, CIAO)
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."

WRITTEN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n[yo<|im_end|>]\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n[ciao<|im_end|>]\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n[yo<|im_end|>]\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nciao<|im_end|>]\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[yo<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[ciao<|eot_id|>]",
    "llama3.1": "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[yo<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[ciao<|eot_id|>]",
    "llama4": "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
    "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n[yo<|eot|>]"
    "<|header_start|>user<|header_end|>\n\nbye<|eot|><|header_start|>assistant<|header_end|>\n\n[ciao<|eot|>]",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST][ yo </s>]"
    "<s>[INST] bye [/INST][ ciao </s>]",
    "deepseek3": "<s>Be brief.<｜User｜>hi<｜Assistant｜>[yo</s>]<｜User｜>bye<｜Assistant｜>[ciao</s>]",
    "falcon-h1": "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n[yo<|im_end|>]\n"
    "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n[ciao<|im_end|>]\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nhi</s>\n<|assistant|>\n[yo</s>]\n"
    "<|user|>\nbye</s>\n<|assistant|>\n[ciao</s>]\n",
    "gemma4": "<s><|turn>system\nBe brief.<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\n[yo<turn|>]\n"
    "<|turn>user\nbye<turn|>\n<|turn>model\n[ciao<turn|>]\n",
    "gemma3": "<s><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n"
    "<start_of_turn>model\n[yo<end_of_turn>]\n"
    "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n[ciao<end_of_turn>]\n",
    "mistral": "<s>[INST] hi[/INST][ yo</s>][INST] bye[/INST][ ciao</s>]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n[yo<|end|>]\n"
    "<|user|>\nbye<|end|>\n<|assistant|>\n[ciao<|end|>]\n</s>",
    "phi4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>[yo<|im_end|>]<|im_start|>user<|im_sep|>bye<|im_end|>"
    "<|im_start|>assistant<|im_sep|>[ciao<|im_end|>]",
}
"""A conversation as each family's published format writes it; the trained text in brackets."""

ORIGINALS = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "qwen2.5": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + QWEN_SYSTEM
    + "<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
    "'<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + "
    "m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "phi4": "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
}
"""Templates without marks, in the words of their families."""


def rendering(template: str, **changed) -> Rendering:
    said = {"end_token": None, "completion_only": True, "assistant_only": False} | changed
    return Rendering(chat_template=template, special_tokens=SPECIALS, **said)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_shipped_template_writes_and_marks_as_its_family(name):
    wanted = WRITTEN[name].replace("[INST]", "\1").replace("[/INST]", "\2")
    said, spans = conversation(TALK, (), rendering(shipped_text(name)), spans_wanted=True)
    assert said == wanted.replace("[", "").replace("]", "").replace("\1", "[INST]").replace("\2", "[/INST]")
    loss_spans = [part.split("]")[0] for part in wanted.split("[")[1:]]
    assert [said[start:end] for start, end in spans] == loss_spans


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_template_marks_every_answer(name):
    talk = TALK[1:]
    said, spans = conversation(talk, (), rendering(shipped_text(name)), spans_wanted=True)
    assert len(spans) == 2
    assert ["yo" in said[slice(*spans[0])], "ciao" in said[slice(*spans[1])]] == [True, True]
    head, _ = conversation(talk[:-1], (), rendering(shipped_text(name)), generation_prompt=True)
    assert said.startswith(head)
    assert len(head) == spans[1][0], "what is learnt begins where generation begins"


@pytest.mark.parametrize("name", ORIGINALS)
def test_a_template_without_marks_is_stood_in_for_by_its_family(name):
    chosen = training_template(ORIGINALS[name], SPECIALS)
    assert chosen == shipped_text(name)
    for talk in (TALK[1:], TALK):
        if name == "gemma" and talk is TALK:
            continue
        own = conversation(talk, (), rendering(ORIGINALS[name]))
        assert conversation(talk, (), rendering(chosen)) == own


def test_a_template_with_marks_is_kept():
    own = shipped_text("phi4") + " "
    assert MARKS.search(own)
    assert training_template(own, SPECIALS) == own


def test_the_reference_lists_every_shipped_template():
    listed = sentences_of(Model, "chat_template").partition("own: ")[2].partition(". Each")[0]
    assert listed.split(", ") == list(NAMES)


@pytest.mark.parametrize("name", ["deepseek3", "llama2"])
def test_a_role_that_a_template_does_not_write_is_refused_and_no_answer(name):
    """Its text would be trained on as the assistant's."""
    tool = {"role": "tool", "content": "2"}
    with pytest.raises(BadRow):
        conversation((HI, tool, BYE, CIAO), (), rendering(shipped_text(name)))


def test_an_unknown_template_is_refused_with_the_way_out():
    with pytest.raises(DataError) as error:
        training_template("{% for m in messages %}{{ m.content[: 4 * loop.revindex] }}{% endfor %}", SPECIALS)
    assert error.value.faults[0].where == "model.chat_template"
    assert "{% generation %} ... {% endgeneration %}" in error.value.faults[0].fix
    assert "qwen3" in error.value.faults[0].fix


def test_where_a_stand_in_writes_otherwise_the_own_template_is_taken():
    own = ORIGINALS["chatml"].replace("message['content'] +", "message['content'].replace('ö', 'oe') +")
    assert training_template(own, SPECIALS) == shipped_text("chatml")
    asked = rendering(shipped_text("chatml"), assistant_only=True, own_template=own)
    row = {"messages": [HI, {"role": "assistant", "content": "schön"}]}
    (piece,) = render(messages.parse(row, Names()), asked)
    assert piece.text == conversation(tuple(row["messages"]), (), rendering(own))[0]
    assert [piece.text[slice(*span)] for span in piece.loss_spans] == ["schoen<|im_end|>"]


def test_where_a_stand_in_has_no_tools_the_own_template_is_taken():
    """Plain rows agree with the shipped template, which speaks of no tools; every tool row was refused."""
    calls = (
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}",
        "{% if tools %}{{ tools | tojson }}{% endif %}",
    )
    own = (
        calls[1]
        + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        + calls[0]
        + "{{ '<|im_end|>\n' }}{% endfor %}"
        + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    stands_in = training_template(own, SPECIALS)
    assert stands_in != own
    asked = rendering(stands_in, assistant_only=True, own_template=own)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    (piece,) = render(messages.parse({"messages": turns, "tools": [{"name": "add"}]}, Names()), asked)
    first, second = (piece.text[slice(*span)] for span in piece.loss_spans)
    assert first.startswith('[{"type": "function"')
    assert first.endswith("]<|im_end|>")
    assert second == "It is 2.<|im_end|>"


def test_strings_end_with_the_end_token_once():
    asked = rendering("", end_token="</s>")
    (piece,) = render(prompt_completion.parse({"prompt": "a b", "completion": " c"}, Names()), asked)
    assert (piece.text, piece.cut, piece.loss_spans) == ("a b c</s>", 3, ((3, 9),))
    (piece,) = render(prompt_completion.parse({"prompt": "a", "completion": " c</s>"}, Names()), asked)
    assert piece.text == "a c</s>"
    (piece,) = render(text.parse({"text": "abc"}, Names()), asked)
    assert (piece.text, piece.loss_spans) == ("abc</s>", ((0, 7),))
    (piece,) = render(prompt.parse({"prompt": "abc"}, Names()), asked)
    assert (piece.text, piece.cut, piece.loss_spans) == ("abc", 3, ())


def test_the_whole_row_is_trained_on_when_asked():
    asked = rendering("", completion_only=False)
    (piece,) = render(prompt_completion.parse({"prompt": "a b", "completion": " c"}, Names()), asked)
    assert (piece.cut, piece.loss_spans) == (3, ((0, 5),))


def test_the_completion_of_a_conversation_begins_after_the_generation_prompt():
    row = prompt_completion.parse({"prompt": [HI], "completion": [YO, BYE, CIAO]}, Names())
    (piece,) = render(row, rendering(shipped_text("chatml")))
    assert piece.text[piece.cut :].startswith("yo<|im_end|>")
    assert piece.loss_spans == ((piece.cut, len(piece.text)),)
    (piece,) = render(row, rendering(shipped_text("chatml"), assistant_only=True))
    assert [piece.text[slice(*span)] for span in piece.loss_spans] == ["yo<|im_end|>", "ciao<|im_end|>"]


def test_both_answers_of_a_pair_follow_the_same_prompt():
    pair = preference.parse({"prompt": [HI], "chosen": [YO], "rejected": [CIAO]}, Names())
    chosen, rejected = render(pair, rendering(shipped_text("llama3")))
    assert chosen.text[: chosen.cut] == rejected.text[: rejected.cut]
    assert (chosen.text[chosen.cut :], rejected.text[rejected.cut :]) == ("yo<|eot_id|>", "ciao<|eot_id|>")


def test_what_the_template_refuses_is_a_fault_of_the_row():
    row = messages.parse({"messages": [HI, BYE]}, Names())
    with pytest.raises(BadRow, match="refuses the conversation: Conversation roles must alternate"):
        render(row, rendering(shipped_text("gemma")))


def test_tools_that_a_template_never_speaks_of_are_a_fault_of_the_row():
    """They would be lost without a word: no tool in the prompt, no call in the answer."""
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = (HI, {"role": "assistant", "content": "", "tool_calls": [call]})
    plain = Rendering(shipped_text("chatml"), SPECIALS, None, completion_only=False, assistant_only=False)
    with pytest.raises(BadRow, match="does not render tools:"):
        conversation((HI, YO), tools, plain)
    with pytest.raises(BadRow, match="does not render tool_calls:"):
        conversation(calls, (), plain)
    knows = Rendering(shipped_text("qwen3"), SPECIALS, None, completion_only=False, assistant_only=False)
    assert '"name": "add"' in conversation((HI, YO), tools, knows)[0]
    assert "<tool_call>" in conversation(calls, tools, knows)[0]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "2"}
MESSAGES_OF = {
    "plain": [HI, YO],
    "turns with a system prompt": [*TALK],
    "reasoning": [HI, YO | {"reasoning_content": "Hm."}, BYE, CIAO | {"reasoning_content": "So."}],
    "a call": [HI, CALLS],
    "a call and its answer": [HI, CALLS, TOLD, YO],
    "two calls at once": [HI, CALLS | {"tool_calls": [CALL, CALL]}, TOLD, TOLD, YO],
    "words and a call": [HI, CALLS | {"content": "I add."}, TOLD, YO],
    "calls in two turns": [SYSTEM, HI, CALLS, TOLD, YO, BYE, CALLS, TOLD, CIAO],
}
TOOLS_OTHERWISE = {
    "qwen2.5": ("# Tools", "# Functions"),
    "qwen3": ("<tool_call>", "<call>"),
    "qwen3-instruct": ("<tool_response>", "<result>"),
    "llama3.1": ('"parameters": ', '"arguments": '),
}
"""Families with tools, and what of theirs a model's own template writes otherwise."""


@pytest.mark.parametrize("kind", MESSAGES_OF)
@pytest.mark.parametrize("name", TOOLS_OTHERWISE)
@pytest.mark.parametrize("has_tools", [False, True])
def test_an_own_template_that_writes_only_tools_otherwise_is_followed(name: str, kind: str, has_tools: bool):
    """The shipped one stands in for plain rows; rows with tools, which were refused, have the own text, and
    the turns are those that the shipped one marks."""
    one, other = TOOLS_OTHERWISE[name]
    own = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", shipped_text(name)).replace(one, other)
    stands_in = training_template(own, SPECIALS)
    assert (own != shipped_text(name), MARKS.search(stands_in) is not None) == (True, True)
    asked = rendering(stands_in, assistant_only=True, own_template=own, by_default=True)
    row = {"messages": MESSAGES_OF[kind]} | ({"tools": [{"name": "add"}]} if has_tools else {})
    parsed = messages.parse(row, Names())
    if (name, kind) == ("llama3.1", "two calls at once"):  # one of them was lost
        with pytest.raises(BadRow, match="only supports single tool-calls at once"):
            render(parsed, asked)
        return
    shipped = rendering(shipped_text(name))
    marked, spans = conversation(parsed.messages, parsed.tools, shipped, spans_wanted=True)
    (piece,) = render(parsed, asked)
    assert piece.text == conversation(parsed.messages, parsed.tools, rendering(own))[0]
    learnt = [piece.text[slice(*span)] for span in piece.loss_spans]
    assert learnt == [marked[slice(*span)].replace(one, other) for span in spans]
