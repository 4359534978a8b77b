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
    if method == "distill":
        said["distill"] = {"teacher": "builtin:tiny"}
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


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OTHER = {"type": "function", "function": {"name": "sub", "arguments": {"a": 1}}}
SAME = {"reasoning_content": "Let me think."}


def template(answer: str) -> str:
    """A template that writes `answer` after the content of each message `m`."""
    return (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + answer + "</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{# tools tool_calls #}"
    )


LAST = template("{% if loop.last %}{{ m.reasoning_content }}{% endif %}")
FIRST = template("{% if loop.index0 < 2 %}{{ m.reasoning_content }}{% endif %}")
UPPER = template("{{ (m.reasoning_content or '') | upper }}")
ONE_CALL = template("{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}")
IF_SET = template("{% if m.flag %}!{% endif %}")
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    "{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORT_IDS = template(
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}{{ c | tojson }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "turns", "named"),
    [
        (LAST, [HI, YO | SAME, HI, YO | SAME], "message field 'reasoning_content' of earlier messages"),
        (LAST, [HI, YO | SAME, HI, YO], "message field 'reasoning_content'"),
        (LAST, [HI, YO, HI, YO | SAME], ""),
        (FIRST, [HI, YO | SAME, HI, YO | SAME], "message field 'reasoning_content' of some messages"),
        (UPPER, [HI, YO | SAME, HI, YO | SAME], ""),
        (template(""), [HI | {"name": "Ann"}, YO, HI | {"name": "Bob"}, YO], "message field 'name'"),
        (ONE_CALL, [HI, YO | {"tool_calls": [CALL]}], ""),
        (ONE_CALL, [HI, YO | {"tool_calls": [CALL, OTHER]}], "message field 'tool_calls' of some messages"),
        (SHORT_IDS, [HI, YO | {"tool_calls": [CALL | {"id": "abcdefghi"}, OTHER | {"id": "012345678"}]}], ""),
        (IF_SET, [HI, YO | {"flag": True}, HI | {"flag": True}, YO], ""),
        (IF_SET, [HI, YO | {"other": 3}, HI, YO | {"other": 4}], "message field 'other'"),
    ],
)
def test_a_field_is_looked_for_message_by_message(tmp_path, written, turns, named):
    """The same reasoning in two turns, of which the template keeps one, was taken for rendered."""
    said = {"template": written, "assistant_only_loss": False}
    wanted = reported(f"{named} (all rows)") if named else ()
    assert notes_of(tmp_path, [{"messages": turns}] * 2, **said) == wanted


@pytest.mark.parametrize("method", ["dpo", "kto", "grpo", "sft"])
def test_fields_of_prompts_are_looked_for_too(tmp_path, method):
    prompt = [HI, YO | SAME, HI]
    rows = {
        "dpo": {"prompt": prompt, "chosen": [YO], "rejected": [YO | {"content": "no"}]},
        "kto": {"prompt": prompt, "completion": [YO], "label": True},
        "grpo": {"prompt": prompt},
        "sft": {"prompt": prompt, "completion": [YO | SAME]},
    }
    earlier = " of earlier messages" if method == "sft" else ""
    named = reported(f"message field 'reasoning_content'{earlier} (all rows)")
    if method == "sft":
        # Of two parts nobody is earlier.
        named = reported("message field 'reasoning_content' of some messages (all rows)")
    assert notes_of(tmp_path, [rows[method]], method, template=LAST) == named


def test_a_tool_of_several_is_looked_for(tmp_path):
    only = template("").replace("{% for m", "{{ tools[0] | tojson if tools else '' }}{% for m", 1)
    tools = [{"name": "add"}, {"name": "sub"}]
    row = {"messages": [HI, YO], "tools": tools}
    assert notes_of(tmp_path, [row], template=only) == reported("some of the tools (all rows)")
    assert notes_of(tmp_path, [row | {"tools": tools[:1]}], template=only) == ()


def test_a_content_that_stands_elsewhere_too_is_still_missed(tmp_path):
    drops = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    rows = [{"messages": [HI | {"role": "system"}, HI, YO]}]
    named = reported("the content of system messages (all rows)")
    assert notes_of(tmp_path, rows, template=drops, assistant_only_loss=False) == named


@pytest.mark.parametrize(
    ("method", "row", "other"),
    [
        ("sft", {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}),
        ("sft", {"prompt": "a", "completion": " \n"}, {"prompt": "a", "completion": "b"}),
        ("sft", {"question": "a", "answer": ""}, {"question": "a", "answer": "b"}),
        ("sft", {"instruction": "a", "output": ""}, {"instruction": "a", "output": "b"}),
        ("sft", {"messages": [HI, YO | {"content": ""}]}, {"messages": [HI, YO]}),
        ("sft", {"messages": [HI, YO, HI, YO | {"content": " "}]}, {"messages": [HI, YO]}),
        (
            "dpo",
            {"prompt": "a", "chosen": "", "rejected": "b"},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            "reward",
            {"prompt": "a", "chosen": "b", "rejected": ""},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            "kto",
            {"prompt": "a", "completion": "", "label": True},
            {"prompt": "a", "completion": "b", "label": True},
        ),
        (
            "kto",
            {"prompt": "a", "chosen": "", "rejected": "b"},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ),
        (
            "distill",
            {"prompt": [HI], "completion": [YO | {"content": ""}]},
            {"prompt": [HI], "completion": [YO | {"content": "", "tool_calls": [CALL]}]},
        ),
    ],
)
def test_rows_with_an_empty_answer_are_counted_with_the_first_place(tmp_path, method, row, other):
    named = [
        one for one in notes_of(tmp_path, [other, row, other, row], method, template=TOOLS) if "empty" in one
    ]
    place = tmp_path / "rows.jsonl"
    assert named == [
        f"with empty answers: 2 of 4 rows, 50.0% (the first: {place}:2); only the end of such an answer is "
        "trained on, which teaches to say nothing: remove these rows, unless that is meant"
    ]
    assert not any("empty" in one for one in notes_of(tmp_path, [other], method, template=TOOLS))


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
