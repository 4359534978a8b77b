"""Previous names of keys and values: read as today's, noted with their place, refused beside today's."""

from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.reading.load import LoadedRecipe, load_recipe
from memtrain.recipes.reading.previous_names import PREVIOUS_KEYS, renewed_json, renewed_path
from memtrain.recipes.reading.rewrite import rewrite
from memtrain.recipes.recipe import Recipe

HEAD = "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: builtin:arithmetic}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str, *words: str) -> LoadedRecipe:
    Path("my.yaml").write_text(HEAD + text)
    return load_recipe("my.yaml", words)


def notes(read: LoadedRecipe) -> list[str]:
    return [str(one) for one in read.renamed]


def test_every_previous_key_names_a_key_of_today_and_is_none_itself():
    known = every_key(Recipe)
    for old, new in PREVIOUS_KEYS.items():
        assert old not in known
        assert f"{old.rpartition('.')[0]}.{new}" in known


def test_a_previous_key_is_read_as_todays_and_noted_with_its_place():
    read = loaded("train:\n  batch_rows: 8  # so many\n")
    assert read.recipe.train.batch_size == 8
    assert read.where("train.batch_size") == "my.yaml:5:3"
    assert notes(read) == ["my.yaml:5:3: train.batch_rows is now train.batch_size"]


def test_british_spellings_are_read_as_those_of_trl():
    read = load_recipe("smoke/grpo", ["grpo.combine_rewards=normalise_then_sum"])
    assert read.recipe.grpo is not None
    assert read.recipe.grpo.combine_rewards == "normalize_then_sum"
    rloo = load_recipe("smoke/rloo", ["rloo.normalise_advantages=true"]).recipe.rloo
    assert rloo is not None
    assert rloo.normalize_advantages


def test_an_override_by_the_previous_name_goes_over_todays_and_the_other_way_round():
    assert loaded("train: {batch_size: 8}\n", "train.batch_rows=4").recipe.train.batch_size == 4
    read = loaded("train: {batch_rows: 8}\n", "train={batch_size: 2}")
    assert read.recipe.train.batch_size == 2
    assert notes(loaded("", "train.batch_rows=4")) == [
        "from the command line: `train.batch_rows=4`: train.batch_rows is now train.batch_size"
    ]


def test_a_file_with_todays_name_extends_one_with_the_previous_name():
    Path("base.yaml").write_text("train: {batch_rows: 8, micro_rows: 2}\n")
    read = loaded("extends: base.yaml\ntrain: {batch_size: 16}\n")
    assert (read.recipe.train.batch_size, read.recipe.train.micro_batch_size) == (16, 2)
    assert notes(read)[1] == "base.yaml:1:24: train.micro_rows is now train.micro_batch_size"


@pytest.mark.parametrize(
    "written",
    [
        "${train.batch_rows}",
        "${.batch_rows}",
        "${oc.select:train.batch_rows,1}",
        "${train[batch_rows]}",
        "${train.${oc.env:NO_SUCH,batch_rows}}",
    ],
)
def test_a_reference_to_a_previous_name_finds_the_key(written: str):
    read = loaded(f"train:\n  batch_size: 8\n  max_steps: {written}\n")
    assert read.recipe.train.max_steps == 8


def test_text_that_only_looks_like_a_reference_stays():
    read = loaded("run_dir: 'runs/\\${train.batch_rows}'\n")
    assert read.recipe.run_dir == "runs/${train.batch_rows}"
    assert notes(read) == []


def test_a_key_under_both_names_is_refused_with_both_places():
    with pytest.raises(RecipeError) as caught:
        loaded("train:\n  batch_rows: 8\n  batch_size: 8\n")
    (fault,) = caught.value.faults
    assert fault.where == "my.yaml:5:3"
    assert fault.what == "train.batch_rows is the previous name of train.batch_size, written at my.yaml:6:3"
    assert fault.fix == "keep batch_size, and remove batch_rows"


def test_a_fault_beside_a_previous_name_comes_with_the_note():
    with pytest.raises(RecipeError) as caught:
        loaded("train: {batch_rows: none}\n")
    assert caught.value.faults[0].what.startswith("train.batch_size: ")
    assert caught.value.__notes__ == ["note: my.yaml:4:9: train.batch_rows is now train.batch_size"]


def test_a_saved_recipe_is_read_through_the_same_table():
    saved = {"train": {"batch_rows": 8, "seed": 1}, "data": {"train": [{"source": "a"}]}}
    made = {"train": {"batch_size": 8, "seed": 1}, "data": {"train": [{"source": "a"}]}}
    assert renewed_json(saved) == made
    assert renewed_path(("train", "micro_rows")) == ("train", "micro_batch_size")


def test_a_file_is_rewritten_with_its_comments_quotes_and_line_ends():
    text = (
        "# train.batch_rows in a comment stays\r\ntrain:\r\n  'batch_rows': 8   # eight\r\n"
        "  max_steps: ${train.batch_rows}\r\n  micro_rows: &few 2\r\n"
    )
    path = Path("my.yaml")
    path.write_bytes(b"\xef\xbb\xbf" + (HEAD + text).encode())
    path.chmod(0o640)
    before = load_recipe("my.yaml")
    assert rewrite(path, before.renamed) == 3
    after = load_recipe("my.yaml")
    assert (after.recipe, after.renamed) == (before.recipe, ())
    assert path.stat().st_mode & 0o777 == 0o640
    expected = (
        "# train.batch_rows in a comment stays\r\ntrain:\r\n  'batch_size': 8   # eight\r\n"
        "  max_steps: ${train.batch_size}\r\n  micro_batch_size: &few 2\r\n"
    )
    assert path.read_bytes() == b"\xef\xbb\xbf" + (HEAD + expected).encode()


def test_a_shared_section_is_rewritten_once():
    text = "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: a}\ntrain: &t {batch_rows: 8}\neval: {}\n"
    Path("my.yaml").write_text(text)
    assert rewrite(Path("my.yaml"), load_recipe("my.yaml").renamed) == 1
    assert "train: &t {batch_size: 8}" in Path("my.yaml").read_text()
