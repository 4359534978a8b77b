"""The scripts of `make bench`: what of them needs no TRL. Those of `make bench-gpu`: test_first_light.py."""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loaded: list[str] = []

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        loaded.append(spec.name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in loaded:
        del sys.modules[name]


def test_a_page_of_no_results_says_not_measured(script: Any):
    page = script("page")
    text = page.page({})
    assert text.count("Not measured.") == len(page.SECTIONS)


def test_the_page_shows_every_committed_result(script: Any):
    page = script("page")
    results = page.read_results(BENCHMARKS / "results")
    text = page.page(results)
    known = {section.file for section in page.SECTIONS}
    assert text.count("Not measured.") == len(known - results.keys())
    assert text.count("Measured on ") == len(known & results.keys())


def test_every_table_says_the_runs_that_it_is_of_and_their_command(script: Any):
    """13 of 21 rows had the device, commit and command of the other eight's run; one table no command."""
    page = script("page")
    results = page.read_results(BENCHMARKS / "results")
    said = [line for line in page.page(results).splitlines() if line.startswith("Measured on ")]
    assert not [line for line in said if "``" in line or "`python " in line and "benchmarks/" not in line]
    rows = [
        {"case": "sft", "model": size, "environment": {"device": size, "commit": size * 7}} for size in "ab"
    ]
    section = page.Section("title", "file", "says", list, "python benchmarks/x.py")
    text = page.where({"environment": rows[0]["environment"], "rows": rows}, section)
    assert "a, , commit aaaaaaa (a sft); b, , commit bbbbbbb (b sft): `python benchmarks/x.py`" in text


def test_a_page_of_no_results_is_not_written(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["page.py", str(tmp_path), str(tmp_path / "page.md")])
    with pytest.raises(SystemExit):
        script("page").main()
    assert "has no results" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_a_ratio_is_theirs_over_ours(script: Any):
    turns = script("turns")
    found = turns.ratios([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert found == {"median": 1.0, "lowest": 0.5, "highest": 2.0}


def test_what_is_answered_is_not_asked_again(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    suite = script("suite")
    prints = suite.Question("prints", ("-c", "print('{\"a\": 1}')", "bench", "my.yaml"), is_stdout=True)
    assert suite.answered(prints, tmp_path, None, again=False)
    reported = json.loads((tmp_path / "prints.json").read_text())
    assert (reported["a"], reported["where"]["command"]) == (1, "memtrain bench my.yaml")
    assert suite.answered(prints, tmp_path, None, again=False)
    assert "there already" in capsys.readouterr().out
    fails = suite.Question("fails", ("-c", "raise SystemExit(3)"), is_stdout=True)
    assert not suite.answered(fails, tmp_path, None, again=False)
    assert "fails: failed: exit code 3" in capsys.readouterr().out
    assert not (tmp_path / "fails.json").exists()
    needs = suite.Question("needs", ("x.py", "--trl", "TRL"))
    assert suite.answered(needs, tmp_path, None, again=False), "left out is no failure"


def test_the_matrix_has_every_single_pair_and_triple(script: Any):
    exactness = script("exactness")
    count, exact = len(exactness.NAMES), len(exactness.EXACT)
    combinations = count + count * (count - 1) // 2 + exact * (exact - 1) * (exact - 2) // 6
    every = list(exactness.cells())
    assert len(every) == combinations * len(exactness.METHODS_SHOWN) * len(exactness.BACKENDS)
    few = exactness.spread(40)
    assert {cell.method for cell in few} == set(exactness.METHODS_SHOWN)
    assert {cell.backend for cell in few} == set(exactness.BACKENDS)


def test_cells_that_were_made_again_have_their_own_commit(script: Any):
    exactness = script("exactness")
    once = exactness.commits_of("b", "packing", "a")
    assert once == "b; cells without packing: a"
    assert exactness.commits_of("c", "packing", once) == "c; cells without packing: a"
    assert exactness.commits_of("c", "padding_free", once) == f"c; cells without padding_free: {once}"


def test_rows_of_methods_are_kept_in_order_and_shown_with_the_losing_ones(script: Any, tmp_path: Path):
    """1 s and 100 MiB against 0.5 s and 50 MiB: ratios of 0.5, and they stay."""
    methods, page = script("methods_vs_trl"), script("page")
    out = tmp_path / "methods_vs_trl.json"
    side = {"step_s": 1.0, "whole_s": 2.0, "peak_mib": 100.0, "tokens_per_s": 10.0}
    theirs = {"step_s": 0.5, "whole_s": 1.0, "peak_mib": 50.0, "tokens_per_s": 20.0}
    ratio = {"step_s": [0.5, 0.4, 0.6], "whole_s": [0.5], "peak_mib": [0.5]}
    row = {"memtrain": side, "trl": theirs, "ratio": ratio, "environment": {"commit": "abc"}}
    for model, case in (("25M", "sft"), ("0.9M", "grpo"), ("0.9M", "dpo"), ("0.9M", "dpo")):
        methods.keep(out, {"case": case, "model": model, "largest_loss_difference": 1e-6} | row)
    kept = json.loads(out.read_text())
    assert [(one["model"], one["case"]) for one in kept["rows"]] == [
        ("0.9M", "dpo"),
        ("0.9M", "grpo"),
        ("25M", "sft"),
    ]
    shown = page.methods_vs_trl(kept)
    assert "| 0.9M | dpo (made up) | 1.00 s | 0.50 s | 0.50 (0.40-0.60) | not measured | 0.50 " in shown[2]
    methods.keep(out, {"case": "dpo", "model": "0.9M", "rows": "GSM8K", "ratio_compacting": ratio} | row)
    shown = page.methods_vs_trl(json.loads(out.read_text()))
    assert "| 0.9M | dpo (GSM8K) | 1.00 s | 0.50 s | 0.50 (0.40-0.60) | 0.50 (0.40-0.60) |" in shown[2]


def test_a_footer_has_the_date_of_its_own_commit(script: Any, monkeypatch: pytest.MonkeyPatch):
    """A later change of the file, here unknown, makes no figure younger."""
    page = script("page")
    monkeypatch.setattr(page, "_git", lambda *words: "2026-01-02\n" if words[-1] == "abc1234" else "")
    reported = {"environment": {"commit": "abc1234", "device": "CPU", "command": "python x.py"}}
    assert (
        page.where(reported, page.SECTIONS[0])
        == "Measured on CPU, 2026-01-02, commit abc1234: `python benchmarks/x.py`."
    )


def test_made_up_completions_depend_on_the_prompt_and_their_number_only(script: Any):
    sides = script("method_sides")
    one = sides.fixed_completion((5, 6, 7), 0, 32)
    assert one == sides.fixed_completion([5, 6, 7], 0, 32)
    assert one != sides.fixed_completion([5, 6, 7], 1, 32)
    assert 16 <= len(one) <= 32


def test_our_side_of_the_comparison_learns_from_completions_that_are_made_up(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from memtrain.trainers.build import step
    from memtrain.trainers.online.rollout import online_loop as online

    sides, methods = script("method_sides"), script("methods_vs_trl")
    monkeypatch.setattr(step, "update", step.update)
    monkeypatch.setattr(online.OnlineSteps, "written", online.OnlineSteps.written)
    job = methods.job_of("grpo, same completions", "0.9M", tmp_path, 0, None)
    reported = sides.run_memtrain(job | {"model": "builtin:tiny", "steps": 1, "folder": str(tmp_path)})
    assert len(reported["losses"]) == len(reported["cpu_s"]) == 1
    most = job["batch_size"] * job["max_tokens"]
    assert most / 2 <= reported["completion_tokens"] <= most


def test_every_pin_of_the_tests_has_a_hash():
    """`make setup HASHES=1` takes constraints.hashes.txt, which is written of constraints.txt."""
    import hashes

    text = hashes.FILE.read_text()
    entries = re.findall(r"^(\S+==\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert [pin for pin, _ in entries] == hashes.pins()
    assert len(text.splitlines()) == 2 + sum(1 + found.count("--hash") for _, found in entries)
