"""Preparing: from a recipe to stores on disk, once, the same in every process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memtrain.errors import DataError
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.sources.splits import choose_rows
from memtrain.trainers.data.store.prepare import Work, kept_rows, prepare
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

REAL = Path(os.environ.get("MEMTRAIN_DATA", Path(__file__).parents[5] / "shared" / "data"))
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"needs real data in {REAL} (or $MEMTRAIN_DATA)")


def recipe_of(cache: Path, method: str = "sft", **data) -> Recipe:
    said = {"method": method, "model": {"path": "builtin:tiny"}, "data": data | {"cache_dir": str(cache)}}
    return Recipe.model_validate(said)


def store(cache: Path, method: str = "sft", **data) -> TokenStore:
    recipe = recipe_of(cache, **data)
    return kept_rows(recipe.data, recipe.data.train, method, load_tokenizer("builtin:tiny"), seed=0).store


def jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


SYSTEM, ASKED, TOLD = (
    {"role": role, "content": content}
    for role, content in (("system", "Be kind."), ("user", "Add.\n1 + 1"), ("assistant", "2"))
)


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add.", "input": "1 + 1", "output": "2"},
        {"question": "Add.\n1 + 1", "answer": "2"},
    ],
)
def test_instructions_and_questions_are_the_tokens_of_their_messages(tmp_path, row):
    plain = {"prompt": [ASKED], "completion": [TOLD]}
    kinds = [store(tmp_path, train=jsonl(tmp_path / f"{len(one)}.jsonl", [one])) for one in (row, plain)]
    asked = {"prompt": [SYSTEM, ASKED], "completion": [TOLD]}
    kinds += [
        store(tmp_path, train=jsonl(tmp_path / "asked.jsonl", [asked])),
        store(tmp_path, train=jsonl(tmp_path / "row.jsonl", [row]), system_prompt="Be kind."),
    ]
    for one, other in zip(kinds[::2], kinds[1::2], strict=True):
        assert one.meta.format == "prompt_completion"
        assert one.row(0).tolist() == other.row(0).tolist()
        assert one.loss_mask(0).tolist() == other.loss_mask(0).tolist()
    assert len(kinds[0].row(0)) < len(kinds[3].row(0))


def test_a_system_prompt_for_strings_is_refused(tmp_path):
    rows = jsonl(tmp_path / "d.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(DataError, match="data.system_prompt has no effect"):
        store(tmp_path, train=rows, system_prompt="Be kind.")
    mixed = [{"source": rows, "system_prompt": ""}, {"source": "builtin:arithmetic", "limit": 2}]
    with pytest.raises(DataError, match="'builtin:arithmetic' are strings"):
        store(tmp_path, train=mixed, system_prompt="Be kind.")


def test_a_pair_of_which_one_answer_is_bad_is_left_out_whole(tmp_path):
    pairs = [{"prompt": "a", "chosen": " b", "rejected": answer} for answer in (" c", "")]
    path = tmp_path / "d.json"
    path.write_text(json.dumps(pairs))
    made = store(tmp_path, "kto", train=str(path), on_bad_row="skip", end_token=False)
    assert (made.meta.num_read, made.num_rows, made.meta.num_skipped) == (2, 2, 1)


def test_prepared_counts_are_those_of_the_store(tmp_path):
    recipe = recipe_of(tmp_path, train=[{"source": "builtin:arithmetic", "limit": 200}], eval_fraction=0.25)
    prepared = prepare(recipe)
    opened = TokenStore.open(prepared.train.folder)
    chosen = choose_rows(recipe.data, opened, 0)
    assert (prepared.train.num_rows, prepared.held_out_rows, opened.num_rows) == (150, 50, 200)
    assert prepared.train.num_tokens == sum(len(opened.row(i)) for i in chosen.train.tolist())
    loss_spans = [opened.loss_mask(i)[1:].sum() for i in chosen.train.tolist()]
    assert prepared.train.num_loss_tokens == sum(loss_spans)
    assert prepared.eval is None


@pytest.mark.parametrize(("method", "form"), [("dpo", "preference"), ("kto", "unpaired"), ("grpo", "prompt")])
def test_rows_of_one_prompt_are_held_out_together(method, form, tmp_path):
    """Twenty prompts of three rows each, in turn."""
    answers = {
        "preference": lambda i: {"chosen": f" {i}", "rejected": " no"},
        "unpaired": lambda i: {"completion": f" {i}", "label": i % 2 == 0},
        "prompt": lambda i: {"answer": str(i)},
    }
    rows = [{"prompt": f"{i % 20} pens", **answers[form](i)} for i in range(60)]
    source = jsonl(tmp_path / "rows.jsonl", rows)
    made = store(tmp_path, method, train=source)
    chosen = choose_rows(recipe_of(tmp_path, train=source, eval_fraction=0.2).data, made, 0)
    assert (len(chosen.train), len(chosen.eval)) == (48, 12)
    sides = [{bytes(made.part(i, "prompt")) for i in side.tolist()} for side in (chosen.train, chosen.eval)]
    assert not sides[0] & sides[1]


def test_one_prompt_cannot_be_on_both_sides(tmp_path):
    rows = [{"prompt": "a joke", "completion": f" {i}", "label": i % 2 == 0} for i in range(6)]
    recipe = recipe_of(tmp_path, method="kto", train=jsonl(tmp_path / "rows.jsonl", rows), eval_fraction=0.2)
    with pytest.raises(DataError) as caught:
        prepare(recipe)
    assert "data.eval" in caught.value.text()


def test_eval_rows_of_their_own_have_a_store_of_their_own(tmp_path):
    train = [{"source": "builtin:arithmetic", "limit": 20}]
    held = [{"source": "builtin:arithmetic", "limit": 10, "split": "test"}]
    prepared = prepare(recipe_of(tmp_path, train=train, eval=held))
    assert prepared.eval is not None
    assert (prepared.train.num_rows, prepared.eval.num_rows, prepared.held_out_rows) == (20, 10, 0)
    assert prepared.train.folder != prepared.eval.folder


@pytest.mark.parametrize(
    ("method", "form", "parts"),
    [
        ("sft", "auto", ("prompt", "completion")),
        ("sft", "messages", ("messages",)),
        ("sft", "text", ("text",)),
        ("dpo", "auto", ("prompt", "chosen", "rejected")),
        ("kto", "auto", ("prompt", "completion")),
        ("kto", "preference", ("prompt", "completion")),
        ("grpo", "auto", ("prompt",)),
    ],
)
def test_builtin_rows_have_the_form_that_the_method_learns_from(tmp_path, method, form, parts):
    made = store(tmp_path, method, train=[{"source": "builtin:arithmetic", "limit": 30, "format": form}])
    assert made.meta.parts == parts
    assert made.num_rows == (60 if form == "preference" else 30)
    assert made.meta.has_label is (method in ("dpo", "kto"))
    if method == "grpo":
        assert made.columns(3)["answer"].startswith("#### ")
    else:
        assert made.loss_tokens_per_row.min() > 0


def test_rows_are_tokenized_once_and_found_again(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", [{"text": "How many pens?"}] * 3)
    calls = []
    recipe = recipe_of(tmp_path / "c", train=path)
    first = prepare(recipe, progress=lambda rows, tokens: calls.append((rows, tokens)))
    again = prepare(recipe, progress=lambda rows, tokens: calls.append((rows, tokens)))
    assert first == again
    assert len(calls) == 1
    assert calls[0][0] == 3


def test_what_matters_makes_another_store_and_what_does_not_does_not(tmp_path):
    rows = [{"prompt": "How many", "completion": " pens"}]
    path = jsonl(tmp_path / "d.jsonl", rows)
    first = store(tmp_path, train=path).folder
    assert store(tmp_path, train=path, processes=2).folder == first
    assert store(tmp_path, train=path, end_token=False).folder != first
    assert store(tmp_path, train=path, completion_only_loss=False).folder != first
    os.utime(path, (1, 1))
    assert store(tmp_path, train=path).folder == first
    jsonl(tmp_path / "d.jsonl", rows * 2)
    assert store(tmp_path, train=path).folder != first


def test_a_mixture_is_tokenized_once_and_sampled_by_weight(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [{"text": f"a {i}"} for i in range(60)])
    two = jsonl(tmp_path / "two.jsonl", [{"text": f"b {i}"} for i in range(20)])
    sources = [{"source": one, "weight": 1.0}, {"source": two, "weight": 3.0}]
    made = store(tmp_path, train=sources)
    assert made.num_rows == 80
    recipe = recipe_of(tmp_path, train=sources, eval_fraction=0.2)
    chosen = choose_rows(recipe.data, made, seed=0)
    assert len(chosen.eval) == 16
    assert not set(chosen.eval.tolist()) & set(chosen.train.tolist())
    assert len(chosen.train) == 64
    assert np.sum(made.origins[chosen.train, 0] == 1) == 48
    data = prepare(recipe)
    assert [(one.source, one.num_rows) for one in data.train.sources] == [(one, 16), (two, 48)]
    for name in ("num_tokens", "num_loss_tokens"):
        assert sum(getattr(share, name) for share in data.train.sources) == getattr(data.train, name)
    tokens = data.train.sources[1].num_tokens
    share = f"{tokens / data.train.num_tokens:.1%} of the tokens"
    loss_tokens = data.train.sources[1].num_loss_tokens
    own = f"{loss_tokens:,} loss tokens ({loss_tokens / tokens:.1%} of its own)"
    assert any(f"{two}: 48 rows, {tokens:,} tokens ({share}), {own}" in words for words in data.words())


def test_the_first_row_is_kept_as_text_with_its_trained_part(tmp_path):
    row = {"question": "1 + 1?", "answer": "2"}
    data = prepare(recipe_of(tmp_path, train=jsonl(tmp_path / "d.jsonl", [row])))
    prompt, answer = data.train.example
    assert prompt == ("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n", False)
    assert answer == ("2<|im_end|>\n", True)
    assert "Trained: completions only" in data.words()[0]


def test_each_answer_of_a_first_pair_stands_below_its_name(tmp_path):
    row = {"prompt": "1 + 1?", "chosen": " 2", "rejected": " 3"}
    data = prepare(recipe_of(tmp_path, "dpo", train=jsonl(tmp_path / "d.jsonl", [row])))
    assert data.train.example == (
        ("1 + 1?", False),
        ("\n--- chosen ---\n", False),
        (" 2<eos>", True),
        ("\n--- rejected ---\n", False),
        (" 3<eos>", True),
    )


def test_a_chat_template_that_rows_of_strings_do_not_use_is_named(tmp_path):
    strings = jsonl(tmp_path / "d.jsonl", [{"prompt": "1 + 1?", "completion": "2"}])
    (words,) = (one for one in prepare(recipe_of(tmp_path, train=strings)).words() if "Warning" in one)
    assert words.startswith(
        "Warning: the rows are strings, which the tokenizer's chat template does not write"
    )
    assert "data.strings_are: turns" in words
    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": "1 + 1?"}])
    pairs = jsonl(tmp_path / "q.jsonl", [{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}])
    for method, rows in (("grpo", prompts), ("dpo", pairs), ("kto", pairs), ("reward", pairs)):
        said = recipe_of(tmp_path, train=rows).data
        rewards = {"rewards": {"functions": "exact_answer"}} if method == "grpo" else {}
        recipe = Recipe.model_validate(
            {"method": method, "model": {"path": "builtin:tiny"}, "data": said} | rewards
        )
        assert words in prepare(recipe).words(), method
    for are in ("turns", "text"):
        told = prepare(recipe_of(tmp_path, train=strings, strings_are=are)).words()
        assert not any("Warning" in one for one in told)
    text = prepare(recipe_of(tmp_path, train=jsonl(tmp_path / "t.jsonl", [{"text": "1 + 1?"}])))
    assert words not in text.words()
    chats = jsonl(tmp_path / "m.jsonl", [{"messages": [ASKED, TOLD]}])
    mixed = prepare(recipe_of(tmp_path, train=[chats, strings])).words()
    assert any(f"the rows of {strings} are strings" in one for one in mixed)


def test_one_source_is_no_mixture(tmp_path):
    assert (
        prepare(recipe_of(tmp_path, train=jsonl(tmp_path / "d.jsonl", [{"text": "a b"}]))).train.sources == ()
    )


def test_sources_of_two_formats_are_trained_on_together(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", [{"question": "a b", "answer": "c d"}])
    two = jsonl(tmp_path / "two.jsonl", [{"text": "e f"}])
    columns = {"prompt": "question", "completion": "answer"}
    made = store(tmp_path, train=[{"source": one, "columns": columns}, two])
    tokenizer = load_tokenizer("builtin:tiny")
    assert [tokenizer.decode(made.row(i)) for i in range(2)] == ["a bc d<eos>", "e f<eos>"]
    assert [made.origin(i) for i in range(2)] == [f"{one}:1", f"{two}:1"]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({"completion_only_loss": True}, "data.completion_only_loss has no effect on rows of format text"),
        ({"assistant_only_loss": True}, "data.assistant_only_loss has no effect on rows of format text"),
        ({"format": "messages"}, "the row has no column 'messages'; it has text"),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path, data, what):
    path = jsonl(tmp_path / "d.jsonl", [{"text": "a b"}])
    with pytest.raises(DataError) as error:
        store(tmp_path, train=path, **data)
    assert error.value.faults[0].what == what


def test_messages_need_a_chat_template(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    recipe = recipe_of(tmp_path, train=path)
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        kept_rows(recipe.data, recipe.data.train, "sft", tokenizer, seed=0)


CODE = """
import sys
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import prepare
path, cache = sys.argv[1:]
data = {"train": [path], "cache_dir": cache, "eval_fraction": 0.1}
recipe = Recipe.model_validate({"method": "sft", "model": {"path": "builtin:tiny"}, "data": data})
print(prepare(recipe).train.folder)
"""


def test_every_process_makes_the_same_store_whatever_its_hash_seed(tmp_path):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = jsonl(tmp_path / "d.jsonl", [{"messages": talk, "id": i, "source": "x"} for i in range(9)])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-c", CODE, path, str(tmp_path / "other")]
    env = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    other = Path(done.stdout.strip())
    data = {"train": [path], "cache_dir": str(tmp_path / "own"), "eval_fraction": 0.1}
    model = {"path": "builtin:tiny"}
    own = Path(prepare(Recipe.model_validate({"method": "sft", "model": model, "data": data})).train.folder)
    assert own.name == other.name
    assert sorted(file.name for file in own.iterdir()) == sorted(file.name for file in other.iterdir())
    for file in own.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_the_modules_of_data_load_no_torch():
    code = (
        "import sys, memtrain.trainers.data.store.prepare; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@real
def test_real_questions_are_stored_to_the_token(tmp_path):
    path = REAL / "gsm8k" / "train.jsonl"
    columns = {"prompt": "question", "completion": "answer"}
    made = store(tmp_path, train=[{"source": str(path), "limit": 300}], columns=columns)
    tokenizer = load_tokenizer("builtin:tiny")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert made.num_rows == 300
    for i in range(300):
        row = rows[int(made.origin(i).rsplit(":", 1)[1]) - 1]
        assert made.row(i).tolist() == tokenizer(row["question"] + row["answer"] + "<eos>")["input_ids"]


@real
def test_real_pairs_share_their_prompt(tmp_path):
    path = REAL / "gsm8k_solutions" / "preference.jsonl"
    made = store(tmp_path, "dpo", train=[{"source": str(path), "limit": 200}])
    tokenizer = load_tokenizer("builtin:tiny")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for i in range(made.num_rows):
        row = rows[int(made.origin(i).rsplit(":", 1)[1]) - 1]
        prompt, rejected = made.part(i, "prompt").tolist(), made.part(i, "rejected").tolist()
        assert prompt + rejected == tokenizer(row["prompt"] + row["rejected"] + "<eos>")["input_ids"]


@pytest.mark.parametrize("kind", ["d.jsonl", "d.jsonl.gz", "d.json", "d.parquet"])
def test_a_file_that_changes_while_it_is_read_is_no_cache(tmp_path, monkeypatch, kind):
    """The file changes after its digest was taken and before its rows are read."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet

    def write(word: str) -> Path:
        path, rows = tmp_path / kind, [{"text": f"{word} {i}"} for i in range(50)]
        if kind == "d.parquet":
            pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        else:
            text = json.dumps(rows) if kind == "d.json" else "".join(json.dumps(row) + "\n" for row in rows)
            path.write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
        return path

    path = write("one")
    made_of = Work.made_of

    def then_changes(work: Work, *given):
        said = made_of(work, *given)
        write("two")
        return said

    monkeypatch.setattr(Work, "made_of", then_changes)
    with pytest.raises(DataError, match=f"'{kind}' changed while it was read"):
        store(tmp_path / "cache", train=str(path))
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("tokens/[!.]*"))
    assert store(tmp_path / "cache", train=str(path)).num_rows == 50
