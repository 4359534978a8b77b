"""What memtrain did not write stays: in a run folder, behind links, beside models, in caches."""

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

import memtrain
from memtrain.__main__ import main
from memtrain.errors import DataError, LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.checkpoint import mend_checkpoints, remove_checkpoints
from memtrain.trainers.data.store.cache import kept
from memtrain.trainers.model.loading.save import refuse_to_overwrite
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.own_trees import NotOurs, put_in_place, remove_tree

PRECIOUS = "weights of a month"
RECIPE = """
method: sft
model: {path: builtin:tiny}
data: {train: {source: builtin:arithmetic, limit: 40}}
length: {max_length: 64}
train: {batch_size: 4, max_steps: STEPS}
save: {every_steps: 1, keep: 1}
cluster: {device: cpu}
"""


def tree(folder: Path) -> dict[str, str]:
    """Every file and link below a folder, with its text or target."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink() else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def trained(folder: Path, *words: str, steps: int = 2) -> int:
    recipe = folder.parent / "r.yaml"
    recipe.write_text(RECIPE.replace("STEPS", str(steps)))
    return main(["sft", str(recipe), "--run-dir", str(folder), *words])


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody else, with a model in it."""
    folder = tmp_path / "elsewhere"
    for name in ("model.safetensors", "step-000001/model.safetensors", "step-000009/x", ".tmp-step-000003/x"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(PRECIOUS)
    return folder


@pytest.mark.parametrize("name", ["final", "checkpoints", "trackers", ".faults"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_link_in_a_run_folder_is_refused_and_nothing_behind_it_moves(
    tmp_path: Path, elsewhere: Path, name: str, is_first: bool, make_plan: Any
):
    run, before = tmp_path / "run", tree(elsewhere)
    run.mkdir()
    if not is_first:
        make_plan().write(run)
    (run / name).symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="is a link to"):
        RunFolder(run).open_for_run()
    assert main(["clean", str(run)]) == 5
    assert tree(elsewhere) == before
    assert (run / name).is_symlink()


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "log.txt", "status.json", "launch.sh"])
def test_no_file_is_written_through_a_link(tmp_path: Path, name: str):
    (tmp_path / "mine").write_text(PRECIOUS)
    (tmp_path / name).symlink_to(tmp_path / "mine")
    with pytest.raises(LaunchError, match=f"{name} is a link to"):
        RunFolder(tmp_path).open_for_run()
    assert (tmp_path / "mine").read_text() == PRECIOUS


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("final/model.safetensors", []),
        ("final/sub/x", ["--no-resume"]),
        ("recipe.yaml", ["--dry-run"]),
        ("metrics.jsonl", ["--no-resume"]),
    ],
)
def test_a_folder_that_is_no_runs_is_refused_before_launch(
    tmp_path: Path, name: str, words: list[str], capsys
):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).write_text(PRECIOUS)
    assert trained(run, *words) == 5
    assert tree(run) == {name: PRECIOUS}
    assert "would" in capsys.readouterr().err


def test_what_was_put_into_final_or_changed_there_is_set_aside(tmp_path: Path, capsys):
    """A finished run that is made again: its own model is replaced, what somebody did to it is kept."""
    run = tmp_path / "run"
    assert trained(run) == 0
    assert trained(run, "--no-resume") == 0
    assert not list(run.glob("final-before*"))
    (run / "final" / "notes.txt").write_text(PRECIOUS)
    assert trained(run, "--no-resume") == 0
    assert (run / "final-before-1" / "notes.txt").read_text() == PRECIOUS
    assert not (run / "final" / "notes.txt").exists()
    assert "final-before-1/ now" in (run / "log.txt").read_text()
    weights = run / "final" / "model.safetensors"
    weights.write_bytes(b"\0" * weights.stat().st_size)
    changed = weights.read_bytes()
    assert trained(run, "--no-resume") == 0
    assert (run / "final-before-2" / "model.safetensors").read_bytes() == changed
    assert weights.read_bytes() != changed
    capsys.readouterr()


def test_checkpoints_of_others_stay_while_a_run_saves_and_prunes(tmp_path: Path, capsys):
    run = tmp_path / "run"
    assert trained(run, steps=1) == 0
    mine = run / "checkpoints" / "step-000001" / "mine.txt"
    mine.write_text(PRECIOUS)
    assert trained(run, "--no-resume", steps=1) == 5
    assert "mine.txt" in capsys.readouterr().err
    assert mine.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["notes", ".tmp-notes", ".gone-x", ".old-x", "step-1x", ".cache"])
def test_folders_with_other_names_among_checkpoints_stay(tmp_path: Path, name: str):
    folder = RunFolder(tmp_path)
    (folder.checkpoints / name).mkdir(parents=True)
    (folder.checkpoints / name / "x").write_text(PRECIOUS)
    mend_checkpoints(folder)
    remove_checkpoints(folder)
    assert tree(tmp_path) == {f"checkpoints/{name}/x": PRECIOUS}


@pytest.mark.parametrize("name", [".mine.12.tmp", ".recipe.yaml.swp", ".project.123.tmp/x", ".faults/notes"])
def test_hidden_files_of_other_programs_stay_in_a_run_folder(tmp_path: Path, name: str, make_plan: Any):
    plan: Plan = make_plan()
    plan.write(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(PRECIOUS)
    assert main(["clean", str(tmp_path)]) == 0
    assert (tmp_path / name).read_text() == PRECIOUS


def test_half_written_names_that_are_links_or_hold_links_stay(tmp_path: Path, elsewhere: Path):
    before = tree(elsewhere)
    (tmp_path / ".final.12.tmp").symlink_to(elsewhere)
    (tmp_path / ".export.12.tmp").mkdir()
    (tmp_path / ".export.12.tmp" / "in").symlink_to(elsewhere)
    for name in (".final.12.tmp", ".export.12.tmp", "elsewhere"):
        with pytest.raises(NotOurs):
            remove_tree(tmp_path / name)
    assert tree(elsewhere) == before


def test_a_model_is_not_exported_through_a_link(tmp_path: Path, elsewhere: Path):
    (tmp_path / "out").symlink_to(elsewhere)
    with pytest.raises(LaunchError, match="is a link"):
        refuse_to_overwrite(tmp_path / "out")


def test_a_folder_that_was_filled_meanwhile_is_set_aside(tmp_path: Path):
    for name in ("made", "out", "out-before-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(PRECIOUS)
    assert put_in_place(tmp_path / "made", tmp_path / "out", is_ours=False) == tmp_path / "out-before-2"
    assert tree(tmp_path) == {
        "out/made": PRECIOUS,
        "out-before-1/out-before-1": PRECIOUS,
        "out-before-2/out": PRECIOUS,
    }


def test_a_cache_folder_of_somebody_is_refused(tmp_path: Path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "mine").write_text(PRECIOUS)
    with pytest.raises(DataError, match="did not write"):
        kept(tmp_path / "rows", "meta", lambda part: (part / "meta").touch())
    assert (tmp_path / "rows" / "mine").read_text() == PRECIOUS


REMOVES = {
    "cli/commands/gguf.py": {"replace", "rmdir", "unlink"},
    "trainers/runtime/own_trees.py": {"rmtree", "rename"},
    "trainers/runtime/atomic_files.py": {"replace", "unlink"},
    "trainers/checkpoints/checkpoint.py": {"rename"},
    "trainers/data/store/cache.py": {"rename"},
    "trainers/data/store/top_k.py": {"replace"},
    "trainers/run_folder/rank_failures.py": {"unlink", "rmdir"},
    "trainers/model/offload/host_pool.py": {"unlink"},
    "trainers/online/vllm/server_sampler.py": {"rmdir"},
    "trainers/online/vllm/weight_sync.py": {"unlink"},
    "trainers/online/vllm/worker.py": {"unlink"},
    "trainers/run_folder/litter.py": {"unlink"},
    "trainers/run_folder/lock.py": {"unlink", "rmdir"},
    "trainers/run_folder/pulse.py": {"unlink"},
    "memory/hardware/calibration.py": {"replace"},
    "trainers/tools/same_model.py": {"rmtree", "rename"},
    "trainers/tools/trace/client.py": {"replace"},
    "cli/plan/recipe_of_dataset.py": {"replace"},
    "cli/plan/usual_tokenizer.py": {"replace"},
    "cli/commands/calibrate.py": {"unlink"},
    "cli/launch/submit.py": {"unlink"},
}
"""Files that remove or rename, and how: each was looked at for what it may meet."""


def test_folders_are_removed_in_one_place_and_other_removals_are_known():
    package = Path(memtrain.__file__).parent
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                is_of_text = (
                    name == "replace" and len(node.args) != 1 and ast.unparse(node.func) != "os.replace"
                )
                is_ours = name in {
                    "rmtree",
                    "unlink",
                    "rmdir",
                    "remove",
                    "rename",
                    "renames",
                    "move",
                    "replace",
                }
                if not is_ours or is_of_text or (name in ("remove", "move") and _is_of_no_file(node.func)):
                    continue
                found.setdefault(str(file.relative_to(package)), set()).add(name)
    assert found == REMOVES
    assert shutil.rmtree.avoids_symlink_attacks


def _is_of_no_file(call: ast.Attribute) -> bool:
    return ast.unparse(call.value) not in ("os", "shutil")
