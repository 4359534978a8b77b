"""Preferences on two processes (gloo): the losses and the evaluations of one."""

from pathlib import Path

import pytest

RECIPE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 60}}, eval_fraction: 0.2}}
length: {{max_length: 160}}
memory: {{measure_peaks: false}}
optim: {{lr: 3e-3}}
train: {{batch_size: 7, micro_batch_size: 2, max_steps: {steps}}}
eval: {{every_steps: 3}}
cluster: {{device: cpu, processes: 1, threads: 1}}
"""
SYNCED = ("reference=synced", "reference_sync_steps=2", "reference_mixup=0.5")
SUMS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl", "calibration")


def assert_two_are_one(runs, metrics, method: str, *overrides: str, steps: int) -> None:
    """Seven rows a step, two at a time: the ranks get unlike shares of every step."""
    recipe = runs.folder / f"{method}.yaml"
    recipe.write_text(RECIPE.format(method=method, steps=steps))
    given = [f"{method}.{one}" for one in overrides]
    one = runs.done("one", *given, verb=method, recipe=str(recipe))
    ranks = runs.fork_ranks("two", 2, *given, verb=method, recipe=str(recipe))
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    for kind, count in (("step", steps), ("eval", steps // 3)):
        found, wanted = metrics(runs.folder / "two", kind), metrics(one, kind)
        assert len(found) == len(wanted) == count
        for line, expected in zip(found, wanted, strict=True):
            names = ["loss", *(name for name in SUMS if name in expected)]
            reported = {name: line[name] for name in names}
            # Sums are taken in another order; the steps of AdamW make more of it.
            assert reported == pytest.approx({name: expected[name] for name in names}, rel=1e-3, abs=2e-5)


def test_kto_on_two_ranks_is_kto_on_one(runs, metrics):
    """The mismatched pairs, too, are those of the whole step."""
    assert_two_are_one(runs, metrics, "kto", steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("dpo", ()),
        ("dpo", ("loss=[sigmoid, sft]",)),
        ("dpo", ("reference=copy",)),
        ("dpo", SYNCED),
        ("kto", ("reference=copy",)),
        ("reward", ()),
    ],
)
def test_preferences_on_two_ranks_are_those_on_one(method: str, overrides: tuple[str, ...], runs, metrics):
    assert_two_are_one(runs, metrics, method, *overrides, steps=6)


def test_two_ranks_ask_the_reference_together_and_keep_its_answer(runs, metrics):
    """The log-probs of two ranks serve a run of one, which asks nothing again."""
    recipe = runs.folder / "dpo.yaml"
    recipe.write_text(RECIPE.format(method="dpo", steps=2))
    given = ("dpo.reference=precomputed", f"data.cache_dir={runs.folder / 'cache'}")
    ranks = runs.fork_ranks("two", 2, *given, verb="dpo", recipe=str(recipe))
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    kept = {
        path: path.stat().st_mtime_ns for path in Path(runs.folder / "cache" / "reference").rglob("*.npy")
    }
    assert len(kept) == 2
    one = runs.done("one", *given, verb="dpo", recipe=str(recipe))
    assert kept == {
        path: path.stat().st_mtime_ns for path in (runs.folder / "cache" / "reference").rglob("*.npy")
    }
    losses = [[line["loss"] for line in metrics(folder, "step")] for folder in (runs.folder / "two", one)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
