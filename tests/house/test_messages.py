"""Every error that the source can raise says where it is and how to mend it (benchmarks/messages.py)."""

import pytest
from messages import ROOT, Message, messages, messages_of

ALL = messages()


def test_the_list_is_not_empty_and_knows_its_places():
    assert len(ALL) > 250
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
    """Its own, or in its words the value or the option that is wrong."""
    silent = [one for one in ALL if not one.where.strip() and "{" not in one.what and "--" not in one.what]
    # What is missing on the machine is nowhere in the recipe.
    machine = ("sbatch is not on this machine",)
    assert not [f"{one.place} {one.what}" for one in silent if one.what not in machine]
