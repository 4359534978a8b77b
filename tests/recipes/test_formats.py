"""Formats: one row to one typed example, by a rule that is the same everywhere."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import DataError
from memtrain.recipes.formats import (
    alpaca,
    ids,
    messages,
    preference,
    prompt,
    prompt_completion,
    question_answer,
    text,
    unpaired,
)
from memtrain.recipes.formats.detect import METHOD_FORMATS, detect, used_columns
from memtrain.recipes.formats.fields import BadRow, Names, names_of
from memtrain.recipes.formats.json_text import first_doubled
from memtrain.recipes.formats.system_prompt import with_system
from memtrain.recipes.sections.data import Columns

NAMES = Names()
HI = {"role": "user", "content": "hi"}
YO = {"role": "assistant", "content": "yo"}
NO = {"role": "assistant", "content": "no"}


def found(row: dict, method: str = "sft", declared="auto", **columns: str) -> str:
    return detect(row, Columns(**columns), declared, METHOD_FORMATS[method], "d.jsonl:1")[0].name


@pytest.mark.parametrize(
    ("row", "method", "name"),
    [
        ({"text": "a"}, "sft", "text"),
        ({"prompt": "a", "completion": "b"}, "sft", "prompt_completion"),
        ({"prompt": "a", "completion": "b", "template": "c"}, "sft", "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "sft", "alpaca"),
        ({"question": "a", "answer": "b"}, "sft", "question_answer"),
        ({"messages": [HI, YO]}, "sft", "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "sft", "messages"),
        ({"prompt": "hi", "messages": [HI, YO]}, "sft", "messages"),
        ({"input_ids": [1, 2]}, "sft", "ids"),
        ({"text": "a", "messages": None}, "sft", "text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo", "preference"),
        ({"chosen": "b", "rejected": "c", "messages": [HI]}, "dpo", "preference"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto", "unpaired"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "kto", "preference"),
        ({"prompt": "a", "answer": "b"}, "grpo", "prompt"),
        ({"question": "a", "answer": "b"}, "grpo", "question_answer"),
        ({"instruction": "a", "input": "", "output": "b"}, "ppo", "alpaca"),
    ],
)
def test_the_columns_say_the_format(row, method, name):
    assert found(row, method) == name


def test_user_columns_say_the_format():
    assert (
        found({"question": "a", "answer": "b"}, prompt="question", completion="answer") == "prompt_completion"
    )
    row = {"instruction": "a", "input": "b", "output": "c"}
    assert found(row, prompt="instruction", completion="output") == "prompt_completion"


def test_renamed_turns_stay_turns():
    assert found({"inp": "a", "out": "b"}, question="inp", answer="out") == "question_answer"
    named = {"instruction": "i", "input": "j", "output": "o", "system": "s"}
    assert found({"i": "a", "j": "b", "o": "c", "s": "d"}, **named) == "alpaca"
    # What is named says the format beside columns of another.
    row = {"inp": "a", "out": "b", "text": "c"}
    assert found(row, question="inp", answer="out") == "question_answer"
    assert found({"question": "a", "answer": "b"}, "grpo", prompt="question") == "prompt"
    with pytest.raises(DataError, match="fit several formats: prompt and question_answer"):
        found({"prompt": "a", "question": "a", "answer": "b"}, "grpo")


def test_rows_of_two_formats_are_refused():
    with pytest.raises(DataError) as error:
        found({"text": "a", "messages": [HI]})
    assert error.value.text() == (
        "error: the columns text, messages fit several formats: messages and text\n"
        "   at: d.jsonl:1\n"
        "  try: choose one: data.format: messages"
    )
    assert found({"text": "a", "messages": [HI]}, declared="text") == "text"


def test_familiar_column_names_are_proposed_and_never_taken():
    with pytest.raises(DataError, match=r"data.columns: \{question: query, answer: response\}$"):
        found({"query": "a", "response": "b"})
    with pytest.raises(DataError, match=r"data.columns: \{prompt: problem\}; and data.strings_are: turns"):
        found({"problem": "a"}, "grpo")
    with pytest.raises(DataError, match=r"data.columns: \{output: response\}$"):
        found({"instruction": "a", "input": "", "response": "b"})


def test_verdicts_are_not_trained_on_as_completions_unless_said():
    row = {"prompt": "a", "completion": "b", "label": False}
    with pytest.raises(DataError, match="if that is intended, set data.format: prompt_completion"):
        found(row)
    assert found(row, declared="prompt_completion") == "prompt_completion"


def test_a_mapped_column_must_be_there():
    with pytest.raises(
        DataError, match=r"data.columns.prompt is 'query', and the first row has no such column"
    ):
        found({"prompt": "a", "completion": "b"}, prompt="query")


def test_string_prompts_with_message_answers_give_one_answer_in_every_process():
    """TRL flips with PYTHONHASHSEED on such rows: a set of columns is asked for an arbitrary one."""
    code = (
        "from memtrain.recipes.formats import preference, prompt_completion\n"
        "from memtrain.recipes.formats.fields import BadRow, Names\n"
        "row = {'prompt': 'q', 'completion': [{'role': 'assistant', 'content': 'a'}]}\n"
        "try: print(prompt_completion.parse(row, Names()))\n"
        "except BadRow as wrong: print(wrong.what)\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert said == {
        "strings and messages are mixed in one row: 'prompt' is a string, 'completion' is messages\n"
    }


def test_an_instruction_row_is_a_conversation_of_all_its_columns():
    row = {
        "instruction": "Add.",
        "input": "1 + 1",
        "output": "2",
        "system": "Be short.",
        "history": [["hi", "yo"]],
    }
    made = alpaca.parse(row, NAMES)
    assert made.prompt == (
        {"role": "system", "content": "Be short."},
        HI,
        YO,
        {"role": "user", "content": "Add.\n1 + 1"},
    )
    assert made.completion == ({"role": "assistant", "content": "2"},)
    assert alpaca.parse({"instruction": "hi", "input": None, "output": "yo"}, NAMES).prompt == (HI,)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "", "input": "", "output": "b"}, "'instruction' and 'input' are both empty"),
        ({"instruction": 3, "output": "b"}, "column 'instruction' is a number"),
        ({"instruction": "a", "input": ["x"], "output": "b"}, "column 'input' is a list"),
        ({"instruction": "a", "output": "b", "history": "x"}, "column 'history' is a string"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, r"history\[0\] is \['x'\], not a question"),
    ],
)
def test_a_wrong_instruction_row_is_bad(row, words):
    with pytest.raises(BadRow, match=words):
        alpaca.parse(row, NAMES)


def test_a_question_and_its_answer_are_two_turns():
    made = question_answer.parse({"question": "hi", "answer": "yo"}, NAMES)
    assert (made.prompt, made.completion) == ((HI,), (YO,))
    with pytest.raises(BadRow, match="column 'question' is empty"):
        question_answer.parse({"question": "", "answer": "yo"}, NAMES)


def test_a_system_prompt_goes_before_conversations_that_have_none():
    system = {"role": "system", "content": "Be kind."}
    asked = question_answer.parse({"question": "hi", "answer": "yo"}, NAMES)
    assert with_system(asked, "Be kind.").prompt == (system, HI)
    assert with_system(asked, None) is asked
    chat = messages.parse({"messages": [{"role": "system", "content": "own"}, HI, YO]}, NAMES)
    assert with_system(chat, "Be kind.") is chat
    with pytest.raises(BadRow, match="not a conversation"):
        with_system(text.parse({"text": "a"}, NAMES), "Be kind.")


def test_the_system_column_of_a_conversation_is_its_first_message():
    row = {"conversations": [{"from": "human", "value": "hi"}], "system": "Be brief."}
    read = messages.parse(row, names_of(Columns(), list(row)))
    assert read.messages == ({"role": "system", "content": "Be brief."}, HI)
    assert messages.parse({"messages": list(read.messages), "system": "Be brief."}, NAMES) == read
    assert messages.parse({"messages": [HI], "system": ""}, NAMES).messages == (HI,)


def test_text_is_a_string():
    assert text.parse({"text": "a"}, NAMES).text == "a"
    with pytest.raises(BadRow, match="column 'text' is a number \\(3\\), not a string"):
        text.parse({"text": 3}, NAMES)
    with pytest.raises(BadRow, match="the row has no column 'text'; it has body"):
        text.parse({"body": "a"}, NAMES)
    with pytest.raises(BadRow, match="column 'text' is null"):
        text.parse({"text": None}, NAMES)


def test_messages_take_both_spellings_and_keep_what_they_carry():
    names = names_of(Columns(), ["conversations"])
    call = {"from": "gpt", "value": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"conversations": [{"from": "human", "value": "hi"}, call], "tools": '[{"name": "f"}]'}
    example = messages.parse(row, names)
    assert example.messages[0] == HI
    assert example.messages[1]["role"] == "assistant"
    assert example.messages[1]["content"] == ""
    assert example.messages[1]["tool_calls"] == call["tool_calls"]
    assert example.tools == ({"name": "f"},)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("hi", "column 'messages' is a string, not a list of messages"),
        ([], "column 'messages' holds no messages"),
        (["hi"], r"messages\[0\] is a string, not a message"),
        ([{"role": "narrator", "content": "x"}], r"messages\[0\] has the role 'narrator'"),
        ([HI, {"role": "assistant"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": [{"type": "refusal"}]}], "a part that is not text"),
    ],
)
def test_wrong_messages_are_distinguished(value, what):
    with pytest.raises(BadRow, match=what):
        messages.parse({"messages": value}, NAMES)


def test_text_parts_are_joined():
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]}
    assert messages.parse(row, NAMES).messages[0]["content"] == "ab"


def test_labels_are_the_ids_or_minus_100():
    example = ids.parse({"input_ids": [5, 6], "labels": [-100, 6]}, NAMES)
    assert (example.ids, example.labels) == ((5, 6), (-100, 6))
    with pytest.raises(BadRow, match=r"'labels'\[0\] is 6, but the token there is 5"):
        ids.parse({"input_ids": [5, 6], "labels": [6, -100]}, NAMES)
    with pytest.raises(BadRow, match="has 2 numbers and 'labels' has 1"):
        ids.parse({"input_ids": [5, 6], "labels": [5]}, NAMES)
    with pytest.raises(BadRow, match="not a whole number"):
        ids.parse({"input_ids": [5, 6.5]}, NAMES)


@pytest.mark.parametrize(("label", "verdict"), [(True, True), (0, False), ("True", True), ("false", False)])
def test_a_verdict_is_true_or_false(label, verdict):
    assert unpaired.parse({"prompt": "a", "completion": "b", "label": label}, NAMES).label is verdict


@pytest.mark.parametrize("label", [2, "yes", [True], 0.5])
def test_another_verdict_is_refused(label):
    with pytest.raises(BadRow, match="column 'label' is"):
        unpaired.parse({"prompt": "a", "completion": "b", "label": label}, NAMES)


def test_a_pair_becomes_two_verdicts():
    pair = preference.parse({"prompt": "q", "chosen": "a", "rejected": "b"}, NAMES)
    good, bad = unpaired.from_pair(pair)
    assert (good.completion, good.label, bad.completion, bad.label) == ("a", True, "b", False)


def test_an_implicit_prompt_is_never_cut_inside_a_word():
    """TRL cuts per character: "The sky is bl"."""
    pair = preference.parse({"chosen": "The sky is blue.", "rejected": "The sky is black."}, NAMES)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("The sky is", " blue.", " black.")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt_text"),
    [
        ("Q: hi\nA: good", "Q: hi\nA: bad", "Q: hi\nA:"),
        ("a b ", "a b c", "a b"),
        ("cost 3.14", "cost 3.15", "cost"),
        ("don't", "don", ""),
        ("今天天气好", "今天天气坏", "今天天气"),
        ("yes", "no", ""),
    ],
)
def test_the_common_beginning_ends_with_a_word(chosen, rejected, prompt_text):
    pair = preference.parse({"chosen": chosen, "rejected": rejected}, NAMES)
    assert pair.prompt == prompt_text
    assert (pair.prompt + pair.chosen, pair.prompt + pair.rejected) == (chosen, rejected)


@settings(max_examples=50)
@given(st.text("ab \n", max_size=8), st.text("ab \n", max_size=8), st.text("ab \n", max_size=8))
def test_no_word_is_on_both_sides_of_an_implicit_prompt(common, one, other):
    if common + one == common + other:
        return
    pair = preference.parse({"chosen": common + one, "rejected": common + other}, NAMES)
    assert isinstance(pair.prompt, str)
    for answer in (pair.chosen, pair.rejected):
        assert isinstance(answer, str)
        assert pair.prompt == "" or not answer or answer[0].isspace()


def test_implicit_prompts_of_messages_are_the_common_turns():
    pair = preference.parse({"chosen": [HI, YO], "rejected": [HI, NO]}, NAMES)
    assert (pair.prompt, pair.chosen, pair.rejected) == ((HI,), (YO,), (NO,))
    with pytest.raises(BadRow, match="no common first message"):
        preference.parse({"chosen": [YO], "rejected": [NO]}, NAMES)
    with pytest.raises(BadRow, match="one conversation is the beginning of the other"):
        preference.parse({"chosen": [HI], "rejected": [HI, NO]}, NAMES)


def test_a_prompt_given_twice_is_one_prompt():
    row = {"prompt": "hi", "chosen": [HI, YO], "rejected": [HI, NO]}
    assert preference.parse(row, NAMES).prompt == (HI,)
    with pytest.raises(BadRow, match="messages that do not begin with it"):
        preference.parse(row | {"prompt": "hello"}, NAMES)


def test_a_pair_that_prefers_nothing_is_refused():
    with pytest.raises(BadRow, match="'chosen' and 'rejected' are the same"):
        preference.parse({"prompt": "q", "chosen": "a", "rejected": "a"}, NAMES)


def test_margins_are_numbers():
    row = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert preference.parse(row | {"margin": 2}, NAMES).margin == 2.0
    assert preference.parse(row, NAMES).margin is None
    with pytest.raises(BadRow, match="column 'margin' is a string"):
        preference.parse(row | {"margin": "much"}, NAMES)
    for margin in ("nan", float("inf")):
        with pytest.raises(BadRow, match="column 'margin' is (nan|inf)"):
            preference.parse(row | {"margin": margin}, NAMES)


def test_prompts_keep_the_other_columns():
    assert prompt.parse({"prompt": "q", "answer": "#### 3"}, NAMES).columns == {"answer": "#### 3"}


def test_a_row_of_nothing_is_refused():
    with pytest.raises(BadRow, match="'prompt' and 'completion' are both empty"):
        prompt_completion.parse({"prompt": "", "completion": ""}, NAMES)


def test_a_pair_of_single_messages_comes_after_its_conversation():
    """LLaMA-Factory's form; where the answers are lists, `messages` beside them is no prompt."""
    row = {
        "conversations": [{"from": "human", "value": "a"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"role": "assistant", "content": "no"},
    }
    every = (*METHOD_FORMATS["sft"], "preference")
    form, names = detect(row, Columns(), "auto", every, "d:1")
    assert form.name == "preference"
    found = form.parse(row, names)
    assert found.prompt == ({"role": "user", "content": "a"},)
    assert found.chosen == ({"role": "assistant", "content": "yes"},)
    assert found.rejected == ({"role": "assistant", "content": "no"},)
    assert detect(row, Columns(), "auto", METHOD_FORMATS["sft"], "d:1")[0].name == "messages"
    assert detect(row, Columns(), "messages", every, "d:1")[0].name == "messages"
    whole = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "yes"}]
    lists = {
        "messages": whole,
        "chosen": whole,
        "rejected": [*whole[:1], {"role": "assistant", "content": "no"}],
    }
    _, names = detect(lists, Columns(), "auto", METHOD_FORMATS["dpo"], "d:1")
    assert names.prompt == "prompt"


def test_a_verdict_may_be_on_the_last_message_of_a_conversation():
    """Other methods read such rows as conversations: a column `label` may be anything there."""
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    row = {"messages": messages, "label": False}
    form, names = detect(row, Columns(), "auto", METHOD_FORMATS["kto"], "d:1")
    assert form.name == "unpaired"
    assert used_columns(form.name, names) >= {"messages", "label"}
    found = form.parse(row, names)
    assert (found.prompt, found.completion, found.label) == (tuple(messages[:3]), tuple(messages[3:]), False)
    assert detect(row, Columns(), "auto", METHOD_FORMATS["sft"], "d:1")[0].name == "messages"
    for ended in (messages[:3], messages[1:2], messages[:1]):
        with pytest.raises(BadRow, match="does not end with an answer"):
            form.parse({"messages": ended, "label": True}, names)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question;answer": "a;b"}, "its columns are separated by ';'"),
        ({"version": "1", "data": [{"question": "a"}]}, "the rows seem to be in column 'data'"),
        ({"qa": {"question": "a"}, "id": 1}, "write the fields of column 'qa' as separate columns"),
        ({"body": "a", "id": 1}, "data.columns: {text: body}"),
        ({"frage": "a", "antwort": "b", "nr": 1}, "data.columns: {question: frage, answer: antwort}"),
    ],
)
def test_columns_that_fit_no_format_are_answered_by_what_they_hold(row, says):
    with pytest.raises(DataError) as error:
        detect(row, Columns(), "auto", METHOD_FORMATS["sft"], "d:1")
    assert says in error.value.faults[0].fix


class Counted(str):
    """A name that counts how often names are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize(("names", "doubled"), [("abca", "a"), ("abcb", "b"), ("abc", None), ("", None)])
def test_the_first_name_that_came_before_is_found(names: str, doubled: str | None):
    assert first_doubled(names) == doubled


def test_names_are_not_compared_with_every_other():
    names = [Counted(number) for number in range(20_000)]
    assert first_doubled([*names, Counted("0")]) == "0"
    assert Counted.compared < 2 * len(names)
