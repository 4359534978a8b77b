"""Columns beside prompts are tokenized a few characters at a time, and none that no answer could be."""

import json

import pytest

from memtrain.trainers.data.length_report import split
from memtrain.trainers.data.length_report.split import Side
from memtrain.trainers.data.tokenize import encode
from memtrain.trainers.data.tokenize.render import Rendering
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.data.tokenize.workers import Job


def test_answers_beside_prompts_are_counted_in_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    rendering = Rendering(None, {}, None, completion_only=True, assistant_only=False)
    job = Job(load_tokenizer("builtin:tiny").backend_tokenizer.to_str(), rendering, "prompt", ())
    lines = [json.dumps({"answer": "a b c " * n, "number": 1}) for n in range(12)]
    whole = Side(job)
    whole.columns(lines)
    monkeypatch.setattr(encode, "CHARS_AT_ONCE", 20)
    given: list[int] = []
    few = Side(job)

    class Watched:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool):
            given.append(sum(map(len, texts)))
            return Side(job).tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    few._tokenizer = Watched()
    few.columns(lines)
    assert few.answers["answer"].tolist() == whole.answers["answer"].tolist()
    assert len(given) > 8
    monkeypatch.setattr(split, "MOST_ROW_CHARS", 30)
    short = Side(job)
    short.columns(lines)
    assert short.answers["answer"].sum() == 6
