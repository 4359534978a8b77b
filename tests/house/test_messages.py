"""Every error names its place and its cure, and no text uses a retired word (benchmarks/messages.py)."""

import re

import pytest
from messages import ROOT, Message, messages, messages_of, sentences, sentences_of

ALL = messages()
RETIRED = {
    r"\blearnt\b": "loss tokens, trained",
    r"\bverbs?\b": "command",
    r"\brehears": "dry run",
    r"\bmend": "fix, repair",
    r"\btold\b": "shown, listed",
    r"\banew\b": "again, start over",
    r"\bnever tried\b": "untested",
    r"\bsaid twice\b": "set A or B, not both",
    r"\bwithout a word\b|\bno word\b": "without an error message",
    r"\bin all\b": "total",
}
"""Words that a reader met twice, and the words in their place."""
SAVED = ("memtrain/trainers/checkpoints/manifest.py", "memtrain/trainers/data/tokenize/tiny_tokenizer.py")
"""Texts that are compared with those of older checkpoints, and the words of the built-in tokenizer."""


def test_the_list_is_not_empty_and_knows_its_places():
    assert len(ALL) > 400
    assert all((ROOT / one.place.partition(":")[0]).is_file() for one in ALL)


def test_a_message_is_read_from_the_source(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("messages.ROOT", tmp_path)
    (tmp_path / "one.py").write_text(
        "raise DataError(f'row {n} is ' + 'bad', where=path, fix='mend' if mends else '')\n"
        "raise DataError(error.faults)\nraise LaunchError('x')\n"
    )
    assert list(messages_of(tmp_path / "one.py")) == [
        Message("one.py:1", "DataError", "row {n} is bad", "{path}", "mend | (nothing)"),
        Message("one.py:3", "LaunchError", "x", "", ""),
    ]


def test_every_error_has_a_cure():
    assert not [f"{one.place} {one.what}" for one in ALL if not one.fix.strip()]


def test_every_error_has_a_place():
    assert not [f"{one.place} {one.what}" for one in ALL if not one.where.strip()]


def test_every_cure_says_what_to_do():
    """What there is, is no cure: `use one of ...` says what to do with it."""
    states = re.compile(r"(it has|its \w+ are|its \w+:|there is|one of|known \w+:|readable:)\b")
    assert not [f"{one.place} {one.fix}" for one in ALL if states.match(one.fix)]


def test_a_text_is_read_from_the_source(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("messages.ROOT", tmp_path)
    (tmp_path / "one.py").write_text(
        '"""A docstring, no text."""\nsay(f"{n} rows are " + "cut", key="one_word")\n'
    )
    (tmp_path / "page.html.j2").write_text("<h2>Rows and tokens</h2>\n<td>{{ count }}</td>\n")
    found = [one.text for name in ("one.py", "page.html.j2") for one in sentences_of(tmp_path / name)]
    assert found == ["{n} rows are cut", "<h2>Rows and tokens</h2>"]


def test_no_text_uses_a_retired_word():
    texts = [one for one in sentences() if not one.place.startswith(SAVED) and ".js:" not in one.place]
    assert len(texts) > 2500
    shown = [(one.place, re.sub(r"{[^{}]*}|<[^>]*>|const .*|let .*", " ", one.text)) for one in texts]
    assert not [
        f"{place}: {text} ({better})"
        for place, text in shown
        for word, better in RETIRED.items()
        if re.search(word, text)
    ]
