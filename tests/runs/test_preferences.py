"""`memtrain dpo|kto|reward` from end to end: they learn, stop, go on, and say what is wrong."""

import json
import math
from pathlib import Path

import pytest
from sampled import sampled
from small_runs import MODEL, dies_at, run_in

from memtrain.cli.commands.train import run_recipe
from memtrain.errors import DataError, MemtrainError, RecipeError
from memtrain.recipes.reading.load import load_recipe

METHODS = ("dpo", "kto", "reward")
SYNCED = ("dpo.reference=synced", "dpo.reference_sync_steps=2")
RECIPE = (
    MODEL
    + """
data: {{train: {{source: builtin:arithmetic, limit: 40}}, eval_fraction: 0.2, cache_dir: {cache}}}
length: {{max_length: 160}}
train: {{batch_size: 8, max_steps: 6}}
eval: {{every_steps: 3}}
save: {{every_steps: 2}}
"""
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def written(folder: Path, method: str, cache: Path) -> str:
    path = folder / f"{method}.yaml"
    path.write_text(RECIPE.format(method=method, cache=cache))
    return str(path)


def run(folder: Path, method: str, cache: Path, *overrides: str, name: str = "run") -> list[dict]:
    """Train to the end; the lines of the metrics."""
    return run_in(folder, method, RECIPE.format(method=method, cache=cache), overrides, name)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(reported: list[dict], kind: str = "step") -> list[float]:
    return [line["loss"] for line in reported if line["kind"] == kind]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_begins_where_the_formula_says_and_learns(method: str, tmp_path: Path, cache: Path):
    """Policy and reference are equal at first: margins and gains are 0. A reward head is random."""
    reported = run(tmp_path, method, cache)
    first = {"dpo": math.log(2), "kto": 0.5}.get(method)
    assert losses(reported)[0] == pytest.approx(first, abs=1e-4) if first else losses(reported)[0] < 1
    assert all(math.isfinite(loss) for loss in losses(reported))
    if method != "kto":  # whose loss follows the verdicts of the rows at hand
        assert losses(reported)[-1] < losses(reported)[0]
    held_out = [line for line in reported if line["kind"] == "eval"]
    assert [line["step"] for line in held_out] == [3, 6]
    assert "rewards/margins" in held_out[0]
    assert ("calibration" in held_out[0]) == (method == "reward")


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        pytest.param("dpo", (), marks=pytest.mark.slow),
        ("dpo", ("dpo.reference=synced", "dpo.reference_sync_steps=2")),
        ("kto", ()),
        pytest.param("reward", (), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(
    method: str, overrides: tuple[str, ...], tmp_path: Path, cache: Path
):
    whole = run(tmp_path, method, cache, *overrides, name="whole")
    with dies_at(4):
        run(tmp_path, method, cache, *overrides, name="again")
    again = run(tmp_path, method, cache, *overrides, name="again")
    assert losses(again) == losses(whole)
    assert losses(again, "eval") == losses(whole, "eval")
    bits = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert bits[0] == bits[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dpo.loss=sigmod", "did you mean 'sigmoid'"),
        ("dpo.loss=[sigmoid, sft]", None),
        ("dpo.loss_weights=[1, 2]", "2 numbers for 1 losses"),
        ("dpo.loss=exo_pair", "label_smoothing above 0"),
        ("dpo.simpo_gamma=1", "simpo_gamma has no effect on sigmoid"),
        ("dpo.reference_mixup=0.5", "reference: synced"),
        ("dpo.reference=adapter_off", "no adapter to switch off"),
        ("length.packing=bfd", "concatenates prompts with their answers"),
        ("kto.beta=0.1", "section of another method"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(
    override: str, words: str | None, tmp_path: Path, cache: Path
):
    recipe = written(tmp_path, "dpo", cache)
    if words is None:
        assert load_recipe(recipe, [override]).recipe.dpo
        return
    with pytest.raises(RecipeError) as caught:
        run_recipe("dpo", recipe, [override], dry_run=True, run_dir=str(tmp_path / "run"))
    assert words in caught.value.text()


def test_a_reference_free_loss_has_no_reference(tmp_path: Path, cache: Path):
    recipe = written(tmp_path, "dpo", cache)
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, ["dpo.loss=simpo", "dpo.reference=copy"])
    assert "simpo uses no reference" in caught.value.text()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "are the same"),
        ('{"prompt": "a", "chosen": "b"}', "rejected"),
        ('{"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}', "prompt"),
        ('{"chosen": [{"role": "user", "content": "a"}], "rejected": "b"}', "rejected"),
    ],
)
def test_a_wrong_pair_is_reported_with_its_line(row: str, words: str, tmp_path: Path, cache: Path):
    good = '{"prompt": "a", "chosen": "b", "rejected": "c"}'
    (tmp_path / "pairs.jsonl").write_text(f"{good}\n{row}\n")
    recipe = written(tmp_path, "dpo", cache)
    overrides = [f"data.train={tmp_path}/pairs.jsonl", "data.eval_fraction=0", "eval.every_steps=null"]
    with pytest.raises(DataError) as caught:
        run_recipe("dpo", recipe, overrides, dry_run=True, run_dir=str(tmp_path / "run"))
    assert words in caught.value.text()
    assert "pairs.jsonl:2" in caught.value.text()


def test_rows_for_another_method_are_refused(tmp_path: Path, cache: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = written(tmp_path, "reward", cache)
    overrides = [f"data.train={tmp_path}/rows.jsonl", "data.eval_fraction=0", "eval.every_steps=null"]
    with pytest.raises(MemtrainError) as caught:
        run_recipe("reward", recipe, overrides, dry_run=True, run_dir=str(tmp_path / "run"))
    assert "does not accept" in caught.value.text()


def test_a_window_shorter_than_a_row_shares_prompts_all_the_same(tmp_path: Path, cache: Path):
    model = (
        "{model_type: mistral, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,"
        " sliding_window: 64, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}"
    )
    reported = run(tmp_path, "dpo", cache, f"model.config={model}", "train.max_steps=2")
    assert losses(reported)[0] == pytest.approx(math.log(2), abs=1e-4)
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["settings"]["shared_prompts"]


def test_attention_in_the_class_itself_shares_no_prompt(tmp_path: Path, cache: Path):
    bloom = "{model_type: bloom, hidden_size: 32, n_layer: 2, n_head: 4}"
    recipe = written(tmp_path, "dpo", cache)
    asked = [f"model.config={bloom}", "length.shared_prompts=true"]
    with pytest.raises(RecipeError) as caught:
        run_recipe("dpo", recipe, asked, dry_run=True, run_dir=str(tmp_path / "asked"))
    assert "a prompt cannot be shared by its answers" in caught.value.text()


def test_kto_takes_pairs_apart(tmp_path: Path, cache: Path):
    rows = [f'{{"prompt": "{n} pens:", "chosen": " {n}", "rejected": " no"}}' for n in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    overrides = [f"data.train={tmp_path}/pairs.jsonl", "data.eval_fraction=0", "eval.every_steps=null"]
    reported = run(tmp_path, "kto", cache, *overrides, "train.max_steps=2", "length.group_prompts=true")
    assert next(line for line in reported if line["kind"] == "data")["rows"] == 16
    assert [line["rewards/desirable_share"] for line in reported if line["kind"] == "step"] == [0.5, 0.5]


def test_kto_is_tried_before_it_starts_with_a_reference_that_was_asked_before(tmp_path: Path, cache: Path):
    """The heaviest held-out rows alone are no step: the reference was asked for none of their mixed pairs."""
    reported = run(
        tmp_path, "kto", cache, "memory.preflight=on", "memory.use=precomputed_reference", "train.max_steps=2"
    )
    phases = {line["phase"] for line in reported if line["kind"] == "memory"}
    assert "dry run: evaluation" in phases
    assert len(losses(reported)) == 2


def test_ktos_heaviest_rows_are_tried_though_no_step_mixes_them(tmp_path: Path, cache: Path):
    """Three steps never mix the heaviest rows: the reference was not asked for their mixed pairs."""
    overrides = ["train.max_steps=3", "eval.every_steps=null", "memory.preflight=on", "cluster.threads=1"]
    run_recipe("kto", "smoke/kto", [*overrides, f"data.cache_dir={cache}"], run_dir=str(tmp_path / "run"))
    reported = lines(tmp_path / "run")
    assert "dry run: steady step" in {line["phase"] for line in reported if line["kind"] == "memory"}
    assert len(losses(reported)) == 3


def test_conversations_with_a_common_beginning_are_pairs(tmp_path: Path, cache: Path):
    """The prompt is what both begin with: the system's and the user's message."""

    def conversation(answer: str) -> list[dict[str, str]]:
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
        return [*asked, {"role": "assistant", "content": answer}]

    row = json.dumps({"chosen": conversation("4"), "rejected": conversation("five"), "margin": 0.5})
    (tmp_path / "pairs.jsonl").write_text(f"{row}\n" * 8)
    overrides = [f"data.train={tmp_path}/pairs.jsonl", "data.eval_fraction=0", "eval.every_steps=null"]
    reported = run(tmp_path, "reward", cache, *overrides, "train.max_steps=2")
    assert next(line for line in reported if line["kind"] == "data")["rows_dropped"] == 0


def test_what_is_cut_is_reported_for_chosen_and_rejected_answers(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
):
    """The rejected answers lose their ends; in the plan, the metrics and the report."""
    row = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c " * 60})
    (tmp_path / "pairs.jsonl").write_text(f"{row}\n" * 8)
    overrides = [f"data.train={tmp_path}/pairs.jsonl", "data.eval_fraction=0", "eval.every_steps=null"]
    reported = run(tmp_path, "dpo", cache, *overrides, "length.max_length=40", "train.max_steps=1")
    data = next(line for line in reported if line["kind"] == "data")
    assert data["loss_tokens_cut_by_answer"] == [0, data["loss_tokens_cut"]]
    words = f": 0 of chosen, {data['loss_tokens_cut']} of rejected answers"
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(words) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("length.truncation=drop", "longer than 8 tokens, and longer rows are dropped"),
        ("length.truncation=keep_start", "no loss token is within 8 tokens"),
    ],
)
def test_a_length_that_leaves_no_row_is_reported(override: str, words: str, tmp_path: Path, cache: Path):
    with pytest.raises(DataError, match="none of 32 rows is left") as caught:
        run(tmp_path, "dpo", cache, "length.max_length=8", override)
    assert words in caught.value.text()


def test_a_length_that_leaves_no_held_out_row_is_reported_before_training(tmp_path: Path, cache: Path):
    rows = [{"prompt": "How many?", "chosen": " one" * 80, "rejected": " two" * 80} for _ in range(3)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data.eval_fraction=0", f"data.eval={tmp_path / 'long.jsonl'}", "length.truncation=drop"]
    with pytest.raises(DataError, match="none of 3 held-out rows is left: all rows are longer"):
        run(tmp_path, "dpo", cache, "length.max_length=60", *words)


@pytest.mark.parametrize("method", sampled(METHODS))
def test_the_smoke_recipe_trains(method: str, tmp_path: Path, cache: Path):
    overrides = ["cluster.threads=1", f"data.cache_dir={cache}"]
    run_recipe(method, f"smoke/{method}", overrides, run_dir=str(tmp_path / "run"))
    assert len(losses(lines(tmp_path / "run"))) == 12


def test_a_reference_held_beside_the_policy_is_predicted_and_measured(tmp_path: Path, cache: Path):
    reported = run(tmp_path, "dpo", cache, "dpo.reference=copy", "train.max_steps=1")
    measured = next(
        one["allocated"] for one in reported if one["kind"] == "memory" and one["phase"] == "load"
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    load = next(phase for phase in plan["prediction"]["phases"] if phase["phase"] == "load")
    owners = {one["owner"]: one["num_bytes"] for one in load["owners"]}
    assert owners["reference"] == owners["weights"]
    assert measured == pytest.approx(load["num_bytes"], rel=0.01)


PAIR = {
    "prompt": "Ana has 3 pens and buys 4 more. " * 6,
    "chosen": " 3 + 4 = 7" * 8,
    "rejected": " 3 * 4 = 12" * 8,
}


PADDED = ("length.padding_free=false", "length.shared_prompts=false")


@pytest.mark.parametrize(("method", "forms"), [("dpo", ()), ("dpo", PADDED), ("kto", ()), ("reward", ())])
def test_the_predicted_peak_is_the_measured_one(
    method: str, forms: tuple[str, ...], tmp_path: Path, cache: Path
):
    """Rows that are all the same leave no doubt which micro-batch is heaviest."""
    row = {"prompt": PAIR["prompt"], "completion": PAIR["chosen"], "label": True} if method == "kto" else PAIR
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    reported = run(
        tmp_path,
        method,
        cache,
        f"data.train={tmp_path}/rows.jsonl",
        "data.eval_fraction=0",
        "eval.every_steps=null",
        "length.max_length=null",
        "train.max_steps=2",
        "train.micro_batch_size=4",
        "model.config.hidden_size=96",
        "model.config.intermediate_size=256",
        "model.config.num_hidden_layers=3",
        *forms,
    )
    measured = next(one for one in reported if one["kind"] == "memory" and one["phase"] == "steady step")[
        "allocated"
    ]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    steady = next(one for one in plan["prediction"]["phases"] if one["phase"] == "steady step")["num_bytes"]
    assert measured == pytest.approx(steady, rel=0.06)
