"""The card's header is one the hub takes, and its body holds the recipe, the counts and the losses."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load
from markdown_it import MarkdownIt

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.protocols.events import DataEvent, EvalEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.report.model_card import write_card
from memtrain.trainers.run_folder.report.public_words import is_hub_id, public_place

MakePlan = Callable[..., Plan]


def finished(path: Path, plan: Plan, name: str = "my-model") -> RunFolder:
    folder = RunFolder(path / name)
    folder.final.mkdir(parents=True)
    plan.write(folder.path)
    folder.recipe.write_text("method: sft\nmodel:\n  path: org/base\n")
    with MetricsWriter(folder.metrics) as writer:
        writer.write(
            DataEvent(rows=10, tokens=100, loss_tokens=50, sequences=4, rows_dropped=1, tokens_dropped=9)
        )
        for number, loss in enumerate((3.0, 2.0, 1.0), start=1):
            writer.write(StepEvent(step=number, loss=loss, lr=1e-4, tokens=30, loss_tokens=15, seconds=1.0))
        writer.write(EvalEvent(step=3, loss=1.25, tokens=5))
    return folder


def test_the_header_is_one_the_hub_takes(tmp_path: Path, make_plan: MakePlan):
    keys = {"model.path": "org/base", "data.train": ["owner/rows", "mine.jsonl"]}
    # The plan added the adapter (memory.allow: [lora]); the recipe has none.
    path = write_card(finished(tmp_path, make_plan(keys, adapter=Adapter(r=8))))
    assert metadata_load(path) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["memtrain", "sft", "lora"],
        "base_model": "org/base",
        "base_model_relation": "adapter",
        "datasets": ["owner/rows"],
    }
    data = ModelCard.load(path).data.to_dict()
    assert data["base_model"] == "org/base"


def test_a_local_model_claims_no_base_on_the_hub(tmp_path: Path, make_plan: MakePlan):
    header = metadata_load(write_card(finished(tmp_path, make_plan())))
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["memtrain", "sft"],
    }


@pytest.mark.parametrize(("adapter", "kind"), [(None, "AutoModel"), (Adapter(r=8), "AutoPeftModel")])
def test_a_reward_model_is_loaded_as_one(
    tmp_path: Path, make_plan: MakePlan, adapter: Adapter | None, kind: str
):
    """The card loaded it as a model that writes text, and called it one."""
    plan = make_plan({"method": "reward", "length.packing": "none"}, adapter=adapter)
    path = write_card(finished(tmp_path, plan))
    assert metadata_load(path)["pipeline_tag"] == "text-classification"
    text = path.read_text()
    assert f"import {kind}ForSequenceClassification" in text
    assert f"model = {kind}ForSequenceClassification.from_pretrained" in text
    assert "CausalLM" not in text
    assert "Losses are those of reward modelling; nothing else" in text


def test_the_body_holds_what_was_done(tmp_path: Path, make_plan: MakePlan):
    text = write_card(finished(tmp_path, make_plan())).read_text()
    for said in (
        "# my-model",
        "`builtin:tiny`, trained by supervised fine-tuning with memtrain.",
        "| training loss | 3.0000 -> 1.0000 |",
        "| held-out loss | 1.2500 |",
        "| tokens | 90, 45 loss tokens |",
        "From `builtin:arithmetic`.",
        "| train | 10 | 100 | 50 | 1 row dropped (9 tokens, 0 loss tokens) |",
        "~~~~yaml\nmethod: sft\nmodel:\n  path: builtin:tiny\n",
        "- transformers 5.23.0",
        "Losses are means over loss tokens; nothing else has been evaluated.",
    ):
        assert said in text, said


NAMES = (
    "<script>alert(1)<\u2215script>",
    "<img src=x onerror=alert(1)>",
    "[click](http:evil)",
    "![x](evil.png)",
    "](javascript:alert(1))",
    "a | b | c",
    "`code` ``more``",
    "# heading",
    "- item",
    "1. item",
    "**bold** _it_ ~~gone~~ $x$",
    "<!-- hidden",
    "&lt;b&gt;",
    "www.evil.org",
    "~~~~",
    "```",
    "x\n\n# heading",
    "a\u202eb\x1b[2J",
    '"); import os; ("',
)


def page_of(text: str) -> str:
    """The card as the hub's page shows it, raw HTML included."""
    made = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return made.render(text.split("---\n", 2)[2])


def tags_of(text: str) -> list[str]:
    """Tags of the card's page, without those of a table, a paragraph, code, a list or a heading."""
    page = page_of(text)
    plain = ("p", "h1", "h2", "pre", "code", "ul", "li", "table", "thead", "tbody", "tr", "th", "td")
    return [tag for tag in re.findall(r"</?([a-zA-Z!][\w-]*)", page) if tag not in plain]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_of_the_card_and_nothing_else(tmp_path: Path, make_plan: MakePlan, name: str):
    keys = {"model.path": name, "data.train": [name], "data.system_prompt": f"{name}\n~~~~~~~\n</pre><b>x"}
    folder = finished(tmp_path, make_plan(keys, adapter=Adapter(r=8)), name.replace("/", "\u2215"))
    (folder.path / "lm_eval.json").write_text(
        json.dumps({"results": {name: {f"{name},none": 0.5}}, "command": []})
    )
    text = write_card(folder).read_text()
    assert tags_of(text) == []
    assert "\x1b" not in text
    assert "\u202e" not in text
    header = metadata_load(folder.final / "README.md")
    assert "base_model" not in header
    page = page_of(text)
    headings = re.findall(r"<h\d>(.*?)</h\d>", page)
    assert headings[1:] == ["Training", "Data", "Recipe", "Versions"]
    assert page.count("<table>") == 3
    python = re.search(r"```python\n(.*?)\n```\n", text, re.S)
    assert python is not None
    calls = [one for one in ast.walk(ast.parse(python[1])) if isinstance(one, ast.Call)]
    assert [one.args[0].value for one in calls if isinstance(one.args[0], ast.Constant)] == [
        folder.path.name
    ] * 2


def test_the_card_holds_no_place_of_this_machine(tmp_path: Path, make_plan: MakePlan):
    keys = {
        "model.path": "/srv/ann/models/base",
        "model.tokenizer": "~/tokenizers/mine",
        "data.train": ["/srv/ann/clients/acme/rows.jsonl", "owner/rows", "../else/more.jsonl"],
        "data.cache_dir": "/scratch/ann/cache",
        "data.system_prompt": "Read /srv/ann/rules.txt, then </think> 1/2.",
        "run_dir": "/scratch/ann/runs/x",
        "log.every_steps": 3,
    }
    text = write_card(finished(tmp_path, make_plan(keys))).read_text()
    assert "ann" not in text.replace("planned", "")
    assert "`rows.jsonl`, `owner/rows`, `more.jsonl`" in text
    for said in ("path: base", "tokenizer: mine", "source: owner/rows", "rules.txt, then </think> 1/2."):
        assert said in text, said
    for left_out in ("run_dir", "cache_dir", "every_steps", "cluster"):
        assert left_out not in text


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/a/b/rewards.py:score", "rewards.py:score"),
        ("C:\\Users\\ann\\rows.jsonl", "rows.jsonl"),
        ("builtin:tiny", "builtin:tiny"),
        ("owner/name", "owner/name"),
        ("data/*.jsonl", "*.jsonl"),
        ("rows.jsonl", "rows.jsonl"),
        ("s3://bucket/ann/rows.jsonl", "rows.jsonl"),
    ],
)
def test_a_place_is_its_last_name(place: str, shown: str):
    assert public_place(place) == shown


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("builtin:tiny", False),
        ("gpt2", False),
        ("data/rows.jsonl", False),
        ("data/rows.json.gz", False),
        ("./models/mine", False),
        ("/models/mine", False),
        ("a/b/c", False),
        ("data/*.parquet", False),
    ],
)
def test_only_owner_and_name_is_a_hub_id(name: str, is_id: bool):
    assert is_hub_id(name) is is_id


def test_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "org" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/base")
