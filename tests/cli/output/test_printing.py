from memtrain.cli.output.terminal import table_lines, whole, wrapped


def test_the_last_column_is_wrapped_and_the_others_are_aligned():
    rows = [("a", "one two three four five six"), ("long name", "x")]
    assert table_lines(("key", "what it says"), rows, 31) == [
        "key        what it says",
        "a          one two three four",
        "           five six",
        "long name  x",
    ]


def test_columns_of_numbers_are_flush_right():
    assert table_lines(("name", "GiB", "MiB"), [("a", "1.5", "10"), ("b", "12.0", "1,024")], 80) == [
        "name   GiB    MiB",
        "a      1.5     10",
        "b     12.0  1,024",
    ]


def test_a_table_without_rows_is_its_head():
    assert table_lines(("a", "b"), [], 80) == ["a  b"]


PLACE = "runs/a folder with spaces/and-hyphens-in-a-long-name/recipe.yaml:12:3"


def test_a_place_is_never_broken_where_a_line_ends():
    lines = wrapped(f"Nothing was started. The plan is in {whole(PLACE)}; look at it.", 30)
    assert lines == ["Nothing was started. The plan", "is in", f"{PLACE};", "look at it."]


def test_a_place_in_a_table_is_never_broken():
    lines = table_lines(("key", "why"), [("loss", f"asked for ({whole(PLACE)})")], 30)
    assert lines == ["key   why", "loss  asked for", f"      ({PLACE})"]
