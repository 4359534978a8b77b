"""Passes of training that are recorded by a tape and replayed with other tokens, against passes by hand."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.cli.commands.train import run_recipe
from memtrain.cli.plan.make_plan import make_plan
from memtrain.memory.plan.plan import Plan
from memtrain.memory.rules import step_graphs
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.model.attention import torch_cpu
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.heads import captured_passes
from memtrain.trainers.model.heads.captured_passes import CapturedPasses, capacity, padded
from memtrain.trainers.runtime.operator_tape import OperatorTape, Tape
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source

RECIPE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: {tied}}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 24}}, cache_dir: {cache}}}
length: {{max_length: 160}}
train: {{batch_size: 6, micro_batch_size: 3, max_steps: 4}}
cluster: {{device: cpu, threads: 1}}
"""
ONLINE = """
rewards: {functions: [{function: length}]}
generate: {num_generations: 3, max_tokens: 12}
"""
WRITE = ("grpo", "rloo", "ppo", "online-dpo")


@pytest.fixture
def plan_of(tmp_path) -> Callable[..., Plan]:
    def make(method: str, *overrides: str, tied: bool = False) -> Plan:
        path = tmp_path / f"{method}.yaml"
        text = RECIPE.format(
            method=method.replace("-", "_"), cache=tmp_path / "cache", tied=str(tied).lower()
        )
        path.write_text(text + (ONLINE if method in WRITE else ""))
        return make_plan(load_recipe(str(path), list(overrides)), run_dir=str(tmp_path / "run")).plan

    return make


def attend_by_tensors(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: Layout, scale: float, rule: Any = None
) -> Tensor:
    """Attention of a row as a GPU's kernel has it: where segments begin is read from tensors alone."""
    place_T = torch.arange(len(query_THD))
    segment_T = torch.searchsorted(layout.within.cu_query, place_T, right=True)
    sees_TT = (segment_T[:, None] == segment_T[None]) & (place_T[:, None] >= place_T[None])
    if layout.to_prompt is not None:
        behind_T = place_T - layout.num_prompt_tokens
        owner_T = torch.searchsorted(layout.to_prompt.cu_query, behind_T, right=True)
        prompt_T = torch.searchsorted(layout.to_prompt.cu_key, place_T, right=True)
        is_there = (behind_T >= 0)[:, None] & (behind_T < 0)[None]
        sees_TT = sees_TT | (is_there & (owner_T[:, None] == prompt_T[None]))
    num_sharing = query_THD.shape[1] // key_TKD.shape[1]
    key_THD, value_THD = (one.repeat_interleave(num_sharing, 1) for one in (key_TKD, value_TKD))
    score_HTT = torch.einsum("thd,shd->hts", query_THD, key_THD) * scale
    share_HTT = score_HTT.masked_fill(~sees_TT, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", share_HTT, value_THD)


@pytest.fixture(autouse=True)
def by_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's attention is one whose recordings hold for other rows."""
    monkeypatch.setattr(torch_cpu, "attend", attend_by_tensors)
    monkeypatch.setattr(captured_passes, "BY_BOUNDS_ON_DEVICE", ("memtrain_torch_cpu",))


def stepped(plan: Plan, *, captured: bool, steps: int = 3) -> tuple[list[float], list[Tensor], Stepper]:
    """Losses and norms of some steps, and the weights after them."""
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"step_graphs": captured})})
    make_accelerator(plan.settings)
    built = build(plan)
    stepper = Stepper(plan, built, online_source(plan, built, Rollouts()))
    made = [stepper.step(number, want_stats=number == 1) for number in range(steps)]
    told = [number for one in made for number in (one.loss, one.grad_norm)]
    return told, [one.detach().clone() for one in stepper.parameters], stepper


TREATED = [
    ("sft", ()),
    ("sft", ("length.padding_free=false",)),
    ("sft", ("length.packing=bfd", "train.batch_size=2", "train.micro_batch_size=1")),
    ("sft", ("model.adapter={r: 4}",)),
    ("sft", ("model.adapter={r: 4, kind: dora}", "memory.activation_checkpointing=on")),
    ("sft", ("optim.neftune_alpha=5",)),
    ("sft", ("memory.optimizer_offload=on", "model.kernels=fused")),
    ("dpo", ("length.shared_prompts=false",)),
    ("dpo", ("dpo.reference=copy", "memory.activation_checkpointing=on")),
    ("dpo", ("model.adapter={r: 4}", "length.padding_free=false", "length.shared_prompts=false")),
    ("kto", ()),
    ("reward", ()),
    ("distill", ("distill.teacher=builtin:tiny",)),
    ("grpo", ()),
    ("rloo", ()),
    ("ppo", ("ppo.value=own",)),
    ("ppo", ("ppo.value=shared",)),
    ("online-dpo", ()),
]


@pytest.mark.parametrize(("method", "overrides"), TREATED)
def test_replayed_steps_are_those_by_hand(plan_of: Callable[..., Plan], method: str, overrides: tuple):
    """With other tokens, lengths and numbers of rows than those that were recorded."""
    plan = plan_of(method, *overrides)
    by_hand, weights, _ = stepped(plan, captured=False)
    replayed, other, stepper = stepped(plan, captured=True)
    captured = captured_of(stepper)
    assert captured.is_on
    assert captured.num_replayed > 0
    assert replayed == pytest.approx(by_hand, rel=1e-5, abs=1e-6)
    for one, two in zip(weights, other, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=4e-6)


def captured_of(stepper: Stepper) -> CapturedPasses:
    found = stepper.built.scorer.captured
    assert found is not None
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_replay_has_the_bits_of_the_same_padded_pass(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, tied: bool
):
    """Dropout too: its numbers are those of a micro-batch's own seed."""
    plan = plan_of("sft", "model.adapter={r: 4, dropout: 0.2}", tied=tied)
    replayed, weights, stepper = stepped(plan, captured=True)
    assert captured_of(stepper).num_replayed > 0
    monkeypatch.setattr(captured_passes, "MOST_SHAPES", 0)
    by_hand, other, stepper = stepped(plan, captured=True)
    assert captured_of(stepper).num_replayed == 0
    assert replayed == by_hand
    assert all(torch.equal(one, two) for one, two in zip(weights, other, strict=True))


def test_shapes_beyond_the_set_are_computed_by_hand_and_counted(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of("sft")
    by_hand, _, _ = stepped(plan, captured=False)
    monkeypatch.setattr(captured_passes, "MOST_SHAPES", 1)
    made, _, stepper = stepped(plan, captured=True)
    captured = captured_of(stepper)
    assert captured.num_shapes == 1
    assert captured.num_replayed < captured.num_passes - 1
    assert made == pytest.approx(by_hand, rel=1e-5)
    assert "of 6 passes were replayed from CUDA graphs of 1 shape of rows" in captured.words()


@pytest.mark.parametrize("broken", ["rehearsal", "recording", "replay"])
def test_what_cannot_be_recorded_leaves_the_numbers_and_says_why(
    plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, broken: str
):
    plan = plan_of("sft")
    by_hand, weights, _ = stepped(plan, captured=False)
    if broken == "rehearsal":
        monkeypatch.setattr(OperatorTape, "rehearse", lambda self, run: run() or "it waits for the device")
    elif broken == "recording":
        monkeypatch.setattr(Tape, "end", lambda self: self.abandon() or refuse())
    else:
        monkeypatch.setattr(captured_passes, "_apart", lambda found, expected: 0.5)
    made, other, stepper = stepped(plan, captured=True)
    captured = captured_of(stepper)
    assert not captured.is_on
    assert captured.num_replayed == 0
    assert made == pytest.approx(by_hand, rel=1e-5)
    for one, two in zip(weights, other, strict=True):
        torch.testing.assert_close(one, two, rtol=2e-5, atol=4e-6)


def refuse() -> None:
    raise RuntimeError("a recording cannot wait for a number")


def test_released_shapes_are_recorded_anew(plan_of: Callable[..., Plan]):
    plan = plan_of("sft")
    by_hand, _, _ = stepped(plan, captured=False, steps=4)
    settings = plan.settings.model_copy(update={"step_graphs": True})
    plan = plan.model_copy(update={"settings": settings})
    stepper = Stepper(plan, build(plan))
    made = [stepper.step(number) for number in range(2)]
    captured_of(stepper).release()
    made += [stepper.step(number) for number in (2, 3)]
    told = [number for one in made for number in (one.loss, one.grad_norm)]
    assert told == pytest.approx(by_hand, rel=1e-5)
    assert captured_of(stepper).is_on


def layout_inputs(layout: Layout) -> dict[str, Any]:
    ids = torch.randint(1, 100, (1, layout.num_tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout}


@pytest.mark.parametrize(
    "layout",
    [
        packed_layout([5, 9, 2, 8]),
        packed_layout([128]),
        shared_layout([(7, [3, 4]), (5, [6])]),
        shared_layout([(128, [128])]),
    ],
)
def test_padding_is_segments_of_its_own_and_moves_no_row(layout: Layout):
    """Attention of the rows is the same to the bit; nothing of theirs is behind a cut."""
    inputs = layout_inputs(layout)
    found = padded(inputs, repeats_positions=False, by_bounds=False)
    row: Layout = found.inputs["layout"]
    num_own, num_prompt = row.num_tokens - row.num_prompt_tokens, row.num_prompt_tokens
    assert capacity(num_own) == num_own
    assert not num_prompt or capacity(num_prompt) == num_prompt
    assert int(row.within.cu_query[-1]) == row.num_tokens
    assert torch.equal(found.cut(found.inputs["input_ids"][..., None])[..., 0], inputs["input_ids"])
    assert torch.equal(found.cut(found.inputs["position_ids"][..., None])[..., 0], inputs["position_ids"])
    draw = torch.Generator().manual_seed(1)
    wide = torch.randn(3, row.num_tokens, 2, 4, generator=draw, dtype=torch.float64)
    own = found.cut(wide)
    out = attend_by_tensors(*wide.unbind(), row, 0.5)
    assert torch.allclose(found.cut(out[None])[0], attend_by_tensors(*own.unbind(), layout, 0.5), atol=1e-15)
    with pytest.raises(RuntimeError, match="where the segments of one row begin"):
        row.within.spans()


def test_a_capacity_is_at_most_an_eighth_above():
    assert [capacity(one) for one in (1, 128, 129, 1100, 4022, 16381)] == [128, 128, 256, 1152, 4096, 16384]
    assert all(one <= capacity(one) <= one * 1.125 for one in range(1024, 5000))


def test_a_whole_run_is_replayed_and_says_so(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """`train.cuda_graphs: on` by the tape: evaluation, saves and the report are as before."""
    monkeypatch.setattr(step_graphs, "cannot_record", lambda settings, *given: "")
    path = tmp_path / "sft.yaml"
    path.write_text(RECIPE.format(method="sft", cache=tmp_path / "cache", tied="false"))
    runs = {}
    for wanted in ("off", "on"):
        given = [f"train.cuda_graphs={wanted}", "data.eval_fraction=0.2", "eval.every_steps=2"]
        run_recipe("sft", str(path), given, run_dir=str(tmp_path / wanted))
        lines = (tmp_path / wanted / "metrics.jsonl").read_text().splitlines()
        runs[wanted] = [json.loads(line) for line in lines]
    numbers = {
        wanted: [line["loss"] for line in lines if line["kind"] in ("step", "eval")]
        for wanted, lines in runs.items()
    }
    assert numbers["on"] == pytest.approx(numbers["off"], rel=1e-5)
    notes = [line["text"] for line in runs["on"] if line["kind"] == "note"]
    assert any("passes were replayed from CUDA graphs" in note for note in notes)
    decisions = json.loads((tmp_path / "on" / "plan.json").read_text())["decisions"]
    assert ("step_graphs", "on") in [(one["setting"], one["value"]) for one in decisions]
