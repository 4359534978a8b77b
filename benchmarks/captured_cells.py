"""Cells of the exactness matrix whose micro-batch is captured: see exactness.py --captured.

Forward, loss and backward of a micro-batch are recorded once, by the tape that does on a CPU what a CUDA
graph does, and replayed twice: on the micro-batch that it recorded, and on one with other tokens, other
weights of the loss and other counts of the step, after a pass without gradients in between. Loss and
gradients must be those of the pass itself, to the bit; and these the same whether the counts of the step are
Python's numbers, as without a graph, or stand on the device. A pass that cannot be captured says why, and is
computed by hand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.build.balanced import own_method
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import Built, build
from memtrain.trainers.build.expert_load import micro_batch_of
from memtrain.trainers.losses.head.linear import StepCount
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.model.offload.weights import weights_of
from memtrain.trainers.runtime.operator_tape import OperatorTape
from memtrain.trainers.runtime.seed import seed_step
from memtrain.trainers.tools.verify.evidence import offloader_of
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source
from memtrain.trainers.tools.verify.plans import on_one_process, perturb
from memtrain.trainers.tools.verify.verify import LOW_BYTES

METHODS = ("sft", "dpo", "grpo")
"""Methods of treatments: one forward pass, a pair's, written answers."""
SEQUENCES = 2
"""Of the micro-batch: several documents, whose operators are enough to be told apart."""
TOKENS = (20, 240)
"""Tokens that others are drawn from."""
ADAPTER = "model.adapter={r: 4, target_modules: [q_proj, v_proj, down_proj]}"
DROPS = "model.adapter={r: 4, dropout: 0.1, target_modules: [q_proj, v_proj, down_proj]}"
MIXTURE = (
    "model.config={model_type: qwen3_moe, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 4,"
    " num_experts_per_tok: 2, tie_word_embeddings: false}"
)
SAVED = ("model.config=null", "model.path={folder}/model")
"""Weights of a file: packed ones begin with no random numbers."""
CHECKPOINTED = "memory.activation_checkpointing=on"
TREATMENTS: dict[str, tuple[str, ...]] = {
    "LoRA": (ADAPTER,),
    "LoRA, checkpointed": (ADAPTER, CHECKPOINTED),
    "LoRA with dropout": (DROPS,),
    "LoRA with dropout, checkpointed": (DROPS, CHECKPOINTED),
    "LoRA with dropout, streamed layers": (DROPS, "memory.slice_tokens=64", "memory.streamed_layers=on"),
    "DoRA, checkpointed": (ADAPTER.replace("r: 4", "r: 4, kind: dora"), CHECKPOINTED),
    "4 bits, LoRA": (*SAVED, ADAPTER, "model.quantize=4bit"),
    "4 bits, LoRA, checkpointed": (*SAVED, ADAPTER, "model.quantize=4bit", CHECKPOINTED),
    "8 bits, LoRA, checkpointed": (*SAVED, ADAPTER, "model.quantize=8bit", CHECKPOINTED),
    "noise on embeddings": ("optim.neftune_alpha=5",),
    "weights on the host, LoRA": (ADAPTER, "memory.weights_offload=on"),
    "boundaries on the host, LoRA": (ADAPTER, CHECKPOINTED, "memory.activation_offloading=on"),
    "a mixture, evened": (MIXTURE, "train.router_aux_loss_coef=0.01"),
}
"""Treatments beside the strategies of the matrix, by the recipe's overrides."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward, loss and backward of one micro-batch at fixed places."""

    built: Built
    stepper: Stepper
    micro_batch: Any
    count: Tensor
    """The denominator of the step, on the device."""
    loss: Tensor
    want_stats: bool

    def run(self, denominator: float | Tensor) -> None:
        """The pass, on top of the gradients that are there."""
        training = self.stepper.training
        training.engine.begin(training.model, 1)
        made = training.method.loss(
            training.model, self.micro_batch, denominator=denominator, want_stats=self.want_stats
        )
        training.engine.backward(made.value)
        self.loss.copy_(made.value.detach())

    def numbers(self) -> dict[str, Tensor]:
        """The loss and the gradients."""
        found = {name: one.grad for name, one in self.built.trained.items() if one.grad is not None}
        return {name: one.clone() for name, one in found.items()} | {"loss": self.loss.clone()}

    def clear(self) -> None:
        """No gradients, and the random numbers of the pass from their beginning."""
        for one in self.built.trained.values():
            if one.grad is not None:
                one.grad.zero_()
        seed_step(0, 0, 0)


def words_in(folder: Path, treatment: str) -> list[str]:
    """The overrides of a treatment; the weights that it begins with are in `folder`."""
    words = TREATMENTS[treatment]
    if set(SAVED) & set(words) and not (folder / "model").is_dir():
        torch.manual_seed(0)
        shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=False)).save_pretrained(
            folder / "model"
        )
    return [word.replace("{folder}", str(folder)) for word in words]


def proven(plan: Plan, *, with_stats: bool = True) -> tuple[str, str, float | None]:
    """(captured, by hand or broken; why; nothing) of a plan's micro-batch, with and without statistics."""
    built, stepper = _built(on_one_process(plan, steps=2))
    found = [_of_pass(built, stepper, stats) for stats in ((False, True) if with_stats else (False,))]
    kind, says = next((one for one in found if one[0] == "broken"), None) or next(
        (one for one in found if one[0] == "by hand"), found[0]
    )
    return kind, says, None


def _built(plan: Plan) -> tuple[Built, Stepper]:
    built = build(plan)
    perturb(built)
    offloader, weights = offloader_of(built), weights_of(built.model)
    if offloader is not None:
        offloader.min_bytes = LOW_BYTES
    for one in (offloader, weights):
        if one is not None and plan.settings.device == "cpu":
            one.travel_by(LazyEngine())
    return built, Stepper(plan, built, online_source(plan, built, Rollouts()))


def _of_pass(built: Built, stepper: Stepper, want_stats: bool) -> tuple[str, str]:
    work, feed = stepper.work(0), stepper.steps.feed
    own = work.micro_batches[0][:SEQUENCES]
    stepper.training.preview(work.sequences, work.micro_batches)
    made, denominator = feed.micro_batch(own).to(stepper.device), work.denominator
    count = torch.full((), denominator, dtype=torch.float64)
    one = Pass(built, stepper, made, count, torch.zeros(()), want_stats)
    for parameter in built.trained.values():
        parameter.grad = None
    seed_step(0, 0, 0)
    one.run(denominator)
    by_numbers = one.numbers()
    if hasattr(made, "norms"):
        one = replace(one, micro_batch=replace(made, norms=made.norms.on_device(stepper.device)))
    one.clear()
    tape = OperatorTape()
    try:
        replay = tape.record(lambda: one.run(count))
    except RuntimeError as error:
        for parameter in built.trained.values():
            parameter.grad = None
        return "by hand", str(error).split("\n")[0]
    try:
        one.clear()
        replay()
        faults = _different(one.numbers(), by_numbers, "on what it recorded")
        _change(one)
        one.clear()
        replay()
        replayed = one.numbers()
    except RuntimeError as error:
        return "broken", f"the replay ended: {str(error).splitlines()[0]}"
    one.clear()
    one.run(count)
    faults += _different(replayed, one.numbers(), "on other tokens")
    if torch.equal(by_numbers["loss"], replayed["loss"]):
        faults.append("the other tokens have the same loss")
    return ("broken", "; ".join(faults)) if faults else ("captured", "")


def _change(one: Pass) -> None:
    """Other tokens and weights of the loss in the same places, other counts, and a pass in between."""
    drawn = torch.Generator().manual_seed(5)
    ids = micro_batch_of(one.micro_batch).input_ids

    def act(tensor: Tensor) -> Tensor:
        if tensor is ids:
            tensor.copy_(torch.randint(*TOKENS, tensor.shape, generator=drawn))
        elif tensor.is_floating_point() and tensor.numel():
            tensor.mul_(1.0 + 0.1 * torch.rand(tensor.shape, generator=drawn, dtype=torch.float64))
        return tensor

    with_tensors(one.micro_batch, act)
    one.count.mul_(1.7)
    method: Any = own_method(one.stepper.training.method)
    for held in (getattr(method, name.name) for name in fields(method) if is_dataclass(method)):
        if isinstance(held, StepCount):
            held.value.mul_(1.3)
        elif isinstance(held, Tensor):
            held.add_(0.1)
    training = one.stepper.training
    with torch.no_grad():
        training.method.loss(training.model, one.micro_batch, denominator=3.0, want_stats=True)


def _different(found: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> list[str]:
    names = [name for name in expected if name not in found or not torch.equal(found[name], expected[name])]
    return [f"{when} other bits in {len(names)} of {len(expected)}: {', '.join(names[:3])}"] if names else []


def section(results: dict[str, Any]) -> list[str]:
    """The section of the page, from the results of each method."""
    cells = [one for part in results.values() for one in part["cells"]]
    if not cells:
        return []
    kinds = Counter(one["kind"] for one in cells)
    made = sorted({f"{part['device']}, {part['date']}, commit {part['commit']}" for part in results.values()})
    most = max(len(one["strategies"]) for one in cells)
    lines = [
        "## Captured passes",
        "",
        "Forward, loss and backward of a micro-batch as a CUDA graph would have them: recorded once, and",
        "replayed on other tokens, weights and counts, by a tape of operators that breaks off where a",
        "capture would; `python benchmarks/exactness.py --captured N`. **Captured**: loss and gradients of",
        "both replays are those of the pass itself, to the bit. **By hand**: no graph repeats the pass, for",
        "the reason below.",
        f"Strategies {('alone', 'alone and in pairs', 'alone, in pairs and in triples')[most - 1]}, and for "
        f"{', '.join(METHODS)} {len(TREATMENTS)} treatments ({'; '.join(TREATMENTS)}). "
        f"{len(cells):,} cells that no plan refuses: **{kinds['captured']:,} captured, "
        f"{kinds['by hand']:,} by hand, {kinds['broken']:,} broken** ({'; '.join(made)}).",
        "",
        "| cells | by hand, since | for example |",
        "|---|---|---|",
    ]
    reasons = Counter(one["says"] for one in cells if one["kind"] == "by hand")
    first: dict[str, str] = {}
    for one in cells:
        first.setdefault(one["says"], f"{one['method']}: {' + '.join(one['strategies'])}")
    lines += [f"| {count:,} | {reason} | {first[reason]} |" for reason, count in reasons.most_common()]
    return [*lines, ""]


def shares(results: dict[str, Any]) -> dict[str, str]:
    """Captured cells of each method, of those that were made."""
    counts = {name: Counter(one["kind"] for one in part["cells"]) for name, part in results.items()}
    return {name: f"{kinds['captured']:,} of {kinds.total():,}" for name, kinds in counts.items()}
