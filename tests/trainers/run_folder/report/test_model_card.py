"""The card's header is one the hub takes, and its body holds the recipe, the counts and the losses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.protocols.events import DataEvent, EvalEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.report.model_card import is_hub_id, write_card

MakePlan = Callable[..., Plan]


def finished(path: Path, plan: Plan) -> RunFolder:
    folder = RunFolder(path / "my-model")
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
        "builtin:tiny, trained by supervised fine-tuning with memtrain.",
        "| training loss | 3.0000 -> 1.0000 |",
        "| held-out loss | 1.2500 |",
        "| tokens | 90, 45 loss tokens |",
        "From `builtin:arithmetic`.",
        "| train | 10 | 100 | 50 | 1 row dropped (9 tokens, 0 loss tokens) |",
        "~~~~yaml\nmethod: sft\nmodel:\n  path: org/base\n~~~~",
        "- transformers 5.23.0",
        "Losses are means over loss tokens; nothing else has been evaluated.",
    ):
        assert said in text, said


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
