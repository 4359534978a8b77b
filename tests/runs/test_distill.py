"""Distillation runs: a teacher beside the student, an adapter switched off, a file of likeliest tokens."""

import json
from pathlib import Path

import pytest
from shared_out import assert_same_curve
from transformers import AutoTokenizer

from memtrain.cli.commands.score_teacher import score_teacher
from memtrain.cli.commands.train import run_recipe
from memtrain.errors import DataError, LaunchError, RecipeError
from memtrain.trainers.data.tokenize.tiny_tokenizer import FOLDER
from tests.runs.small_runs import MODEL, curve, dies_at, run_in, steps

RECIPE = (
    MODEL
    + """
data: {{train: {{source: builtin:arithmetic, limit: 40}}, eval_fraction: 0.1, cache_dir: {cache}}}
length: {{max_length: 128}}
train: {{batch_size: 8, max_steps: 4}}
eval: {{every_steps: 2}}
save: {{every_steps: 1, keep: 20}}
memory: {{measure_peaks: false}}
log: {{every_steps: 1}}
distill: {{teacher: "builtin:tiny"}}
"""
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, run by its overrides): one recipe, one data cache."""
    folder = tmp_path_factory.mktemp("distill")
    recipe = RECIPE.format(method="distill", cache=folder / "cache")

    def run(name: str, *overrides: str) -> list[dict]:
        return run_in(folder, "distill", recipe, overrides, name)

    return folder, run


@pytest.fixture(scope="module")
def live(made) -> list[dict]:
    """The run with a teacher beside it."""
    return made[1]("live")


def test_the_student_comes_nearer_to_its_teacher(live):
    assert steps(live)[-1]["loss"] < 0.7 * steps(live)[0]["loss"]
    held_out = [line["loss"] for line in live if line["kind"] == "eval"]
    assert held_out[-1] < held_out[0]


def test_a_killed_run_goes_on_bit_for_bit(made, live):
    with dies_at(2):
        made[1]("killed")
    assert curve(made[1]("killed")) == curve(live)


@pytest.mark.slow
def test_streamed_and_offloaded_runs_have_the_losses_of_the_resident_one(made, live):
    other = made[1]("streamed", "memory.use=[streamed_layers, boundary_offloading]", "memory.slice_tokens=24")
    assert [s["loss"] for s in steps(other)] == pytest.approx([s["loss"] for s in steps(live)], rel=1e-5)


def test_all_tokens_from_a_file_are_the_teacher_itself(made, live):
    folder, run = made
    words = ["distill.top_k=100000", f"distill.top_k_file={folder / 'whole'}"]
    score_teacher(str(folder / "distill.yaml"), words)
    reported = run("from file", *words)
    assert [s["loss"] for s in steps(reported)] == pytest.approx([s["loss"] for s in steps(live)], rel=1e-4)
    assert steps(reported)[-1]["teacher_tail"] == 0.0


def test_a_file_of_few_tokens_counts_the_mass_of_the_others(made, capsys):
    folder, run = made
    words = ["distill.top_k=4", f"distill.top_k_file={folder / 'few'}", "distill.beta=0"]
    score_teacher(str(folder / "distill.yaml"), words)
    assert "All other tokens together have a probability of" in capsys.readouterr().out
    reported = steps(run("few", *words))
    assert reported[-1]["loss"] < reported[0]["loss"]
    assert 0.5 < reported[0]["teacher_tail"] < 1.0
    with pytest.raises(DataError, match=r"temperature is 2, and the file was made with 1"):
        run("other", *words, "distill.temperature=2")
    with pytest.raises(DataError, match=r"is not in the file of the teacher's top-k tokens"):
        run("shorter", *words, "length.max_length=40")


def test_the_student_at_rest_is_its_own_teacher(made):
    """At the start the adapter adds nothing: the divergence is 0, and only the cross-entropy teaches."""
    reported = made[1](
        "itself",
        "distill.teacher=adapter_off",
        "model.adapter={r: 4}",
        "distill.cross_entropy_weight=0.5",
        "train.max_steps=2",
        "eval.every_steps=1",
    )
    first, last = steps(reported)[0], steps(reported)[-1]
    assert first["divergence"] == pytest.approx(0.0, abs=1e-7)
    assert first["loss"] == pytest.approx(0.5 * first["nll"], rel=1e-5)
    assert last["divergence"] > 0


def test_a_teacher_of_another_vocabulary_is_one_error_before_anything_loads(made, tmp_path: Path):
    folder, _ = made
    tokenizer = AutoTokenizer.from_pretrained(str(FOLDER))
    tokenizer.save_pretrained(str(tmp_path))
    path = tmp_path / "tokenizer.json"
    changed = json.loads(path.read_text())
    vocabulary = changed["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(changed))
    config = {"model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LaunchError, match=r"another than the student's: 2 of .* tokens differ") as caught:
        run_recipe(
            None, str(folder / "distill.yaml"), [f"distill.teacher={tmp_path}"], run_dir=str(tmp_path / "r")
        )
    assert len(caught.value.faults) == 1


@pytest.mark.slow
@pytest.mark.parametrize("teacher", ["builtin:tiny", "adapter_off"])
def test_two_ranks_with_student_and_teacher_in_shards_are_one(runs, curve_of, teacher: str):
    """Both models are cut by rows; a pass of the student lies inside one of its teacher."""
    runs.recipe.write_text(runs.recipe.read_text().replace("method: sft", "method: distill"))
    said = (f"distill.teacher={teacher}", "distill.cross_entropy_weight=0.25", "train.micro_batch_size=2")
    said += ("model.adapter={r: 4}",) if teacher == "adapter_off" else ()
    one = runs.done("one", *said, verb="distill")
    ranks = runs.fork_ranks("two", 2, *said, "cluster.engine=fsdp2", verb="distill")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert_same_curve(curve_of(runs.folder / "two"), curve_of(one), rel=1e-4)


@pytest.mark.slow
def test_own_completions_are_judged_and_a_killed_run_writes_them_again(made):
    words = ("distill.on_policy_fraction=0.5", "generate.max_tokens=10", "train.max_steps=6", "train.seed=1")
    whole = made[1]("own", *words)
    reported = [step["on_policy"] for step in steps(whole)]
    assert set(reported) == {0.0, 1.0}
    written_s = [step["rollout_s"] for step in steps(whole) if step["on_policy"]]
    assert min(written_s) > max(step["rollout_s"] for step in steps(whole) if not step["on_policy"])
    own = next(step for step in steps(whole) if step["on_policy"])
    assert own["loss_tokens"] <= 10 * own["sequences"]
    for at in (reported.index(1.0), 4):
        with dies_at(at):
            made[1]("own killed", *words)
    assert curve(made[1]("own killed", *words)) == curve(whole)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("distill.top_k=4", "distill.top_k_file=f"), "needs a teacher that can score new text"),
        (("length.packing=bfd",), "length.packing bfd cannot be combined with distill.on_policy_fraction"),
        (("generate.num_generations=4",), "generate.num_generations cannot be combined with"),
    ],
)
def test_what_own_completions_cannot_be_with_is_refused(made, words, says):
    with pytest.raises(RecipeError, match=says):
        made[1]("refused", "distill.on_policy_fraction=0.5", *words)
