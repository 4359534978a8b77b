import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from memtrain.recipes.reading.overrides import apply_overrides, merged, path_of
from memtrain.recipes.reading.yaml_reader import read_yaml
from memtrain.recipes.reading.yaml_tree import Faults, Mapping, find, plain


def tree_of(text: str) -> Mapping:
    tree = read_yaml(text, "my.yaml", Faults())
    assert isinstance(tree, Mapping)
    return tree


def after(text: str, *words: str) -> tuple[object, list[str]]:
    faults = Faults()
    tree = apply_overrides(tree_of(text), words, faults)
    return plain(tree), [fault.what for fault in faults.in_order()]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a.b=2", {"a": {"b": 2}}),
        ("a.b=1e-5", {"a": {"b": 1e-5}}),
        ("a.b=on", {"a": {"b": "on"}}),
        ("a.b='2'", {"a": {"b": "2"}}),
        ("a.b=[1, x]", {"a": {"b": [1, "x"]}}),
        ("a={c: 3}", {"a": {"b": 1, "c": 3}}),
        ("a=null", {"a": None}),
        ("x.y.z=k=v", {"a": {"b": 1}, "x": {"y": {"z": "k=v"}}}),
        ("a.b=builtin:arithmetic", {"a": {"b": "builtin:arithmetic"}}),
    ],
)
def test_an_override_is_read_as_if_it_stood_in_the_file(word: str, expected: object):
    assert after("a: {b: 1}", word) == (expected, [])


@pytest.mark.parametrize("number", ["2026", "5e12", "0123456789012345678901234567890123456789"])
def test_a_number_is_text_where_a_key_takes_only_text(number: str):
    assert after("model: {path: x}", f"model.revision={number}") == (
        {"model": {"path": "x", "revision": number}},
        [],
    )


def test_words_of_yaml_are_no_numbers_and_stay_what_they_are():
    assert after("a: 1", "run_dir=null") == ({"a": 1, "run_dir": None}, [])
    assert after("a: 1", "optim.lr=2") == ({"a": 1, "optim": {"lr": 2}}, [])


def test_the_last_override_wins():
    assert after("a: {b: 1}", "a.b=2", "a.b=3") == ({"a": {"b": 3}}, [])


@pytest.mark.parametrize("word", ["l.1.x=9", "l[1].x=9"])
def test_an_override_reaches_into_a_list(word: str):
    assert after("l: [{x: 1}, {x: 2}]", word) == ({"l": [{"x": 1}, {"x": 9}]}, [])


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("a.b", "'a.b' is not an override"),
        ("=1", "'=1' is not an override"),
        ("a..b=1", "'a..b=1' is not an override"),
        ("+a.b=1", "'+a.b=1' is not an override"),
        ("--a.b=1", "'--a.b=1' is not an override"),
        ("a.b.c=1", "a.b is a single value and has no 'c'"),
        ("l.7=1", "l is a list of 1, it has no item '7'"),
        ("l.x=1", "l is a list of 1, it has no item 'x'"),
    ],
)
def test_a_word_that_is_no_override_is_reported(word: str, what: str):
    value, reported = after("a: {b: 1}\nl: [1]", word)
    assert reported == [what]
    assert value == {"a": {"b": 1}, "l": [1]}


def test_an_overridden_key_was_said_by_the_override():
    tree = apply_overrides(tree_of("a: {b: 1, c: 2}"), ["a.b=3"], Faults())
    shown = {key: str(found[0]) for key in "bc" if (found := find(tree, ("a", key)))}
    assert shown == {"b": "from the command line: `a.b=3`", "c": "my.yaml:1:11"}


def test_paths_have_two_spellings():
    assert path_of("data.train[0].weight") == path_of("data.train.0.weight") == ("data", "train", 0, "weight")


trees = some.recursive(
    some.integers(0, 9) | some.sampled_from(["on", "x"]),
    lambda inner: some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.dictionaries(some.sampled_from("abc"), trees), some.dictionaries(some.sampled_from("abc"), trees))
def test_laying_over_keeps_every_key_and_lets_the_upper_win(
    below: dict[str, object], above: dict[str, object]
):
    import json

    def expected(low: object, high: object) -> object:
        if not isinstance(low, dict) or not isinstance(high, dict):
            return high
        return {
            key: expected(low[key], high[key]) if key in low and key in high else high.get(key, low.get(key))
            for key in [*low, *high]
        }

    result = merged(tree_of(json.dumps(below)), tree_of(json.dumps(above)))
    assert plain(result) == expected(below, above)
