"""Text of strangers never steers the terminal: its orders are shown as the escapes they are."""

import json
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.cli.launch.elastic_agent import plain_line
from memtrain.cli.output.terminal import print_text, table_lines
from memtrain.errors import OR, DataError, Fault, printable

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202eexe.txt\ud83d\x00"
SHOWN = r"\u001b[2J\u001b]0;owned\u0007\u000d\u009b31m\u202eexe.txt\ud83d\u0000"


def steers(text: str) -> bool:
    """Whether a terminal would take anything in the text for an order."""
    return any(letter in text for letter in "\x1b\x07\r\x9b\u202e\ud83d\x00")


def test_what_steers_a_terminal_is_shown_as_an_escape_and_all_else_stays():
    assert printable(f"é日本 {ESCAPES}\tend\n") == f"é日本 {SHOWN}\tend\n"
    assert printable("a\nerror: forged", is_line=True) == r"a\nerror: forged"
    family = "\U0001f468\u200d\U0001f469"
    assert printable(family) == family


def test_a_fault_is_three_lines_whatever_it_names():
    error = DataError([Fault(f"no column '{ESCAPES}\nerror: forged'", f"a{ESCAPES}\n.jsonl:1", ESCAPES)])
    assert error.text().count("\n") == 2
    assert not steers(error.text())
    error.text().encode()


def test_sentences_and_tables_are_shown_without_orders(capsys: pytest.CaptureFixture[str]):
    print_text(f"Data {ESCAPES}")
    assert capsys.readouterr().out == f"Data {SHOWN}\n"
    lines = table_lines(("key", "value"), [(f"a\n{ESCAPES}", ESCAPES)], 200)
    assert len(lines) == 2
    assert not steers("".join(lines))


def test_lines_of_ranks_lose_their_colours_and_orders():
    assert plain_line("\x1b[32mINFO\x1b[0m 50%\r100%\r\n") == "INFO 50%\n100%\n"
    assert not steers(plain_line(ESCAPES))


def test_names_of_a_data_file_reach_the_terminal_as_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A column name that clears the screen: in an error, and in the notes of a plan."""
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"method: sft\nmodel: {{path: builtin:tiny}}\ndata: {{train: {path}}}\n")
    for row in ({ESCAPES: "a"}, {"text": "a b c", ESCAPES: "x"}):
        path.write_text(json.dumps(row) + "\n")
        main(["plan", str(recipe)])
        reported = capsys.readouterr()
        assert "1b[2J" in reported.out + reported.err
        assert not steers(reported.out + reported.err)


def test_several_ways_out_are_a_line_each():
    """Each way is escaped alone, so that a name in it cannot become a line of its own."""
    fault = Fault("no plan fits", fix=OR.join(["a card", "a name\nerror: forged"]))
    assert fault.lines()[-1] == "  try: a card\n   or: a name\\nerror: forged"
