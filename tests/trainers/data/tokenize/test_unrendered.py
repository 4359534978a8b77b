"""What a row holds and its text does not is found by rendering without it, and reported with its share."""

import json
from pathlib import Path

import pytest

from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.tokenize.unrendered import unrendered_words

HI, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {{ m.get('reasoning_content', '') }}\n{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"


def notes_of(
    folder: Path, rows: list[dict], method: str = "sft", template: str | None = None, **data: object
) -> tuple[str, ...]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = {
        "method": method,
        "model": {"path": "builtin:tiny"},
        "data": {"train": str(path), "cache_dir": str(folder / "cache"), **data},
    }
    if method == "grpo":
        (folder / "r.py").write_text(
            "def r(prompts, completions, **named):\n    return [0.0 for _ in prompts]\n"
        )
        said["rewards"] = {"functions": [f"{folder}/r.py:r"]}
    if template is not None:
        (folder / "t.jinja").write_text(template)
        said["model"]["chat_template"] = str(folder / "t.jinja")
    return prepare(Recipe.model_validate(said)).notes


def reported(*fields: str) -> tuple[str, ...]:
    return (f"not in the rendered text of the rows: {', '.join(fields)}",)


def test_columns_without_effect_are_named_with_their_share(tmp_path):
    rows = [
        {"prompt": "a", "completion": "b", "id": i, "system": "Be brief." if i else None} for i in range(4)
    ]
    assert notes_of(tmp_path, rows) == reported(
        "column 'id' (all rows)", "column 'system' (3 of 4 rows, 75.0%)"
    )


def test_a_row_that_is_all_rendered_has_nothing_reported(tmp_path):
    assert notes_of(tmp_path, [{"messages": [HI, YO]}]) == ()


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"reasoning_content": "because"}, "reasoning_content"),
        ({"name": "Ann"}, "name"),
        ({"from": "gpt"}, "from"),
    ],
)
def test_fields_of_messages_that_the_template_leaves_out_are_named(tmp_path, extra, field):
    rows = [{"messages": [HI, YO | extra]}, {"messages": [HI, YO]}]
    assert notes_of(tmp_path, rows) == reported(f"message field '{field}' (1 of 2 rows, 50.0%)")


def test_a_field_that_the_template_writes_is_not_named_and_its_neighbour_is(tmp_path):
    rows = [{"messages": [HI, YO | {"reasoning_content": "because", "name": "Ann"}]}]
    assert notes_of(tmp_path, rows, template=THINKS) == reported("message field 'name' (all rows)")


def test_contents_that_the_template_drops_or_changes_are_named(tmp_path):
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, HI, YO]}]
    assert notes_of(tmp_path, rows, template=NO_SYSTEM, assistant_only_loss=False) == reported(
        "the content of assistant messages as it stands (the template changes it) (all rows)",
        "the content of system messages (all rows)",
        "the content of user messages as it stands (the template changes it) (all rows)",
    )


def test_fields_beside_the_text_of_a_part_are_named(tmp_path):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    rows = [{"messages": [HI | {"content": [part]}, YO]}]
    assert notes_of(tmp_path, rows) == reported("content part field 'cache_control' (all rows)")


def test_tools_beside_strings_are_named(tmp_path):
    rows = [{"prompt": "a", "completion": "b", "tools": [{"name": "add"}]}]
    assert notes_of(tmp_path, rows) == reported("tools (all rows)")


@pytest.mark.parametrize(
    ("method", "words"), [("dpo", "the margin, which dpo does not use"), ("kto", "column 'margin'")]
)
def test_a_margin_that_the_method_does_not_use_is_named(tmp_path, method, words):
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c", "margin": 1.0}] * 2
    assert notes_of(tmp_path, rows, method) == reported(f"{words} (all rows)")
    assert notes_of(tmp_path, rows, "reward") == ()


def test_a_system_column_beside_a_prompt_is_named_where_rewards_alone_see_it(tmp_path):
    rows = [{"prompt": "a", "system": "Be brief.", "answer": "b"}]
    assert notes_of(tmp_path, rows, "grpo") == reported("column 'system' (given to rewards only) (all rows)")


def test_fields_are_reported_again_when_the_rows_come_from_the_cache(tmp_path):
    rows = [{"text": "a b", "id": 1}]
    assert notes_of(tmp_path, rows) == notes_of(tmp_path, rows) == reported("column 'id' (all rows)")


def test_a_hundred_fields_are_one_sentence():
    counts = {f"column 'c{i:03}'": 100 - i for i in range(100)}
    (sentence,) = unrendered_words(counts, 100)
    assert sentence.startswith(
        "not in the rendered text of the rows: column 'c000' (all rows), column 'c001' (99 of 100"
    )
    assert sentence.endswith("column 'c019' (81 of 100 rows, 81.0%), 80 more")
