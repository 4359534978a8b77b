import time

import pytest

from memtrain.recipes.reading.yaml_reader import read_scalar, read_yaml
from memtrain.recipes.reading.yaml_tree import Faults, Place, find, plain


def read(text: str) -> tuple[object, list[str]]:
    faults = Faults()
    tree = read_yaml(text, "my.yaml", faults)
    return (None if tree is None else plain(tree)), [fault.what for fault in faults.in_order()]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("1e", "1e"),
    ],
)
def test_words_are_read_as_yaml_1_2_has_them(word: str, value: object):
    read = read_scalar(word)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("word", [".inf", "-.inf", ".nan", "1e999", "9" * 30, "9" * 5000])
def test_numbers_that_cannot_be_held_are_refused(word: str):
    with pytest.raises(ValueError, match="number"):
        read_scalar(word)


def test_quoted_words_stay_text():
    assert read("a: '1'\nb: \"true\"\nc: ! 2")[0] == {"a": "1", "b": "true", "c": "2"}


def test_every_key_and_item_knows_its_line_and_column():
    tree = read_yaml("a:\n  b: [1,\n      2]\n", "my.yaml", Faults())
    assert tree is not None
    places = {path: find(tree, path) for path in [("a",), ("a", "b"), ("a", "b", 1)]}
    assert [found and found[0] for found in places.values()] == [
        Place("my.yaml", 1, 1),
        Place("my.yaml", 2, 3),
        Place("my.yaml", 3, 7),
    ]


def test_a_doubled_key_names_the_first_one():
    assert read("a: 1\nb: 2\na: 3")[1] == ["a: written twice, first at my.yaml:1:1"]


def test_tags_merge_keys_and_list_keys_are_refused_together():
    value, reported = read("a: !!python/object:os.system x\n<<: {b: 1}\n? [1]\n: 2\n")
    assert value == {"a": "x"}
    assert [what.split(" ")[0] for what in reported] == ["the", "merge", "a"]


def test_an_alias_is_what_it_names():
    assert read("a: &x {b: 1}\nc: *x") == ({"a": {"b": 1}, "c": {"b": 1}}, [])


def test_a_billion_laughs_end_at_once():
    rows = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)
    )
    start = time.process_time()
    assert read(rows) == (None, ["more than 20,000 keys and values"])
    assert time.process_time() - start < 1


@pytest.mark.parametrize("bracket", ["[", "{a: ", "- ", "? "])
def test_deep_nesting_ends_at_once(bracket: str):
    start = time.process_time()
    assert read(bracket * 20_000)[0] is None
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "text", ["a: [1", "a: @x", "\ta: 1", "a: b: c", "a: 'x", "*a", "a: 1\x00", "%YAML 9\n---\n"]
)
def test_text_that_is_no_yaml_is_one_fault_with_a_line(text: str):
    faults = Faults()
    assert read_yaml(text, "my.yaml", faults) is None
    (fault,) = faults.in_order()
    assert fault.where.startswith("my.yaml:")
    assert fault.fix
