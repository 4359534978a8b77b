"""The whole answer against a plain, slow count of the same rows, on every format, and against training."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memtrain.errors import DataError
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Data
from memtrain.recipes.sections.length import Length, limits_of
from memtrain.recipes.sections.training import Train
from memtrain.trainers.data.length_report.candidates import default_candidates
from memtrain.trainers.data.length_report.inspect import Question, inspect
from memtrain.trainers.data.length_report.result import Candidate, Inspection, Loss
from memtrain.trainers.data.packing.answer_rows import lay_out_answers
from memtrain.trainers.data.packing.prompt_rows import lay_out_prompts
from memtrain.trainers.data.packing.step_order import BatchSize, make_epoch, micro_batches
from memtrain.trainers.data.packing.token_rows import Spans, lay_out
from memtrain.trainers.data.sources.splits import choose_rows
from memtrain.trainers.data.store.prepare import kept_rows
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

REAL = Path(os.environ.get("MEMTRAIN_DATA", Path(__file__).parents[5] / "shared" / "data"))
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"needs real data in {REAL} (or $MEMTRAIN_DATA)")

tokenizer = load_tokenizer("builtin:tiny")
WORDS = ["one", "two", "three,", "four!", "five", "six", "seven;", "eight", "nine", "ten", "eleven", "twelve"]


def words(number: int) -> str:
    return " ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(number % 37 + 1))


def turns(number: int) -> list[dict[str, str]]:
    roles = ("user", "assistant") * (1 + number % 3)
    return [{"role": role, "content": words(number + at)} for at, role in enumerate(roles)]


ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": words(n)} for n in range(90)],
    "prompt_completion": [{"prompt": words(n) + " ", "completion": words(3 * n)} for n in range(90)],
    "messages": [{"messages": turns(n)} for n in range(60)],
    "ids": [
        {"input_ids": [5 + n, *range(5, 9 + n)], "labels": [-100, -100, *range(6, 9 + n)]} for n in range(40)
    ],
    "preference": [
        {"prompt": words(n) + " ", "chosen": "A " + words(2 * n), "rejected": "B " + words(5 * n)}
        for n in range(90)
    ],
    "unpaired": [
        {"prompt": words(n) + " ", "completion": words(3 * n), "label": n % 2 == 0} for n in range(90)
    ],
    "prompt": [{"prompt": words(n), "answer": words(4 * n)} for n in range(90)],
}


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inspected(source: str, cache: Path, *, method: str | None = None, **asked: Any) -> Inspection:
    length, train = asked.pop("length", {}), asked.pop("train", {})
    own = {key: asked.pop(key) for key in ("max_lengths", "sample") if key in asked}
    data = Data.model_validate({"train": source, "cache_dir": str(cache)} | asked)
    question = Question(
        dataset="rows",
        data=data,
        length=Length.model_validate(length),
        train=Train.model_validate(train),
        method=method,
        tokenizer_name="builtin:tiny",
        **own,
    )
    return inspect(question, tokenizer)


def loss(one: Candidate, truncation: str) -> Loss:
    return next(loss for loss in one.losses if loss.truncation == truncation)


def at(found: Inspection, max_length: int) -> Candidate:
    return next(one for one in found.candidates if one.max_length == max_length)


# The slow count: every row a list of (token, in the loss), made by the tokenizer's own offsets.


def slow_row(prompt: str, completion: str, *, learns_prompt: bool = False) -> tuple[int, list[bool]]:
    """(tokens of the prompt, for every token whether it is trained on) of two texts put together."""
    text = prompt + completion
    if not text.endswith(tokenizer.eos_token):
        text += tokenizer.eos_token
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    inside = sum(end <= len(prompt) for _, end in spans) if prompt else 0
    return inside, [learns_prompt or number >= inside for number in range(len(spans))]


def slow_loss(rows: list[list[bool]], limit: int, truncation: str) -> Loss:
    cut = dropped = tokens = loss_tokens = 0
    for row in rows:
        total = sum(row[1:])
        kept = row if len(row) <= limit else row[:limit] if truncation == "keep_start" else row[-limit:]
        if len(row) > limit and truncation == "drop" or not sum(kept[1:]):
            dropped, tokens, loss_tokens = dropped + 1, tokens + len(row), loss_tokens + total
        elif len(row) > limit:
            cut, tokens, loss_tokens = cut + 1, tokens + len(row) - limit, loss_tokens + total - sum(kept[1:])
    return Loss.model_validate(
        {
            "truncation": truncation,
            "rows_cut": cut,
            "rows_dropped": dropped,
            "tokens_lost": tokens,
            "loss_tokens_lost": loss_tokens,
        }
    )


def check_against_slow(found: Inspection, rows: list[list[bool]]) -> None:
    lengths = sorted(len(row) for row in rows)
    assert (found.rows, found.tokens) == (len(rows), sum(lengths))
    assert found.loss_tokens == sum(sum(row[1:]) for row in rows)
    row = found.distributions[0]
    assert row.mean == pytest.approx(sum(lengths) / len(lengths))
    for point in row.percentiles:
        rank = max(1, -(-len(lengths) * round(point.percent * 10) // 1000))
        assert point.tokens == lengths[rank - 1]
    for one in found.candidates:
        assert one.rows_longer == sum(length > one.max_length for length in lengths)
        for counted in one.losses:
            assert counted == slow_loss(rows, one.max_length, counted.truncation)


def test_rows_of_text_are_those_of_a_slow_count(tmp_path):
    found = inspected(jsonl(tmp_path / "a.jsonl", ROWS["text"]), tmp_path)
    check_against_slow(found, [slow_row("", row["text"], learns_prompt=True)[1] for row in ROWS["text"]])
    assert (found.method, found.format) == ("sft", "text")


def test_rows_of_prompt_and_completion_are_those_of_a_slow_count(tmp_path):
    rows = ROWS["prompt_completion"]
    found = inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    slow = [slow_row(row["prompt"], row["completion"]) for row in rows]
    check_against_slow(found, [loss_tokens for _, loss_tokens in slow])
    prompt = next(part for part in found.distributions if part.name == "prompt")
    assert (prompt.total, prompt.largest) == (sum(n for n, _ in slow), max(n for n, _ in slow))


def test_rows_of_ids_are_those_of_a_slow_count(tmp_path):
    rows = ROWS["ids"]
    found = inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    check_against_slow(found, [[label != -100 for label in row["labels"]] for row in rows])


def test_conversations_are_those_of_the_chat_template(tmp_path):
    rows = ROWS["messages"]
    found = inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path, assistant_only_loss=False)
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    slow = [[True] * len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    check_against_slow(found, slow)
    messages = next(part for part in found.distributions if part.name == "turns")
    assert (messages.total, messages.largest) == (sum(len(row["messages"]) for row in rows), 6)


@pytest.mark.parametrize("asked", [True, None])
def test_turns_are_the_assistants_where_only_they_are_trained_on(tmp_path, asked):
    found = inspected(jsonl(tmp_path / "a.jsonl", ROWS["messages"]), tmp_path, assistant_only_loss=asked)
    turn = next(part for part in found.distributions if part.name == "turn")
    loss_tokens = next(part for part in found.distributions if part.name == "loss_tokens")
    assert turn.count == sum(len(row["messages"]) // 2 for row in ROWS["messages"])
    assert turn.total == loss_tokens.total == found.loss_tokens < found.tokens


def slow_pair(row: dict[str, Any]) -> tuple[int, list[int]]:
    """(tokens of the prompt, of each answer): the prompt is what both begin with, within its own text."""
    both = [row["prompt"] + row[name] + tokenizer.eos_token for name in ("chosen", "rejected")]
    ids = [tokenizer(text)["input_ids"] for text in both]
    inside = min(slow_row(row["prompt"], row[name])[0] for name in ("chosen", "rejected"))
    shared = next((i for i in range(inside) if ids[0][i] != ids[1][i]), inside)
    return shared, [len(one) - shared for one in ids]


def test_pairs_are_those_of_a_slow_count(tmp_path):
    """keep_end: the prompt gives way to the longer answer down to one token, then answers lose their ends."""
    rows = ROWS["preference"]
    found = inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path)
    slow = [slow_pair(row) for row in rows]
    assert (found.method, found.rows) == ("dpo", len(rows))
    assert found.loss_tokens == sum(sum(answers) for _, answers in slow)
    assert found.distributions[0].total == sum(prompt + max(answers) for prompt, answers in slow)
    for one in found.candidates:
        limit = one.max_length
        assert one.rows_longer == sum(prompt + max(answers) > limit for prompt, answers in slow)
        over = [sum(answers) for prompt, answers in slow if prompt + max(answers) > limit]
        assert (loss(one, "drop").rows_dropped, loss(one, "drop").loss_tokens_lost) == (len(over), sum(over))
        lost = sum(max(0, 1 + n - limit) for _, answers in slow for n in answers)
        assert loss(one, "keep_end").loss_tokens_lost == lost


def test_prompts_are_counted_with_the_answers_beside_them(tmp_path):
    rows = ROWS["prompt"]
    found = inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path, method="grpo")
    lengths = [len(tokenizer(row["prompt"])["input_ids"]) for row in rows]
    answers = [len(tokenizer(row["answer"])["input_ids"]) for row in rows]
    assert found.distributions[0].total == found.tokens == sum(lengths)
    beside = next(part for part in found.distributions if part.name == "answer")
    assert (beside.total, beside.largest) == (sum(answers), max(answers))
    for one in found.candidates:
        over = [n for n in lengths if n > one.max_length]
        assert (loss(one, "drop").rows_dropped, loss(one, "drop").tokens_lost) == (len(over), sum(over))
        assert (one.losses[0].truncation, one.losses[0].rows_cut) == ("keep_end", len(over))
        assert loss(one, "keep_start").tokens_lost == sum(n - one.max_length for n in over)
    assert "max_prompt: " in found.recommendation.recipe


@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("sft", "text"),
        ("sft", "prompt_completion"),
        ("sft", "messages"),
        ("sft", "ids"),
        ("dpo", "preference"),
        ("kto", "unpaired"),
        ("kto", "preference"),
        ("reward", "preference"),
    ],
)
def test_counts_are_those_that_training_reports(method: str, form: str, tmp_path):
    """The store that training writes, laid out as training does, at three lengths and in every way."""
    source = jsonl(tmp_path / "a.jsonl", ROWS[form])
    found = inspected(source, tmp_path, method=method, eval_fraction=0.2, max_lengths=(8, 24, 60))
    data = Data.model_validate({"train": source, "eval_fraction": 0.2, "cache_dir": str(tmp_path)})
    store = kept_rows(data, data.train, method, tokenizer, 0).store
    chosen = choose_rows(data, store, 0).train
    assert not found.extent.is_cached
    assert found.rows == len(chosen)
    for one in found.candidates:
        for counted in one.losses:
            length = Length(max_length=one.max_length, truncation=counted.truncation)
            report = report_of(method, store, chosen, length)
            assert (counted.rows_cut, counted.rows_dropped) == (report.rows_cut, report.rows_dropped)
            assert (counted.tokens_lost, counted.loss_tokens_lost) == (
                report.tokens_lost,
                report.loss_tokens_lost,
            )
        for packed in one.packings:
            length = Length(max_length=one.max_length, packing=packed.packing)
            report = report_of(method, store, chosen, length)
            assert (packed.sequences, packed.fill) == (report.num_sequences, report.fill)
            assert (packed.rows_split, packed.loss_tokens_lost) == (
                report.rows_split,
                report.loss_tokens_lost,
            )
    again = inspected(source, tmp_path, method=method, eval_fraction=0.2, max_lengths=(8, 24, 60))
    assert again.extent.is_cached
    assert (again.candidates, again.distributions) == (found.candidates, found.distributions)
    assert (again.longest, again.duplicates) == (found.longest, found.duplicates)


def test_prompts_are_cut_as_the_online_methods_cut_them(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ROWS["prompt"])
    found = inspected(source, tmp_path, method="grpo", max_lengths=(8, 24, 60))
    said: dict[str, Any] = {
        "method": "grpo",
        "model": {"path": "builtin:tiny"},
        "data": {"train": source, "cache_dir": str(tmp_path)},
        "rewards": {"functions": "exact_answer"},
    }
    data = Data.model_validate(said["data"])
    store = kept_rows(data, data.train, "grpo", tokenizer, 0).store
    for one in found.candidates:
        for counted in one.losses:
            length = {
                "max_length": None,
                "max_prompt": one.max_length,
                "truncation": counted.truncation,
            }
            recipe = Recipe.model_validate(said | {"length": length})
            report = lay_out_prompts(
                store, np.arange(store.num_rows), recipe.row_limits, each=recipe.generation.num_generations
            ).report
            assert (counted.rows_cut, counted.rows_dropped) == (report.rows_cut, report.rows_dropped)
            assert counted.tokens_lost == report.tokens_lost


def report_of(method: str, store: TokenStore, chosen: np.ndarray, length: Length):
    if method == "sft":
        spans = Spans(store.span_ptr, store.span_starts, store.span_ends)
        rules = limits_of(length, has_prompts=False)
        return lay_out(store.lengths, spans, chosen, rules).profile.report
    return lay_out_answers(store, chosen, limits_of(length, has_prompts=True), is_shared=True).profile.report


def test_padding_is_that_of_the_micro_batches_of_training(tmp_path):
    train = {"batch_size": 7, "micro_batch_size": 3}
    source = jsonl(tmp_path / "a.jsonl", ROWS["text"])
    found = inspected(source, tmp_path, train=train, length={"pad_to_multiple_of": 8}, max_lengths=(20,))
    lengths = np.array([min(20, len(slow_row("", row["text"])[1])) for row in ROWS["text"]])
    for grouped, shown in (
        (False, found.candidates[0].padding.fixed),
        (True, found.candidates[0].padding.grouped),
    ):
        epoch = make_epoch(
            lengths, BatchSize(7, None), seed=0, epoch=0, shuffle=True, group_by_length=grouped
        )
        slots = 0
        for step in range(epoch.num_steps):
            dealt = micro_batches(
                epoch.step(step), lengths, num_ranks=1, micro_batch_size=3, micro_tokens=None
            )
            slots += sum(len(rows) * -(-int(lengths[rows].max()) // 8) * 8 for rows in dealt[0])
        assert shown == pytest.approx(1 - lengths.sum() / slots)
    assert found.candidates[0].steps == 13


def test_mixtures_count_a_row_as_often_as_it_is_trained_on(tmp_path):
    small = jsonl(tmp_path / "small.jsonl", ROWS["text"][:10])
    large = jsonl(tmp_path / "large.jsonl", ROWS["text"][10:])
    sources = [{"source": small, "weight": 3.0}, {"source": large, "weight": 1.0}]
    data = Data.model_validate({"train": sources, "cache_dir": str(tmp_path)})
    question = Question("mixture", data, Length(), Train(), None, "builtin:tiny", max_lengths=(16,))
    found = inspect(question, tokenizer)
    store = kept_rows(data, data.train, "sft", tokenizer, 0).store
    chosen = choose_rows(data, store, 0).train
    assert found.rows == len(chosen) == 90
    assert found.tokens == int(store.lengths[chosen].sum())
    assert found.loss_tokens == int(store.loss_tokens_per_row[chosen].sum())


def test_bad_rows_are_counted_by_kind_with_their_place(tmp_path):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": "What is it? ", "completion": "It is."}).encode()
    empty = json.dumps({"prompt": "Why? ", "completion": ""}).encode()
    lines = [good, empty, good, b'{"prompt": "bad \xff', b"[1]", b'{"text": "a"}', b"{", b"[2, 3]"]
    path.write_bytes(b"\n".join(lines))
    found = inspected(str(path), tmp_path, end_token=False)
    assert found.rows == 2
    assert (found.faulty.rows, found.faulty.without_loss_tokens) == (6, 1)
    lists = found.faulty.kinds[0]
    assert (lists.rows, lists.where) == (2, f"{path}:5")
    assert any("on_bad_row" in note for note in found.notes)
    assert found.duplicates == 1


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"instruction": "Add.", "input": "2 + 2", "output": "4"}, "alpaca"),
        ({"question": "2 + 2?", "answer": "4"}, "question_answer"),
    ],
)
def test_the_format_is_that_which_the_rows_are_written_in(row: dict[str, str], form: str, tmp_path):
    assert inspected(jsonl(tmp_path / "rows.jsonl", [row] * 3), tmp_path / "cache").format == form


def test_rows_without_content_are_counted_as_empty(tmp_path):
    rows = [{"text": "words"}, {"text": ""}, {"text": "more words"}]
    assert inspected(jsonl(tmp_path / "a.jsonl", rows), tmp_path).faulty.empty == 1


def test_data_without_a_usable_row_is_an_error(tmp_path):
    with pytest.raises(DataError, match="all 3 rows are bad"):
        inspected(jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 3), tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="there are no rows"):
        inspected(str(tmp_path / "empty.jsonl"), tmp_path)


def test_a_sample_tells_how_sure_it_is_and_holds_the_truth(tmp_path):
    """The truth lies in nearly all of the 95 % intervals; the counts are scaled to all rows."""
    source = jsonl(tmp_path / "a.jsonl", ROWS["prompt_completion"] * 20)
    whole = inspected(source, tmp_path, max_lengths=(32, 64))
    found = inspected(source, tmp_path, max_lengths=(32, 64), sample=400)
    assert (found.extent.rows_read, found.extent.sampled_of, found.rows) == (400, 1800, 1800)
    for one, true in zip(found.candidates, whole.candidates, strict=True):
        assert one.longer_interval is not None
        assert one.lost_interval is not None
        assert one.longer_interval[0] <= true.rows_longer / whole.rows <= one.longer_interval[1]
        assert (
            one.lost_interval[0]
            <= true.losses[0].loss_tokens_lost / whole.loss_tokens
            <= one.lost_interval[1]
        )
        assert one.steps == pytest.approx(true.steps, rel=0.1)
    mean = found.distributions[0].mean_interval
    assert mean is not None
    assert mean[0] <= whole.distributions[0].mean <= mean[1]
    assert any(note.startswith("Estimated from 400 of 1,800") for note in found.notes)


def test_a_sample_of_all_rows_is_exact(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ROWS["text"])
    found = inspected(source, tmp_path, sample=10_000)
    assert found.extent.sampled_of is None
    assert found.candidates == inspected(source, tmp_path).candidates


@pytest.mark.parametrize(
    ("longest", "typical", "own", "expected"),
    [
        (900, 300, None, (256, 384, 512, 768, 1024)),
        (900, 300, 600, (256, 384, 512, 600, 768, 1024)),
        (700, 300, None, (256, 384, 512, 768)),
        (3, 2, None, (8,)),
        (100_000, 300, None, (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)),
    ],
)
def test_candidates_reach_from_the_typical_to_the_longest_row(longest, typical, own, expected):
    lengths = np.array([typical] * 99 + [longest])
    assert default_candidates(lengths, own) == expected


def test_the_shortest_length_that_loses_next_to_nothing_is_recommended(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", ROWS["text"])
    found = inspected(source, tmp_path)
    enough = [one for one in found.candidates if one.losses[0].loss_tokens_lost <= found.loss_tokens / 1000]
    assert f"max_length: {enough[0].max_length}\n" in found.recommendation.recipe


@real
@pytest.mark.parametrize(
    ("name", "columns"),
    [("t0/train.jsonl", ("prompt", "completion")), ("gsm8k/train.jsonl", ("question", "answer"))],
)
def test_real_rows_are_those_of_a_slow_count(name: str, columns: tuple[str, str], tmp_path):
    lines = (REAL / name).read_text().splitlines()[:400]
    rows = [json.loads(line) for line in lines]
    source = tmp_path / "part.jsonl"
    source.write_text("\n".join(lines))
    mapped = dict(zip(("prompt", "completion"), columns, strict=True))
    found = inspected(str(source), tmp_path, columns=mapped)
    check_against_slow(found, [slow_row(*(row[column] for column in columns))[1] for row in rows])


@real
def test_real_pairs_are_those_of_a_slow_count(tmp_path):
    lines = (REAL / "gsm8k_solutions/preference.jsonl").read_text().splitlines()[:150]
    source = tmp_path / "part.jsonl"
    source.write_text("\n".join(lines))
    found = inspected(str(source), tmp_path, max_lengths=(256, 512))
    slow = [slow_pair(json.loads(line)) for line in lines]
    assert found.loss_tokens == sum(sum(answers) for _, answers in slow)
    for one in found.candidates:
        over = [sum(answers) for prompt, answers in slow if prompt + max(answers) > one.max_length]
        assert (loss(one, "drop").rows_dropped, loss(one, "drop").loss_tokens_lost) == (len(over), sum(over))
