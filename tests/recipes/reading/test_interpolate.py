import json
import re
import subprocess
import sys
import time

import pytest
from omegaconf import OmegaConf

from memtrain.recipes.reading.interpolate import interpolated, literal
from memtrain.recipes.reading.load import recipe_of_words
from memtrain.recipes.reading.yaml_reader import read_yaml
from memtrain.recipes.reading.yaml_tree import Faults, Mapping, Place, find, plain


def after(text: str) -> tuple[object, list[str]]:
    faults = Faults()
    tree = read_yaml(text, "my.yaml", faults)
    assert isinstance(tree, Mapping)
    return plain(interpolated(tree, faults)[0]), [fault.what for fault in faults.in_order()]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRAIN_TEST_LR", "1e-5")
    monkeypatch.delenv("MEMTRAIN_TEST_NOT_SET", raising=False)


@pytest.mark.parametrize(
    "text",
    [
        "a: ${b}\nb: 3",
        "a: ${b.c}\nb: {c: {d: [1, 2]}}",
        "a: {b: '${.c}', c: 1}",
        "a: {b: {c: '${..d}'}, d: 2}",
        "a: 'x-${b}-${c}'\nb: 1\nc: 2.5",
        "a: ${b}\nb: ${c}\nc: end",
        "a: ${b[1].x}\nb: [{x: 1}, {x: 2}]",
        "a: ${b.1}\nb: [5, 6]",
        "a: '\\${b}'",
        "a: ${b}\nb: {c: '${d}'}\nd: 4",
        "a: ${b.c}\nb: ${d}\nd: {c: 7}",
        "a: ${oc.env:MEMTRAIN_TEST_NOT_SET,fallback}",
        "a: 'run-${oc.env:MEMTRAIN_TEST_LR}'",
        "a: ${oc.env:${b}, x}\nb: MEMTRAIN_TEST_NOT_SET",
        "a: '\\\\${b}'\nb: 1",
        "a: 'x\\${b} ${b}'\nb: 1",
        "a: ${[b].c}\nb: {c: 1}",
        "a: ${b[c]}\nb: {c: 1}",
        "a: ${ b }\nb: 2",
        "a: ${b.${c}}\nb: {d: 5}\nc: d",
        "a: ${${c}}\nb: {d: 5}\nc: b.d",
        "a: \"${oc.env:MEMTRAIN_TEST_NOT_SET,'a, b'}\"",
        "a: ${oc.env:MEMTRAIN_TEST_NOT_SET,null}",
        "a: ${oc.env:MEMTRAIN_TEST_NOT_SET,/data/x-1.5}",
        "a: ${oc.select:nope,3}",
        "a: ${oc.select:b.c,3}\nb: {c: x}",
        "a: {b: '${oc.select:.c,3}', c: 4}",
        "a: \"${oc.decode:'[1, 2.5, {x:y}]'}\"",
        "a: ${oc.decode:${oc.env:MEMTRAIN_TEST_LR}}",
    ],
)
def test_values_are_what_omegaconf_makes_of_them(text: str):
    faults = Faults()
    tree = read_yaml(text, "my.yaml", faults)
    assert tree is not None
    assert after(text) == (OmegaConf.to_container(OmegaConf.create(plain(tree)), resolve=True), [])


def test_a_variable_that_is_the_whole_value_is_read_as_yaml():
    assert after("a: ${oc.env:MEMTRAIN_TEST_LR}\nb: ${oc.env:MEMTRAIN_TEST_NOT_SET,8}")[0] == {
        "a": 1e-5,
        "b": 8,
    }


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: ${b}\nb: ${a}", "a: refers to itself: a -> b -> a"),
        ("a: ${a}", "a: refers to itself: a -> a"),
        ("a: {b: '${a}'}", "a.b: ${a} is the section that contains it"),
        ("a: ${b}\nb: {c: '${a}'}", "b.c: refers to itself: a -> b -> b.c -> a"),
        ("a: ${nope.x}", "a: ${nope.x}: the recipe does not set nope.x"),
        (
            "a: ${oc.env:MEMTRAIN_TEST_NOT_SET}",
            "a: the environment variable MEMTRAIN_TEST_NOT_SET is not set",
        ),
        ("a: ${other:x}", "a: ${other:...} is not known"),
        ("a: ${oc.coerce:os.path,x}", "a: ${oc.coerce:...} is not known"),
        ("a: ${oc.env:}", "a: ${oc.env:} has no arguments"),
        ("a: ${oc.env:A,b,c}", "a: ${oc.env:A,b,c} has 3 arguments"),
        ("a: ${oc.select:b,1}\nb: ${nope}", "a: ${nope}: the recipe does not set nope"),
        ("a: " + "${" * 30 + "b" + "}" * 30, "a: more than 20 ${...} inside each other"),
        ("a: " + "${b}" * 2600 + "\nb: x", "a: becomes longer than 10,000 letters"),
        ("a: " + "${b}" * 2400 + "\nb: xxxxx", "a: becomes longer than 10,000 letters"),
        ("a: ${", "a: ${ is not closed in '${'"),
        ("a: ${b c}", "a: ${b c} is neither a key nor a variable"),
        ("a: x${b}\nb: {c: 1}", "a: ${b} is a section or a list, and cannot be part of a text"),
    ],
)
def test_a_value_that_cannot_be_replaced_is_reported(text: str, what: str):
    assert what in after(text)[1]


def test_a_section_that_is_referred_to_keeps_its_places():
    faults = Faults()
    tree = read_yaml("a: ${b}\nb:\n  c: 1\nd: x-${b.c}", "my.yaml", faults)
    assert isinstance(tree, Mapping)
    made, _ = interpolated(tree, faults)
    assert str(place_of(made, "a", "c")) == "my.yaml:3:3"
    assert str(place_of(made, "d")) == "my.yaml:4:1"


def place_of(tree: Mapping, *path: str) -> Place:
    found = find(tree, path)
    assert found is not None
    return found[0]


def test_omegaconf_is_imported_for_recipes_with_references_only():
    code = (
        "import sys\nfrom memtrain.recipes.reading.load import load_text\n"
        "text = 'method: sft\\nmodel: {path: m}\\ndata: {train: d.jsonl}\\nrun_dir: '\n"
        "load_text(text + 'x', 'a.yaml')\nassert 'omegaconf' not in sys.modules\n"
        "load_text(text + '${model.path}', 'a.yaml')\nassert 'omegaconf' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_switch_inside_text_is_spelt_as_yaml_has_it():
    assert after("a: 'x-${b}'\nb: true")[0] == {"a": "x-true", "b": True}


@pytest.mark.parametrize(
    "step", ["a{n}: '${{a{m}}}${{a{m}}}'", "a{n}: {{x: '${{a{m}}}', y: '${{a{m}}}'}}", "a{m}: '${{a{n}}}'"]
)
def test_values_that_double_each_other_end_at_once(step: str):
    text = "a0: xx\n" * ("{m}:" not in step) + "\n".join(step.format(n=n, m=n - 1) for n in range(1, 60))
    start = time.process_time()
    assert after(text)[1]
    assert time.process_time() - start < 2


def parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[object, list[str], int]:
    """The values and faults of a text, and how many values OmegaConf's parser was given."""
    from memtrain.recipes.reading import references

    calls: list[str] = []
    parse = references.parse
    monkeypatch.setattr(references, "parse", lambda text, *rest: calls.append(text) or parse(text, *rest))
    return *after(text), len(calls)


def test_plain_references_are_read_without_the_parser(monkeypatch):
    lines = [f"k{at}: 'a-${{b.c}}-${{.b.c}}-${{oc.env:MEMTRAIN_TEST_LR}}'" for at in range(200)]
    values, faults, count = parsed(monkeypatch, "b: {c: 3}\nd: ${b}\n" + "\n".join(lines))
    assert (values, faults, count) == (
        {"b": {"c": 3}, "d": {"c": 3}, **{f"k{at}": "a-3-3-1e-5" for at in range(200)}},
        [],
        0,
    )


def test_other_references_are_parsed_up_to_a_limit_in_letters(monkeypatch):
    one = "${oc.env:MEMTRAIN_TEST_NOT_SET,word}"
    lines = [f"k{at}: '{one}'" for at in range(20_000 // len(one))]
    values, faults, count = parsed(monkeypatch, "\n".join(lines))
    assert 10_000 - len(one) < count * len(one) <= 10_000
    assert isinstance(values, dict)
    assert values["k0"] == "word"
    assert len(faults) > 1
    assert "more than 10,000 letters of the recipe are in ${...} with defaults or brackets" in faults[0]


@pytest.mark.parametrize("name", ["true", "NULL", "inf", "a.b.c", "oc.env:true", "..x", "1a"])
def test_what_looks_plain_is_what_omegaconf_makes_of_it(monkeypatch, name):
    from memtrain.recipes.reading import references

    text = f"{{a: {{b: {{c: 7}}}}, x: '${{{name}}}', true: 1}}"
    plainly = after(text)
    monkeypatch.setattr(references, "PLAIN", re.compile("(?!)"))
    assert plainly == after(text)


@pytest.mark.parametrize("count", range(5))
@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${x", "a${y}b${", "${${z}}"])
def test_a_literal_is_read_as_the_text_it_was(count: int, text: str):
    """One backslash before a backslash made the reference live."""
    given = "\\" * count + text
    words = ["method=sft", "data.train=x.jsonl", f"model.path={json.dumps(literal(given))}"]
    loaded = recipe_of_words(words)
    assert loaded.recipe.model.path == given
    assert loaded.environment == ()
