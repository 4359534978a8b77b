"""What DPO, KTO and reward models add to the loop: partners, references, calibration, and no waiting."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.cli.plan.make_plan import make_plan
from memtrain.errors import DataError
from memtrain.memory.rules.reference_model import WHY
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.components import Built, build
from memtrain.trainers.losses.preference.calibration import calibration_error, calibration_sums
from memtrain.trainers.methods.kto import partners_of
from memtrain.trainers.protocols.feed import Steps
from memtrain.trainers.protocols.method import BeforeStep, StepPreview
from memtrain.trainers.reference.precompute import fingerprint
from memtrain.trainers.reference.reference import EmaReference

RECIPE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 12}}, cache_dir: {cache}}}
length: {{max_length: 160}}
train: {{batch_size: 6, max_steps: 2}}
cluster: {{device: cpu, threads: 1}}
"""


def built_of(folder: Path, method: str, *overrides: str) -> tuple[Built, Steps]:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(method=method, cache=folder / "cache"))
    plan = make_plan(load_recipe(str(path), list(overrides)), run_dir=str(folder / "run")).plan
    built = build(plan)
    return built, Steps(built.train, plan.settings, 0, True)


class HostSyncs(TorchDispatchMode):
    """Counts what waits for the device: a number read on the host, or a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "unique")):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("dpo", ()),
        ("dpo", ("dpo.reference=copy", "dpo.ld_alpha=0.5", "dpo.use_weighting=true")),
        ("kto", ("kto.reference=copy",)),
        ("reward", ()),
    ],
)
def test_nothing_in_a_micro_batch_waits_for_the_device(
    method: str, overrides: tuple[str, ...], tmp_path: Path
):
    """The CPU kernel of segment attention walks over its spans on the host by design, with python numbers."""
    built, steps = built_of(tmp_path, method, *overrides)
    work = steps.work(0, rank=0, num_ranks=1)
    batch = built.train.micro_batch(work.sequences)
    with HostSyncs() as counted:
        if isinstance(built.method, BeforeStep):
            ahead = StepPreview(built.train, work.sequences, work.micro_batches, torch.device("cpu"), 1)
            built.method.before_step(built.scorer, ahead)
        made = built.method.loss(built.scorer, batch, denominator=6.0, want_stats=True)
        made.value.backward()
    assert counted.seen == []
    assert all(value.dim() == 0 and not value.requires_grad for value in made.sums.values())


def test_every_place_of_a_reference_has_its_words():
    assert set(WHY) == {"none", "copy", "adapter_off", "adapter_start", "precomputed", "synced"}


class OneItemASequence:
    """A feed of `count` items, `sizes` of them in each sequence."""

    def __init__(self, sizes: list[int], prompts: list[int] | None = None) -> None:
        self.weights = np.array(sizes)
        self.prompts_of_items = np.arange(sum(sizes)) if prompts is None else np.array(prompts)
        self.ptr = np.cumsum([0, *sizes])
        self.num_items = int(self.ptr[-1])

    def items_of(self, sequences: np.ndarray) -> np.ndarray:
        return np.concatenate([np.arange(self.ptr[s], self.ptr[s + 1]) for s in sequences])


def test_each_prompt_is_matched_with_the_answer_before_it_in_the_step():
    feed = OneItemASequence([1] * 6)
    assert partners_of(feed, np.array([4, 0, 2])).tolist() == [2, 4, 0]  # type: ignore[arg-type]


def test_a_step_of_one_row_takes_a_partner_from_the_feed():
    feed = OneItemASequence([1] * 6)
    assert partners_of(feed, np.array([0])).tolist() == [5]  # type: ignore[arg-type]


def test_no_answer_of_the_same_prompt_is_a_partner():
    """Sequences 0 and 1 hold items 0, 1 and 2, 3, 4: three places before."""
    feed = OneItemASequence([2, 3, 1])
    assert partners_of(feed, np.array([0, 1])).tolist() == [2, 3, 4, 0, 1]  # type: ignore[arg-type]


def test_rows_of_one_prompt_are_not_matched_with_each_other():
    """Pairs taken apart, in order: one place before, half would meet their own prompt; two before, none."""
    feed = OneItemASequence([1] * 6, prompts=[7, 7, 8, 8, 9, 9])
    assert partners_of(feed, np.arange(6)).tolist() == [4, 5, 0, 1, 2, 3]  # type: ignore[arg-type]
    assert partners_of(feed, np.array([1])).tolist() == [5]  # type: ignore[arg-type]
    alike = OneItemASequence([1] * 3, prompts=[7, 7, 7])
    assert partners_of(alike, np.arange(3)).tolist() == [2, 0, 1]  # type: ignore[arg-type]


def test_a_synced_reference_moves_by_its_share_every_few_steps():
    """reference <- 0.6 * 1 + 0.4 * 0 after two steps, and nothing after one."""
    policy, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.ones_(policy.weight)
    nn.init.zeros_(reference.weight)
    reference.requires_grad_(False)
    synced = EmaReference(reference, policy, every_steps=2, mixup=0.6)
    synced.stepped(1)
    assert reference.weight.item() == 0
    synced.stepped(2)
    assert reference.weight.item() == pytest.approx(0.6)


def test_a_fingerprint_changes_with_any_weight_but_an_adapters():
    model = nn.ModuleDict({"lora_A": nn.Linear(4, 4), "base": nn.Linear(4, 4)})
    before = fingerprint(model)
    with torch.no_grad():
        model["lora_A"].weight += 1
    assert fingerprint(model) == before
    with torch.no_grad():
        model["base"].weight[3, 2] += 1e-3
    assert fingerprint(model) != before


def test_reference_log_probs_are_made_once_and_found_again(tmp_path: Path):
    first, _ = built_of(tmp_path, "dpo")
    kept = sorted((tmp_path / "cache" / "reference").glob("*/values.npy"))
    assert len(kept) == 1
    stamp = kept[0].stat().st_mtime_ns
    again, _ = built_of(tmp_path, "dpo")
    assert kept[0].stat().st_mtime_ns == stamp
    assert np.array_equal(first.train.reference_IK, again.train.reference_IK)  # type: ignore[attr-defined]
    built_of(tmp_path, "dpo", "train.seed=5")
    assert len(list((tmp_path / "cache" / "reference").glob("*/values.npy"))) == 2


def test_a_damaged_kept_reference_is_an_error(tmp_path: Path):
    built_of(tmp_path, "dpo")
    (kept,) = (tmp_path / "cache" / "reference").glob("*/values.npy")
    held = bytearray(kept.read_bytes())
    held[-3] ^= 16
    kept.write_bytes(held)
    with pytest.raises(DataError, match=r"'values.npy' is damaged"):
        built_of(tmp_path, "dpo")


def test_a_kept_reference_answers_only_what_it_was_asked(tmp_path: Path):
    """LD-DPO weighs the tails of longer answers: its reference is not DPO's, though all else is the same."""
    plain, _ = built_of(tmp_path, "dpo")
    weighed, _ = built_of(tmp_path, "dpo", "dpo.ld_alpha=0.5")
    assert not np.array_equal(plain.train.reference_IK, weighed.train.reference_IK)  # type: ignore[attr-defined]
    other_loss, _ = built_of(tmp_path, "dpo", "dpo.ld_alpha=0.5", "dpo.loss=ipo", "dpo.beta=0.2")
    assert np.array_equal(weighed.train.reference_IK, other_loss.train.reference_IK)  # type: ignore[attr-defined]
    assert len(list((tmp_path / "cache" / "reference").glob("*/values.npy"))) == 2


def test_calibration_is_the_distance_of_confidence_from_wins():
    """Two pairs at confidence 0.8, one won and one lost: |2 * 0.8 - 1| / 2 = 0.3. A win at 0.5 + is a bin."""
    gap = math.log(4.0)
    chosen, rejected = torch.tensor([gap, 0.0]), torch.tensor([0.0, gap])
    sums = {name: value.item() for name, value in calibration_sums(chosen, rejected).items()}
    rest, error = calibration_error(sums | {"rewards/chosen": 1.0}, 2.0)
    assert error == pytest.approx(0.3)
    assert rest == {"rewards/chosen": 1.0}
    assert calibration_error({"x": 1.0}, 2.0) == ({"x": 1.0}, None)
