"""builtin:arithmetic and its tokenizer: right answers, wrong ones that are wrong, the same every time."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import DataError
from memtrain.trainers.data.sources import builtin_arithmetic as arithmetic
from memtrain.trainers.data.tokenize import tiny_tokenizer
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer, tokenizer_digest

ROWS = list(arithmetic.rows(300, 0, "preference"))


def worked(answer: str) -> tuple[list[bool], int]:
    """Whether each line of an answer is right and follows from the one before, and its result."""
    *lines, last = answer.split("\n")
    right, before = [], None
    for line in lines:
        start, sign, amount, _, after = line.split()
        total = int(start) + int(amount) if sign == "+" else int(start) - int(amount)
        right.append(total == int(after) and before in (None, int(start)))
        before = int(after)
    return right, int(last.removeprefix("#### "))


def test_chosen_answers_are_right_and_rejected_ones_go_wrong_once():
    for row in ROWS:
        right, result = worked(str(row["chosen"]))
        assert all(right)
        wrong, other = worked(str(row["rejected"]))
        assert wrong.count(False) == 1
        assert other != result


def test_the_question_asks_for_the_answer():
    for row in ROWS:
        sentences = str(row["prompt"]).split(".")
        count = int(sentences[0].split()[2])
        for sentence in sentences[1:-1]:
            sign = 1 if any(word in sentence for word in arithmetic.GAINS) else -1
            count += sign * int("".join(filter(str.isdigit, sentence)))
            assert 0 <= count <= arithmetic.HIGHEST
        assert count == worked(str(row["chosen"]))[1]


def test_every_form_is_of_the_same_problems():
    pairs = list(arithmetic.rows(20, 0, "preference"))
    plain = list(arithmetic.rows(20, 0, "prompt_completion"))
    talks = list(arithmetic.rows(20, 0, "messages"))
    checked = list(arithmetic.rows(20, 0, "prompt"))
    for pair, row, talk, prompt in zip(pairs, plain, talks, checked, strict=True):
        assert (row["prompt"], row["completion"]) == (pair["prompt"], pair["chosen"])
        assert talk["messages"][1]["content"] == pair["chosen"]  # pyright: ignore[reportIndexIssue]
        assert str(pair["chosen"]).endswith(str(prompt["answer"]))


def test_verdicts_are_of_both_kinds_and_true():
    labels = set()
    for row in arithmetic.rows(100, 0, "unpaired"):
        assert all(worked(str(row["completion"]))[0]) is row["label"]
        labels.add(row["label"])
    assert labels == {True, False}


def test_lengths_have_a_long_tail():
    tokenizer = load_tokenizer("builtin:tiny")
    texts = [str(row["text"]) for row in arithmetic.rows(1000, 0, "text")]
    lengths = sorted(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert lengths[0] < 40
    assert lengths[500] < 60
    assert 300 < lengths[-1] < 900


def test_rows_are_the_same_in_every_process_and_do_not_depend_on_their_number():
    code = (
        "from memtrain.trainers.data.sources import builtin_arithmetic as a; "
        "print(list(a.rows(3, 7, 'unpaired')))"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] == f"{list(arithmetic.rows(50, 7, 'unpaired'))[:3]}\n"


def test_the_shipped_tokenizer_is_the_trained_one(tmp_path):
    tiny_tokenizer.write(tmp_path)
    for path in tmp_path.iterdir():
        shipped = tiny_tokenizer.FOLDER / path.name
        if path.name == "tokenizer.json":
            assert json.loads(path.read_text())["model"] == json.loads(shipped.read_text())["model"]
        else:
            assert path.read_text() == shipped.read_text()


def test_the_shipped_tokenizer_has_1024_tokens_and_ends():
    tokenizer = load_tokenizer("builtin:tiny")
    assert len(tokenizer) == tiny_tokenizer.NUM_TOKENS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [2, 3]


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_makes_the_round_trip(text):
    tokenizer = load_tokenizer("builtin:tiny")
    ids = tokenizer(text.encode("utf-8", "ignore").decode())["input_ids"]
    assert tokenizer.decode(ids) == text.encode("utf-8", "ignore").decode()


def test_digits_are_tokens_of_their_own():
    tokenizer = load_tokenizer("builtin:tiny")
    assert len(tokenizer("12345")["input_ids"]) == 5


def test_the_digest_follows_what_decides_the_ids():
    tokenizer = load_tokenizer("builtin:tiny")
    before = tokenizer_digest(tokenizer)
    assert before == tokenizer_digest(load_tokenizer("builtin:tiny"))
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_digest(tokenizer) != before


@pytest.mark.parametrize(
    ("name", "template", "what"),
    [
        ("builtin:huge", None, "there is no tokenizer 'builtin:huge'"),
        ("./nowhere", None, "there is no folder ./nowhere"),
        ("builtin:tiny", "nothing", "there is no chat template 'nothing'"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_reported(name, template, what):
    with pytest.raises(DataError) as error:
        load_tokenizer(name, chat_template=template)
    assert error.value.faults[0].what == what
    assert error.value.faults[0].fix


def test_a_folder_without_a_tokenizer_is_reported(tmp_path):
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_chat_template_is_a_file_or_a_shipped_name(tmp_path):
    (tmp_path / "my.jinja").write_text("{{ messages }}")
    assert (
        load_tokenizer("builtin:tiny", chat_template=str(tmp_path / "my.jinja")).chat_template
        == "{{ messages }}"
    )
    assert "<|eot_id|>" in load_tokenizer("builtin:tiny", chat_template="llama3").chat_template
