"""The ladder of `make bench-gpu`: its order, its supervisor, its grid and page; whole, on a stand-in."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from first_light import results, supervise
from first_light.bench import Bench, Planned
from first_light.grid import GRID, METHODS, SIZES, STRATEGIES, sampled
from first_light.ladder import GPU_TESTS, Stage, stages
from first_light.page import page
from first_light.stages.engines import in_one_form
from first_light.stages.probes import TESTS, run_for
from first_light.stages.profiling import covered
from first_light.stages.steps import operations_of
from first_light.summary import summary
from first_light.supervise import Run, Worker
from first_light.traces import Tracers
from first_light.wheels import are_for_this_python, site_of

from memtrain.trainers.data.store.token_store import TokenStore

ROOT = Path(__file__).parents[2]
WORKER = """
    import json, os, sys, time
    for line in sys.stdin:
        asked = json.loads(line)
        given = asked["given"]
        if given.get("dies"):
            print("no kernel image", file=sys.stderr)
            sys.stderr.flush()
            os._exit(9)
        time.sleep(given.get("sleeps", 0))
        answer = {"words": "done", "pid": os.getpid(), "left_bytes": given.get("leaves", 0)}
        answer["sums"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        print(json.dumps(answer), flush=True)
"""

Ladder = Callable[..., tuple[list[Stage], list[str]]]


@pytest.fixture
def down(tmp_path: Path) -> Ladder:
    """Works stages down with a worker that computes nothing: (those that are left, lines on the screen)."""
    program = tmp_path / "worker.py"
    program.write_text(textwrap.dedent(WORKER))

    def make(*wanted: Stage, limit_s: float = 60) -> tuple[list[Stage], list[str]]:
        worker = Worker([sys.executable, str(program)], os.environ, tmp_path / "log.txt")
        said: list[str] = []
        run = Run(tmp_path, worker, limit_s, say=said.append)
        left = run.down(wanted, {"device": "none"})
        assert worker.process is None, "Nothing is left running."
        return left, said

    return make


def stage(name: str, limit_s: float = 30, **given: object) -> Stage:
    return Stage(name, "none:none", limit_s, given)


def test_stages_have_names_of_their_own_and_what_tells_most_comes_first():
    wanted = stages()
    assert len({one.name for one in wanted}) == len(wanted)
    groups = list(dict.fromkeys(one.group for one in wanted))
    order = [
        "machine",
        "back ends",
        "doctor",
        "tests marked gpu",
        "bit for bit",
        "speed",
        "profile",
        "owners",
    ]
    order += ["decoding", "24 GiB", "TRL", "shared prompts", "kernels", "grid", "longest row"]
    assert groups == order


def test_every_method_size_and_strategy_is_met_early_and_no_point_twice():
    """Seventeen strategies need seventeen points at least; a few more are left for what cannot be met."""
    early = GRID[: len(STRATEGIES) + 8]
    assert {one.method for one in GRID[:10]} == set(METHODS)
    assert {one.size for one in GRID[:6]} == set(SIZES)
    assert {one.strategy for one in early} == set(STRATEGIES)
    assert len(set(GRID)) == len(GRID)
    assert sampled() == GRID, "The same on every machine."
    counts = Counter(one.method for one in GRID)
    assert max(counts.values()) - min(counts.values()) <= 3


def test_a_stage_that_dies_or_hangs_is_a_result_and_the_next_one_runs(down: Ladder, tmp_path: Path):
    left, said = down(
        stage("a"), stage("b", dies=True), stage("c"), stage("d", limit_s=0.5, sleeps=60), stage("e")
    )
    assert left == []
    found = results.by_stage(results.read(tmp_path))
    assert found["b"]["fault"] == "the process ended with code 9: no kernel image"
    assert found["d"]["fault"] == "not done after 0 s"
    assert {found[name]["words"] for name in "ace"} == {"done"}
    assert found["a"]["pid"] != found["c"]["pid"], "A new process after one that died."
    assert len(said) == 5


def test_a_stage_that_leaves_memory_behind_gives_the_next_one_a_new_process(down: Ladder, tmp_path: Path):
    down(stage("a"), stage("b", leaves=2**30), stage("c"))
    found = results.by_stage(results.read(tmp_path))
    assert found["a"]["pid"] == found["b"]["pid"] != found["c"]["pid"]


def test_products_sum_in_one_order_only_where_bits_are_compared(
    down: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is timed runs as a user's run does."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    down(stage("speed/a"), stage("bit for bit/b"), stage("bit for bit/c"), stage("speed/d"))
    found = results.by_stage(results.read(tmp_path))
    assert [found[name]["sums"] for name in ("speed/a", "bit for bit/b", "speed/d")] == [
        None,
        ":4096:8",
        None,
    ]
    assert found["bit for bit/b"]["pid"] == found["bit for bit/c"]["pid"]


def test_the_same_call_goes_on_and_a_line_that_was_cut_off_is_made_again(down: Ladder, tmp_path: Path):
    wanted = [stage("a"), stage("b"), stage("c")]
    left, _ = down(*wanted, limit_s=0)
    assert left == wanted, "No time: none is begun."
    down(wanted[0])
    with (tmp_path / results.FILE).open("a") as file:
        file.write('{"stage": "b", "wor')
    left, said = down(*wanted)
    assert left == []
    assert [line.partition(":")[0] for line in said] == ["b", "c"]
    lines = (tmp_path / results.FILE).read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["a", "b", "c"]


def test_a_fault_is_made_again_once_by_the_next_call_after_all_that_is_new(down: Ladder, tmp_path: Path):
    down(stage("a", dies=True), stage("b"))
    left, said = down(stage("a"), stage("b"), stage("c"))
    assert not left
    assert said == ["c: done (0 s)", "a: done (0 s)"]
    down(stage("d", dies=True))
    for _ in range(2):
        down(stage("d", dies=True))
    assert [one["stage"] for one in results.read(tmp_path)].count("d") == 2


def test_the_time_of_a_call_cuts_a_stage_off_and_it_has_no_result(
    down: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervise, "MARGIN_S", 0)
    monkeypatch.setattr(supervise, "WORTH_S", 0)
    left, said = down(stage("a", sleeps=60), limit_s=0.5)
    assert [one.name for one in left] == ["a"]
    assert "the time of this call is over" in said[0]
    assert results.read(tmp_path) == []


def test_the_summary_has_the_planners_error_and_its_false_fits():
    """110 and 80 planned for 100 measured; a trace of 99; one that was said to fit and did not."""
    found = {
        "grid/a": {"peak_bytes": 100, "planned_error": 0.1, "traced": {"traced_bytes": 99}},
        "shared prompts/k = 2": {"once": {"peak_bytes": 100, "planned_error": -0.2}},
        "24 GiB/b": {"fault": "out of memory", "is_false_fit": True},
        "bit for bit/c": {"is_equal": False, "words": "losses differ by 1.0e-03"},
    }
    wanted = [stage(name) for name in found]
    reported = summary(found, wanted, {"device": "none"})
    assert reported["plan"]["count"] == 2
    assert reported["plan"]["median_error"] == pytest.approx(0.15)
    assert reported["plan"]["worst_error"] == pytest.approx(-0.2)
    assert reported["trace"]["worst_error"] == pytest.approx(-0.01)
    assert reported["plan"]["false_fits"] == ["24 GiB/b"]
    assert set(reported["misses"]) == {"grid/a", "shared prompts/k = 2: once"}
    assert reported["not_bit_for_bit"] == ["bit for bit/c"]
    assert reported["faults"] == {"24 GiB/b": "out of memory"}


def test_the_page_shows_faults_plots_and_what_others_published():
    found = {
        "speed/0.6B full 8k": {
            "words": "30,000 tokens/s <fast>",
            "tokens_per_s": 3e4,
            "peak_bytes": 100,
            "planned_error": 0.01,
        },
        "grid/a": {"fault": "KeyError: 1"},
    }
    text = page(found, summary(found, [stage(name) for name in found], {"device": "none"}))
    assert "30,000 tokens/s &lt;fast&gt;" in text
    assert "fault: KeyError: 1" in text
    assert "prime-rl, 1x H100" in text
    assert "26,000 tokens/s" in text
    assert text.count("<svg") == 2
    assert "http" not in text


def test_planned_seconds_of_a_step_stand_beside_measured_ones():
    """0.3 of 0.4 seconds planned; beside other processes no time is compared."""
    timed = {"peak_bytes": 100, "planned_error": 0.01, "planned_step_s": 0.3, "step_s": 0.4}
    found = {"speed/a": timed, "speed/b": timed | {"shared": True}, "speed/c": timed | {"step_s": 0.2}}
    reported = summary(found, [stage(name) for name in found], {"device": "none"})
    assert reported["time"]["count"] == 2
    assert reported["time"]["worst_error"] == pytest.approx(0.5)
    assert reported["speed"]["speed/a"]["time_error"] == pytest.approx(-0.25)
    assert reported["speed"]["speed/a"]["planned_step_s"] == 0.3
    assert reported["speed"]["speed/b"]["time_error"] is None
    text = page(found, reported)
    assert "-25%: 0.300 of 0.400 s" in text
    assert text.count("0.300 of") == 2


@pytest.mark.parametrize(("adapter", "factor"), [(None, 6), ({"r": 4}, 4)])
def test_mfu_counts_the_head_where_it_scores_and_attention_by_rows(
    adapter: object, factor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rows of 1 and 3 tokens: a token's row has 10 / 4 of them. Half of the tokens are scored. By hand."""
    config = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3}
    split = SimpleNamespace(folder="", num_loss_tokens=2, num_tokens=4)
    plan = SimpleNamespace(settings=SimpleNamespace(adapter=adapter), data=SimpleNamespace(train=split))
    lengths = np.array([1, 3])
    monkeypatch.setattr(TokenStore, "open", lambda folder: SimpleNamespace(lengths=lengths))
    facts = SimpleNamespace(config=config | {"vocab_size": 100})
    counted = operations_of(Planned(plan, facts, None)).a_token
    layers, head, attention = 3 * (4 * 8 * 8 + 3 * 8 * 16), 8 * 100 / 2, 3 * 8 * 10 / 4
    assert counted == factor * (layers + head) + 6 * attention


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic")
@pytest.mark.parametrize(
    ("moves", "unordered", "modes"),
    [
        (lambda to: to.index_add_(0, torch.tensor([0, 0]), torch.ones(2)), None, [False]),
        (lambda to: to.put_(torch.tensor([0]), torch.ones(1)), "put_", [False, True]),
    ],
)
def test_what_is_held_bit_for_bit_is_strict_until_an_operator_has_no_such_form(
    moves: Callable[[torch.Tensor], object], unordered: str | None, modes: list[bool]
):
    """Where torch only warned, flash attention added by atomics: the plain run was not itself."""
    only_warned: list[bool] = []

    def runs() -> str:
        only_warned.append(torch.is_deterministic_algorithms_warn_only_enabled())
        assert torch.are_deterministic_algorithms_enabled()
        moves(torch.zeros(4))
        return "made"

    assert in_one_form(runs) == ("made", unordered)
    assert only_warned == modes
    assert not torch.are_deterministic_algorithms_enabled(), "As before."


def test_another_error_of_a_run_is_not_taken_for_an_operator():
    def runs() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        in_one_form(runs)


def test_time_that_several_kernels_share_counts_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4


def test_every_test_marked_gpu_is_one_that_the_ladder_runs():
    """Elsewhere the first minutes on a card would pass it by: the mark is written in that folder alone."""
    mark = "pytest" + ".mark.gpu"
    marked = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py") if mark in path.read_text()}
    assert marked
    assert [str(path) for path in marked if not path.is_relative_to(TESTS)] == []
    files = {path.relative_to(ROOT) for path in (ROOT / TESTS).glob("test_*.py")}
    assert files == marked, "Each file of the folder has the mark."
    on_ladder = [name for of_stage in GPU_TESTS.values() for name in of_stage]
    assert sorted(on_ladder) == sorted(path.name for path in files), "Each is in one stage."


def test_tests_that_take_too_long_are_ended_and_what_they_said_is_there(tmp_path: Path):
    log = tmp_path / "log.txt"
    program = "import time; print('tests/gpu/test_a.py::test_b PASSED', flush=True); time.sleep(60)"
    assert run_for([sys.executable, "-c", program], log, 1.5) is None
    assert "PASSED" in log.read_text()
    assert run_for([sys.executable, "-c", "raise SystemExit(3)"], log, 60) == 3


@pytest.mark.parametrize(
    ("override", "dtype"), [("optim.copies=split", "bfloat16"), ("memory.loss=full", "float32")]
)
def test_a_stand_in_rehearses_copies_in_bfloat16_and_the_rest_in_float32(
    override: str, dtype: str, tmp_path: Path
):
    """In float32 seven points of the grid were refused on a CPU, and so never rehearsed."""
    path, _ = Bench(tmp_path, stand_in=True).recipe("sft", "0.6B", tokens=64, overrides=[override], count=2)
    assert json.loads(Path(path).read_text())["model"]["dtype"] == dtype


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ladder_runs_from_a_bare_tree_with_tiny_models_on_a_cpu(tmp_path: Path):
    """A stage of every kind; the second call goes on where the first was ended."""
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--stand-in",
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--work", str(tmp_path / "work"), "--only", *LITTLE]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    calls = [
        subprocess.run(
            [*words, "--limit-s", limit], env=environment, cwd=tmp_path, text=True, capture_output=True
        )
        for limit in ("40", "800")
    ]
    assert calls[0].returncode in (0, 4), calls[0].stderr
    assert calls[1].returncode == 0, calls[1].stdout + calls[1].stderr
    found = results.by_stage(results.read(tmp_path / "out"))
    assert {name.partition("/")[0] for name in found} == {one.group for one in stages()}
    faults = {name: one["fault"] for name, one in found.items() if "fault" in one}
    assert not faults
    reported = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert reported["plan"]["count"] >= 5
    assert reported["done"] == reported["stages"]
    assert reported["not_bit_for_bit"] == []
    assert "standing in for a GPU" in (tmp_path / "out" / "page.html").read_text()


LITTLE = (
    *(
        "machine/",
        "back ends/masked",
        "back ends/flex",
        "doctor",
        "tests marked gpu/runs",
        "bit for bit/none",
    ),
    *("bit for bit/optimizer_offload", "speed/0.6B full 8k", "profile/0.6B LoRA", "32 rows"),
    *("owners/0.6B LoRA", "owners/kto"),
    *("24 GiB/0.6B", "TRL/0.6B full", "k = 2", "torch's operators", "longest row/0.6B"),
    f"grid/{GRID[0].name}",
    *(f"grid/{one.name}" for one in GRID[:8] if one.method == "kto"),
)


def test_wheels_that_lie_in_the_tree_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine without a network has them from there, before its own packages."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert site_of(tmp_path) is None
    (tmp_path / ".whl").mkdir()
    about = "memtrain_pens-1.0.dist-info"
    with ZipFile(tmp_path / ".whl" / "memtrain_pens-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("memtrain_pens.py", "COUNT = 12")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: memtrain-pens\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    site = site_of(tmp_path)
    assert site is not None
    assert (site / "memtrain_pens.py").read_text() == "COUNT = 12"
    monkeypatch.setattr(subprocess, "run", None)
    assert site_of(tmp_path) == site, "The same wheels are there already."
    assert are_for_this_python(tmp_path)
    (tmp_path / ".whl" / "memtrain_nibs-1.0-cp38-cp38-manylinux_2_17_x86_64.whl").touch()
    assert not are_for_this_python(tmp_path)


def test_a_trace_that_a_call_gave_up_is_made_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Though the folder of work, where its job lay, is gone by then. One that is there is not made again."""
    made: list[str] = []
    path = tmp_path / "job.json"
    path.write_text('{"rows": 2}')
    monkeypatch.setattr(Tracers, "_trace", lambda self, stage, job: made.append(f"{stage} {job}"))
    first = Tracers(tmp_path, tmp_path)
    monkeypatch.setattr(first.pool, "submit", lambda *given: Future[None]())
    first.begin("steps/a", str(path))
    first.begin("steps/b", str(path))
    first.begin("steps/c", str(path))
    assert first.finish(0.0) == 3
    path.unlink()
    results.append(tmp_path, {"trace_of": "steps/c", "fault": "no module named pens"})
    results.append(tmp_path, {"trace_of": "steps/b", "traced_bytes": 7})
    second = Tracers(tmp_path, tmp_path)
    second.go_on(results.read(tmp_path))
    assert second.finish(10.0) == 0
    assert sorted(made) == ['steps/a {"rows": 2}', 'steps/c {"rows": 2}'], "A fault is tried again."
