import dataclasses
import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import MAX_BYTES, load_recipe
from memtrain.recipes.reading.validate import foreign_sections
from memtrain.recipes.reading.yaml_reader import read_yaml
from memtrain.recipes.reading.yaml_tree import Faults, Leaf, Mapping

GOOD = """method: sft
model: {path: builtin:tiny}
data:
  train: builtin:arithmetic
  eval_fraction: 0.1
optim:
  lr: 1e-4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(GOOD)
    return tmp_path


def reported(path: str, *overrides: str, method: str | None = None) -> list[tuple[str, str]]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides, method=method)
    return [(fault.what, fault.where) for fault in caught.value.faults]


def test_a_recipe_holds_what_the_file_and_the_overrides_say():
    loaded = load_recipe("my.yaml", ["optim.kind=sgd", "data.train=rows.jsonl"])
    assert loaded.recipe.optim.lr == 1e-4
    assert loaded.recipe.optim.kind == "sgd"
    assert loaded.recipe.data.train[0].source == "rows.jsonl"
    assert loaded.text == GOOD
    assert loaded.overrides == ("optim.kind=sgd", "data.train=rows.jsonl")
    assert loaded.resolved["optim"] == {"lr": 1e-4, "kind": "sgd"}


def test_every_value_knows_where_it_was_said():
    loaded = load_recipe("my.yaml", ["optim.kind=sgd", "data.train=[{source: a.jsonl}]"])
    assert loaded.where("optim.lr") == "my.yaml:7:3"
    assert loaded.where("optim.kind") == "from the command line: `optim.kind=sgd`"
    assert loaded.where("data.train.0.source") == "from the command line: `data.train=[{source: a.jsonl}]`"
    assert loaded.where("train.seed") == "default"


def test_a_loaded_recipe_cannot_be_changed():
    loaded = load_recipe("my.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.text = ""  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError):
        loaded.recipe.run_dir = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_recipe_extends_another_key_by_key(folder: Path):
    (folder / "sub").mkdir()
    (folder / "sub" / "child.yaml").write_text("extends: ../my.yaml\noptim:\n  kind: sgd\n")
    loaded = load_recipe("sub/child.yaml")
    assert (loaded.recipe.optim.lr, loaded.recipe.optim.kind) == (1e-4, "sgd")
    assert loaded.where("optim.lr").endswith("my.yaml:7:3")
    assert loaded.where("optim.kind") == "sub/child.yaml:3:3"


def test_the_last_of_several_extended_files_wins_and_null_takes_away(folder: Path):
    (folder / "lora.yaml").write_text("model: {adapter: {r: 4}}\noptim: {lr: 2e-4}\n")
    (folder / "child.yaml").write_text("extends: [my.yaml, lora.yaml]\ndata: {eval_fraction: 0.0}\n")
    recipe = load_recipe("child.yaml").recipe
    assert recipe.model.adapter is not None
    assert recipe.optim.lr == 2e-4
    assert load_recipe("child.yaml", ["model.adapter=null"]).recipe.model.adapter is None


def test_a_recipe_extends_a_shipped_one_by_name(folder: Path):
    (folder / "child.yaml").write_text("extends: smoke/sft\ntrain: {max_steps: 3}\n")
    assert load_recipe("child.yaml").recipe.train.max_steps == 3


def test_a_circle_of_files_is_refused(folder: Path):
    (folder / "a.yaml").write_text("extends: b.yaml\n")
    (folder / "b.yaml").write_text("extends: a.yaml\n")
    ((what, where),) = reported("a.yaml")
    assert what.endswith("in a circle: a.yaml -> b.yaml -> a.yaml")
    assert where == "b.yaml:1:10"


def test_a_fault_of_an_extended_file_points_into_that_file(folder: Path):
    (folder / "child.yaml").write_text("extends: my.yaml\ntrain: {seed: -1}\n")
    (folder / "my.yaml").write_text(GOOD + "  schedule: zigzag\n")
    assert [where for _, where in reported("child.yaml")] == ["my.yaml:8:13", "child.yaml:2:15"]


def test_files_and_overrides_are_reported_at_once(folder: Path):
    (folder / "my.yaml").write_text(GOOD + "lenght: {}\n")
    assert reported("my.yaml", "optim.betta=1", "nonsense", "train.seed=x") == [
        ("lenght: unknown key", "my.yaml:8:1"),
        ("'nonsense' is not an override", "from the command line: `nonsense`"),
        ("optim.betta: unknown key", "from the command line: `optim.betta=1`"),
        (
            "train.seed: 'x' is text; it must be a whole number from 0",
            "from the command line: `train.seed=x`",
        ),
    ]


def test_a_value_that_cannot_be_replaced_is_reported_once():
    assert reported("my.yaml", "optim.lr=${train.seed}") == [
        (
            "optim.lr: ${train.seed}: the recipe does not set train.seed",
            "from the command line: `optim.lr=${train.seed}`",
        )
    ]


def test_the_verb_and_the_file_must_agree(monkeypatch: pytest.MonkeyPatch):
    assert load_recipe("my.yaml", method="sft").recipe.method == "sft"
    ((what, where),) = reported("my.yaml", method="dpo")
    assert what == "the command is `memtrain dpo`, but the recipe has method: sft"
    assert where == "my.yaml:1:9"


def test_a_method_that_does_not_exist_is_reported_with_those_that_do(folder: Path):
    (folder / "my.yaml").write_text(GOOD.replace("sft", "sfft"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("my.yaml")
    (fault,) = caught.value.faults
    assert fault.what.startswith("method: 'sfft' is not")
    assert "sft" in fault.fix


def test_the_section_of_another_method_is_refused_with_both_lines():
    tree = read_yaml("method: sft\nsft: {}\ndpo: {beta: 1}\n", "my.yaml", Faults())
    assert isinstance(tree, Mapping)
    method = tree.node("method")
    assert isinstance(method, Leaf)
    ((what, place, _),) = foreign_sections(tree, method, ["sft", "dpo"])
    assert what == "dpo: the section of another method; my.yaml:1:9 has method: sft"
    assert str(place) == "my.yaml:3:1"


def test_a_section_with_every_line_commented_out_takes_its_defaults(folder: Path):
    (folder / "my.yaml").write_text(GOOD + "length:\n  # max_length: 5\nsft:\n  # loss: dft\n")
    assert load_recipe("my.yaml").recipe.length.max_length == 1024


def test_an_empty_section_that_needs_a_key_says_what_it_needs(folder: Path):
    (folder / "my.yaml").write_text("method: sft\nmodel:\ndata: {train: builtin:arithmetic}\n")
    assert reported("my.yaml") == [("neither model.path nor model.config is given", "my.yaml:2:1")]


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"method: sft\nrun_dir: \xff\n", "my.yaml is not UTF-8 text"),
        ("method: sft\n".encode("utf-16"), "my.yaml is not UTF-8 text"),
        (b"a" * (MAX_BYTES + 1), "my.yaml is larger than 256 KiB"),
        (b"", "the recipe is empty"),
        (b"- a\n- b\n", "the file holds a list"),
        (b"just words\n", "the file holds a single value"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_fault(folder: Path, raw: bytes, what: str):
    (folder / "my.yaml").write_bytes(raw)
    assert [one for one, _ in reported("my.yaml")] == [what]


def test_a_byte_order_mark_and_windows_lines_are_read(folder: Path):
    (folder / "my.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe("my.yaml").where("optim.lr") == "my.yaml:7:3"


def test_a_folder_and_a_missing_file_are_one_fault_each(folder: Path):
    assert reported(str(folder)) == [(f"{folder} is a folder", "the command line")]
    assert reported("mi.yaml") == [("there is no file mi.yaml", "the command line")]
    assert reported("nowhere/my.yaml") == [("there is no file nowhere/my.yaml", "the command line")]


def test_a_file_that_cannot_be_read_has_a_place(folder: Path):
    (folder / "long.yaml").write_bytes(b"#" * 300_000)
    assert reported("long.yaml") == [("long.yaml is larger than 256 KiB", "the command line")]
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket.yaml")
        ((what, place),) = reported("socket.yaml")
    assert (what[:30], place) == ("socket.yaml cannot be read: No", "the command line")
    (folder / "my.yaml").write_text("extends: long.yaml")
    assert reported("my.yaml") == [("extends: long.yaml is larger than 256 KiB", "my.yaml:1:10")]


def test_interpolated_values_are_checked_at_their_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEMTRAIN_TEST_LR", "fast")
    (folder / "my.yaml").write_text(GOOD.replace("1e-4", "${oc.env:MEMTRAIN_TEST_LR}"))
    assert reported("my.yaml") == [("optim.lr: 'fast' is text; it must be a number above 0", "my.yaml:7:7")]
    monkeypatch.setenv("MEMTRAIN_TEST_LR", "3e-4")
    assert load_recipe("my.yaml").recipe.optim.lr == 3e-4


@pytest.mark.parametrize(
    "text",
    [
        "root:$6$secret:19000:0:99999:7:::\ndaemon:*:19000",
        "- secret\n- other",
        "secret",
        "[default]\naws_secret = secret",
        "password: secret\nuser: me",
        "*secret: &x",
        "\t secret: {",
        "",
    ],
)
def test_what_is_extended_and_is_no_recipe_is_never_shown(text: str, tmp_path: Path):
    (tmp_path / "other").write_text(text)
    (tmp_path / "r.yaml").write_text("extends: other\nmethod: sft\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(str(tmp_path / "r.yaml"))
    assert "secret" not in error.value.text()
    assert "is not a recipe" in error.value.text()
    assert "r.yaml:1:" in error.value.faults[0].where
