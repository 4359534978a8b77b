"""Texts of plain rows, put together many at a time: what is added to them, and where their answers begin."""

from __future__ import annotations

import pytest

from memtrain.trainers.data.tokenize.plain_rows import Columns, plain_texts

PAIRS = Columns("prompt", "completion", frozenset(("prompt", "completion")))


def row(prompt: object, completion: object, **more: object) -> tuple[int, dict[str, object]]:
    return 1, {"prompt": prompt, "completion": completion, **more}


@pytest.mark.parametrize(
    ("completion", "end_token", "text"),
    [
        (" 4", "<eos>", "2 + 2 = 4<eos>"),
        (" 4<eos>", "<eos>", "2 + 2 = 4<eos>"),
        (" 4<eos> and more", "<eos>", "2 + 2 = 4<eos> and more<eos>"),
        ("", "<eos>", "2 + 2 =<eos>"),
        (" 4", None, "2 + 2 = 4"),
    ],
)
def test_an_answer_ends_with_the_end_token_once(completion: str, end_token: str | None, text: str):
    made = plain_texts([0], [row("2 + 2 =", completion)], [PAIRS], end_token)
    assert made is not None
    assert (made.texts, made.cuts) == ([text], [len("2 + 2 =")])


def test_places_are_in_characters_and_in_bytes():
    made = plain_texts([0, 0], [row("né ", "ü"), row("ab", "c")], [PAIRS], None)
    assert made is not None
    assert (made.cuts, made.cut_bytes, made.text_bytes) == ([3, 2], [4, 2], [6, 3])


def test_a_batch_with_a_row_that_is_not_plain_is_left_to_be_read_row_by_row():
    """A prompt of messages, neither text, and a column that changes the rendering."""
    plain = row("a", "b")
    for other in (
        row([{"role": "user", "content": "a"}], "b"),
        row("", ""),
        row("a", "b", chat_template_kwargs={"x": 1}),
    ):
        assert plain_texts([0, 0], [plain, other], [PAIRS], None) is None
    assert plain_texts([0], [plain], [None], None) is None


def test_columns_that_no_text_holds_are_counted():
    lines = [row("a", "b", source="x"), row("a", "b", source=None), row("a", "b", source="y", note="z")]
    made = plain_texts([0, 0, 0], lines, [PAIRS], None)
    assert made is not None
    assert dict(made.unused) == {"column 'source'": 2, "column 'note'": 1}
