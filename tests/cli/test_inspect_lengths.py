"""`memtrain inspect-lengths`: what is shown, written and refused, and with which exit code."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.cli.app import run
from memtrain.cli.commands.inspect_lengths import read_lengths
from memtrain.cli.plan.usual_tokenizer import keep_last, of_hub_cache
from memtrain.errors import DataError, RecipeError
from memtrain.trainers.data.tokenize import template_limits
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

TINY = ("--tokenizer", "builtin:tiny")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    texts = [
        {"question": "How many are they? ", "answer": "They are many. " * (1 + n * n % 40)} for n in range(80)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(path)


COLUMNS = ("data.columns.prompt=question", "data.columns.completion=answer")


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert run(["inspect-lengths", *words]) == code
    return capsys.readouterr().out


def too_long(out: str) -> list[str]:
    """Lines of more than 80 letters that could be broken: a path cannot."""
    return [line for line in out.splitlines() if len(line) > 80 and " " in line]


def test_a_pipe_reads_plain_text_of_80_columns(rows, capsys):
    out = shown(capsys, rows, *COLUMNS, *TINY)
    assert "\x1b" not in out
    assert too_long(out) == []
    assert "80 rows, 8,760 tokens" in " ".join(out.split())
    for part in ("completion", "Losses of each max_length", "bfd_split", "Recommended", "length:"):
        assert part in out


def test_samples_and_prompts_and_prices_fit_80_columns_too(rows, capsys):
    many = shown(capsys, rows, *COLUMNS, *TINY, "--sample", "30")
    assert "Estimated from 30 of 80 rows" in many
    priced = shown(capsys, rows, *COLUMNS, "--model", "builtin:tiny", "--budget", "16GiB")
    assert re.search(r"needs +s/step +fits", priced)
    prompts = shown(capsys, rows, "data.columns.prompt=question", "--method", "grpo", *TINY)
    assert "max_prompt:" in prompts
    assert too_long(many + priced + prompts) == []


def test_json_holds_the_numbers_that_are_shown(rows, capsys):
    found = json.loads(shown(capsys, rows, *COLUMNS, *TINY, "--json", "--max-length", "64,32"))
    assert (found["version"], found["rows"], found["method"]) == (1, 80, "sft")
    assert [one["max_length"] for one in found["candidates"]] == [32, 64]
    assert [loss["truncation"] for loss in found["candidates"][0]["losses"]] == [
        "keep_start",
        "keep_end",
        "drop",
    ]
    assert found["tokens"] == found["distributions"][0]["total"]


def test_every_field_of_the_json_is_documented():
    from memtrain.trainers.data.length_report import result

    text = (Path(__file__).parents[2] / "docs" / "inspect-lengths.md").read_text()
    sections = [one for one in vars(result).values() if hasattr(one, "model_fields")]
    names = {name for section in sections for name in section.model_fields}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_the_page_needs_nothing_beside_itself(rows, capsys, tmp_path):
    page = tmp_path / "page.html"
    out = shown(capsys, rows, *COLUMNS, *TINY, "--html", str(page))
    assert f"wrote {page}" in out
    html = page.read_text()
    assert not re.findall(r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", html)
    inside = re.search(r'<script type="application/json" id="found">(.*?)</script>', html, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1])["rows"] == 80


def test_a_page_cannot_be_broken_by_the_names_in_it(capsys, tmp_path):
    path = tmp_path / "<b>&'.jsonl"
    path.write_text('{"text": "some words"}\n{"</script><script>alert(1)</script>": 1}\n')
    page = tmp_path / "page.html"
    shown(capsys, str(path), *TINY, "--html", str(page), "--json")
    html = page.read_text()
    assert "<b>&'" not in html
    assert "<script>alert" not in html


def test_json_stays_json_when_a_page_is_written_beside_it(rows, capsys, tmp_path):
    out = shown(capsys, rows, *COLUMNS, *TINY, "--json", "--html", str(tmp_path / "page.html"))
    assert json.loads(out)["rows"] == 80


def test_a_recipe_gives_data_tokenizer_and_length(rows, capsys, tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"method: sft\nmodel: {{path: builtin:tiny}}\nlength: {{max_length: 100, packing: bfd}}\n"
        f"data:\n  train: {rows}\n  columns: {{prompt: question, completion: answer}}\n"
    )
    for words in ((str(recipe),), ("--recipe", str(recipe))):
        found = json.loads(shown(capsys, *words, "--json"))
        assert found["rows"] == 80
        assert 100 in [one["max_length"] for one in found["candidates"]]
        assert all(one["cost"]["fits"] for one in found["candidates"])
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "Who? ", "answer": "They."}\n')
    found = json.loads(shown(capsys, str(other), "--recipe", str(recipe), "train.batch_size=4", "--json"))
    assert (found["rows"], found["batch"]["rows"]) == (1, 4)


def test_what_does_not_fit_the_budget_is_reported(rows, capsys):
    words = (rows, *COLUMNS, "--model", "builtin:tiny", "--budget", "270MiB")
    found = json.loads(shown(capsys, *words, "--json"))
    assert not any(one["cost"]["fits"] for one in found["candidates"])
    assert "does not fit" in found["recommendation"]["reason"]


def test_without_a_tokenizer_the_first_line_says_which_counts(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def first() -> tuple[str, int]:
        found = json.loads(shown(capsys, rows, "--json"))
        return found["counted_by"], found["tokens"]

    assert shown(capsys, rows).startswith(
        "Counted with the built-in tokenizer, because no model is known here"
    )
    words, tokens = first()
    assert words.startswith("Counted with the built-in tokenizer, because no model is known here")
    folder = tmp_path / "model"
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    shown(capsys, rows, "--tokenizer", str(folder))
    words, again = first()
    assert words.startswith(f"Counted with the tokenizer of {folder} (the one used last);")
    assert tokens == again
    (tmp_path / "cache" / "last-tokenizer").unlink()
    recipes = {"mine": "rows.jsonl", "other": "other.jsonl"}
    for name, source in recipes.items():
        path = folder if name == "mine" else "builtin:tiny"
        (tmp_path / f"{name}.yaml").write_text(
            f"method: sft\nmodel: {{path: {path}}}\ndata: {{train: {source}}}\n"
        )
    assert first()[0].startswith(f"Counted with the tokenizer of {folder} (from {tmp_path / 'mine.yaml'});")


def test_a_tokenizer_that_cannot_be_loaded_is_no_guess(rows, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "hub" / "models--some--model" / "snapshots" / "1"
    broken.mkdir(parents=True)
    (broken / "tokenizer.json").write_text("{")
    assert of_hub_cache() == ("some/model", "from the hub's cache")
    keep_last(str(tmp_path / "nowhere"))
    assert shown(capsys, rows).startswith("Counted with the built-in tokenizer")


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        ((), RecipeError, "no dataset is given"),
        (("rows.jsonl", *TINY, "--method", "dppo"), RecipeError, "unknown method 'dppo'"),
        (("rows.jsonl", *TINY, "--max-length", "1k"), RecipeError, "'1k' is not a list of lengths"),
        (("rows.jsonl", *TINY, "--max-length", "0"), RecipeError, "'0' is not a list of lengths"),
        (("rows.jsonl", *TINY, "--budget", "8GiB"), RecipeError, "--budget needs a model"),
        (("rows.jsonl", *TINY, "--sample", "0"), RecipeError, "--sample"),
        (("nothing.jsonl", *TINY), DataError, "there is no file"),
        (("rows.jsonl", *TINY, "data.colums.prompt=question"), RecipeError, "colums"),
        (("rows.jsonl", "--tokenizer", "builtin:huge"), DataError, "there is no tokenizer"),
    ],
)
def test_wrong_words_are_reported_with_a_way_out(words, kind, says, rows, monkeypatch):
    monkeypatch.chdir(Path(rows).parent)
    with pytest.raises(kind, match=re.escape(says)):
        run(["inspect-lengths", *words])


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = 3 ** (3 ** 16) %}",
    ],
)
def test_a_template_without_end_is_refused(template, tmp_path, monkeypatch):
    """A loop, and one operation of the interpreter that is long by itself; in one row of many."""
    monkeypatch.setattr(template_limits, "LIMIT_S", 0.2)
    (tmp_path / "t.jinja").write_text(
        "{% if 'loop' in messages[0].content %}" + template + "{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    said = [[("user", "loop" if n == 7 else "hi"), ("assistant", "yo")] for n in range(9)]
    texts = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in said]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        "method: sft\n"
        "model: {tokenizer: 'builtin:tiny', chat_template: t.jinja, config: {model_type: llama}}\n"
        f"data: {{train: '{tmp_path}/rows.jsonl'}}\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"the chat template takes more than 0.2 s for one conversation"):
        run(["inspect-lengths", str(recipe)])


def test_lengths_are_read_with_or_without_spaces():
    assert read_lengths("512, 1024,2_048") == (512, 1024, 2048)
    assert read_lengths(None) == ()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", b"", "there are no rows"),
        ("cut.jsonl.gz", b"\x1f\x8b\x08\x00\x00", "not a whole gzip file"),
        ("words.jsonl", b'"just" "words"', "invalid JSON"),
        ("other.csv", b"a,b\n1,2\n", "no format fits the columns a, b"),
    ],
)
def test_wrong_data_is_reported(name, content, says, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        run(["inspect-lengths", str(path), *TINY])


def test_one_huge_row_fits_the_screen(capsys, tmp_path):
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"text": "word and more " * 40_000}) + "\n")
    out = shown(capsys, str(path), *TINY)
    assert too_long(out) == []


@pytest.mark.slow
def test_ctrl_c_shows_what_was_read_and_marks_it_as_partial(tmp_path):
    """The progress line on the terminal tells when reading has begun; then the interrupt comes."""
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for n in range(60_000):
            file.write(json.dumps({"text": f"row {n} of words and more words " * 40}) + "\n")
    leader, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "memtrain", "inspect-lengths", str(path), *TINY, "--json"],
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
    )
    reported = ""
    while "rows/s" not in reported:
        assert select.select([leader], [], [], 60)[0], "nothing is told while reading"
        reported += os.read(leader, 4096).decode()
    assert re.search(r"[\d,]+ of 60,000 rows", reported)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    found = json.loads(out)
    assert process.returncode == 130
    assert found["extent"]["is_partial"]
    assert 0 < found["rows"] < 60_000
    assert found["notes"][0].startswith("Partial")


def test_a_shipped_recipe_is_a_dataset_by_its_name(capsys: pytest.CaptureFixture[str]):
    """A name of two words is a hub id too; the shipped recipe goes first, and no network is asked."""
    assert "rows of format" in shown(capsys, "smoke/dpo", "--max-length", "128")
    with pytest.raises(RecipeError, match="unknown method 'online_xyz'"):
        run(["inspect-lengths", "smoke/dpo", "--method", "Online-XYZ"])


def test_memory_is_predicted_for_pairs_or_not_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The recipe of bare words is of sft: pairs were said to be priced, and had no price."""
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "Why? ", "chosen": "So it is. " * 9, "rejected": "No. " * 4}
    pairs.write_text("".join(json.dumps(row | {"prompt": f"Why {n}? "}) + "\n" for n in range(8)))
    words = (str(pairs), "--model", "builtin:tiny", "--json", "--max-length", "64")
    found = json.loads(shown(capsys, *words))
    assert found["candidates"][0]["cost"] is None
    assert "--method dpo predicts them" in found["notes"][-1]
    assert "recipe" not in found["notes"][-1]  # None was given.
    found = json.loads(shown(capsys, *words, "--method", "dpo"))
    assert 0 < found["candidates"][0]["cost"]["peak_bytes"] < found["candidates"][0]["cost"]["need_bytes"]
    assert found["notes"][-1].startswith("Memory and time are predicted for ")


def test_prompts_are_not_said_to_be_too_short_to_be_planned(capsys: pytest.CaptureFixture[str]):
    """A recipe of GRPO was answered that no row is long enough, under any budget."""
    found = json.loads(shown(capsys, "smoke/grpo", "--budget", "24GiB", "--json"))
    assert all(one["cost"] is None for one in found["candidates"])
    assert "a run of grpo writes completions" in found["notes"][-1]


def test_a_length_that_leaves_no_row_is_told_as_such_and_not_as_one_that_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "long.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": "Say " * 40, "completion": "abc " * 9}) + "\n" for _ in "ab")
    )
    words = (str(data), "--model", "builtin:tiny", "--max-length", "16,64,256", "length.truncation=drop")
    out = shown(capsys, *words)
    assert "At max_length 16, 64 no row is left to train on" in " ".join(out.split())
    assert re.search(r"^ *256 .* yes$", out, re.MULTILINE)
    assert not re.search(r"^ *(16|64) .* no$", out, re.MULTILINE)


def test_no_length_is_recommended_that_cuts_the_prompts_of_many_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """keep_end keeps every loss token of an answer, and would cut three prompts of four."""
    rows = [{"prompt": "a b " * n, "completion": "yes", "label": True} for n in range(1, 41)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["inspect-lengths", str(tmp_path / "rows.jsonl"), "--tokenizer", "builtin:tiny", "--json"]
    assert run([*words, "--max-length", "32,64,256"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["losses"][0]["loss_tokens_lost"] for one in found["candidates"]] == [0, 0, 0]
    assert found["recommendation"]["recipe"].splitlines()[1] == "  max_length: 256"
    assert "of the rows" in found["recommendation"]["reason"]


def test_bad_rows_are_named_once_and_their_kinds_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    good, empty = '{"prompt": "a", "completion": "b"}\n', '{"prompt": "", "completion": ""}\n'
    place = tmp_path / "rows.jsonl"
    words = ["inspect-lengths", str(place), "--tokenizer", "builtin:tiny"]
    for content, said in (
        (good + empty, f"1 bad row: 'prompt' and 'completion' are both empty ({place}:2)."),
        (good + empty * 2, f"2 bad rows: 'prompt' and 'completion' are both empty (the first: {place}:2)."),
        (
            good + empty * 2 + "{\n",
            "3 bad rows. Most often: 'prompt' and 'completion' are both empty (2 times",
        ),
    ):
        place.write_text(content)
        assert run(words) == 0
        assert said.replace(" ", "") in "".join(capsys.readouterr().out.split())
