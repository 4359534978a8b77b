"""What a run says of its rows equals a slow count of them, token by token."""

import json
from pathlib import Path

import pytest

from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

LIMIT = 24


def slow_rows(path: Path, num_rows: int) -> list[list[bool]]:
    """Rows of growing length written to `path`: for every token of each, whether it is trained on."""
    from memtrain.recipes.sections.model import Model

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    rows, reported = [], []
    for n in range(1, num_rows + 1):
        prompt, completion = f"Count to {n}:", " " + " ".join(str(i) for i in range(1, n + 1))
        reported.append({"prompt": prompt, "completion": completion})
        before = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        answer = len(tokenizer(completion, add_special_tokens=False)["input_ids"]) + 1
        rows.append([False] * before + [True] * answer)
    path.write_text("".join(json.dumps(row) + "\n" for row in reported))
    return rows


def cut(row: list[bool], truncation: str) -> list[bool]:
    if truncation == "keep_end":
        return row[-LIMIT:]
    if truncation == "drop" and len(row) > LIMIT:
        return []
    return row[:LIMIT]


@pytest.mark.parametrize("packing", ["none", "bfd"])
@pytest.mark.parametrize("truncation", ["keep_start", "keep_end", "drop"])
def test_what_is_cut_and_dropped_is_counted(runs, metrics, tmp_path: Path, truncation: str, packing: str):
    rows = slow_rows(tmp_path / "rows.jsonl", 20)
    folder = runs.done(
        "run",
        f"data.train={tmp_path / 'rows.jsonl'}",
        "data.eval_fraction=0",
        f"length.max_length={LIMIT}",
        f"length.truncation={truncation}",
        f"length.packing={packing}",
        "train.epochs=1",
        "train.max_steps=null",
    )
    kept = [cut(row, truncation) for row in rows]
    # A first token is predicted by nothing; a row whose loss tokens are all cut teaches nothing.
    is_dropped = [sum(row[1:]) == 0 for row in kept]
    lost = [len(row) - len(part) for row, part in zip(rows, kept, strict=True)]
    loss_tokens_lost = [sum(row[1:]) - sum(part[1:]) for row, part in zip(rows, kept, strict=True)]
    reported = metrics(folder, "data")[0]
    assert reported["rows"] == 20
    assert reported["tokens"] == sum(map(len, rows))
    assert reported["loss_tokens"] == sum(map(sum, rows))
    assert reported["rows_dropped"] == sum(is_dropped)
    assert reported["tokens_dropped"] == sum(
        len(row) for row, out in zip(rows, is_dropped, strict=True) if out
    )
    assert reported["rows_cut"] == sum(one > 0 and not out for one, out in zip(lost, is_dropped, strict=True))
    assert reported["tokens_cut"] == sum(one for one, out in zip(lost, is_dropped, strict=True) if not out)
    assert reported["loss_tokens_cut"] == sum(
        one for one, out in zip(loss_tokens_lost, is_dropped, strict=True) if not out
    )
    steps = metrics(folder, "step")
    assert sum(step["loss_tokens"] for step in steps) == sum(sum(row[1:]) for row in kept)
    used = sum(len(row) for row, out in zip(kept, is_dropped, strict=True) if not out)
    assert sum(step["tokens"] for step in steps) == used


def test_splitting_loses_no_loss_token(runs, metrics, tmp_path: Path):
    rows = slow_rows(tmp_path / "rows.jsonl", 20)
    folder = runs.done(
        "run",
        f"data.train={tmp_path / 'rows.jsonl'}",
        "data.eval_fraction=0",
        f"length.max_length={LIMIT}",
        "length.packing=bfd_split",
        "train.epochs=1",
        "train.max_steps=null",
    )
    reported = metrics(folder, "data")[0]
    assert (
        reported["loss_tokens_cut"],
        reported["loss_tokens_dropped"],
        reported["rows_cut"],
        reported["rows_dropped"],
    ) == (
        0,
        0,
        0,
        0,
    )
    assert sum(step["loss_tokens"] for step in metrics(folder, "step")) == sum(sum(row) for row in rows)
    # A piece repeats the last token of the one before it, if that one is there.
    seen = sum(step["tokens"] for step in metrics(folder, "step"))
    num_whole = reported["rows"] - reported["rows_split"]
    assert (
        seen - (reported["fragments"] - reported["rows_split"])
        <= reported["tokens"] - reported["tokens_idle"]
        <= seen
    )
    assert reported["fragments"] + num_whole >= reported["sequences"]
