"""What each way to train bfloat16 weights learns: held-out loss after equal steps, against float32.

    MEMTRAIN_DATA=DIR python benchmarks/precision_learns.py [--steps 200] [--lr 1e-5]   (a core, 20 minutes)

DIR holds tinyshakespeare/ and gsm8k/. A Llama of 25 million weights is trained on Shakespeare's bytes
in float32, as the model that users begin with; then every way below fine-tunes a bfloat16 copy of it on
questions and answers of GSM8K: the same batches, the same AdamW. The loss is taken at several steps, of the
float32 numbers that are stepped and of the bfloat16 weights that are saved: float32's are rounded for it. The
result goes to benchmarks/results/precision_learns.json.

Kahan's sum is no strategy of memtrain: it is here to be measured beside them.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from result_files import write_result
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.trainers.optim.compressed_moments import CompressedMoments
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.step import clip_gradients

RESULT = Path(__file__).parent / "results" / "precision_learns.json"
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 4, 128
START_STEPS, START_LR = 40, 1e-3
BETAS, CLIP = (0.9, 0.999), 1.0
MARKS = (30, 60, 100, 150)
"""Steps after which the loss is taken, beside the last."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    bytes_a_weight: float
    """Weights, copies and moments; not gradients."""
    make: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16
    most_steps: int = 60
    """Steps at most, to spare time: float32 and the default make all that are asked for."""


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """torch's own, with its fused kernel."""
    return torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)


def wide(form: str, *, compress: bool = False, draws: bool = False) -> Callable[..., torch.optim.Optimizer]:
    """AdamW over float32 numbers of bfloat16 weights, which wait as `form`."""

    def make(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        generator = torch.Generator().manual_seed(0) if draws else None

        def build(groups: Any) -> torch.optim.Optimizer:
            inner = adamw(groups, lr)
            return CompressedMoments(inner, generator) if compress else inner

        return MasterWeights([{"params": parameters, "weight_decay": 0.0}], build, lr, form=form)

    return make


class Kahan:
    """What a weight has lost beside it, in bfloat16: compensated sums."""

    name, stays = "kahan", False

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._lost = {one: torch.zeros_like(one) for one in parameters}

    def take(self, parameter: Tensor) -> Tensor:
        """The weight, and what it lost."""
        return parameter.float() + self._lost[parameter].float()

    def give(self, parameter: Tensor, copy: Tensor) -> None:
        """Round, and keep the difference, rounded."""
        parameter.copy_(copy)
        self._lost[parameter].copy_(copy - parameter.float())

    def held(self, parameter: Tensor) -> dict[str, Tensor]:
        """Nothing is saved here."""
        return {}

    def load(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Nothing is loaded here."""

    def follow(self, parameter: Tensor) -> None:
        """Nothing is lost yet."""
        self._lost[parameter].zero_()


def kahan(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW with compensated sums."""
    groups = [{"params": parameters, "weight_decay": 0.0}]
    made = MasterWeights(groups, lambda given: adamw(given, lr), lr, form="split")
    made.form = Kahan(parameters)
    return made


WAYS = (
    Way("float32", 12, adamw, torch.float32, most_steps=10_000),
    Way("float32 copies", 14, wide("float32"), most_steps=10_000),
    Way("pure bfloat16", 6, adamw),
    Way("split copies", 12, wide("split"), most_steps=30),
    Way("stochastic rounding", 10, wide("stochastic")),
    Way("split copies, 8-bit moments", 6.25, wide("split", compress=True)),
    Way("stochastic rounding, 8-bit moments", 4.25, wide("stochastic", compress=True)),
    Way("split copies, 8-bit moments, drawn", 6.25, wide("split", compress=True, draws=True), most_steps=30),
    Way("Kahan sums", 12, kahan, most_steps=30),
)


@dataclass(frozen=True)
class Learnt:
    """What a way has learnt after so many steps."""

    step: int
    loss_of_weights: float
    """Held-out loss of bfloat16 weights, as they would be saved; float32's are rounded."""
    loss_of_numbers: float
    """Of the float32 numbers that the optimizer steps, where it has any; else as above."""
    weights_against_float32: float
    """Share by which the loss of its bfloat16 weights is above that of float32 training's own weights."""
    numbers_against_float32: float
    """The same of its float32 numbers."""
    share_learnt: float
    """Fall of the loss of its bfloat16 weights over that of float32's own weights."""
    moved: float
    """Share of weights that are not where they began."""
    along_float32: float
    """Projection of its weights' move on float32's, over the length of that."""


def batches(path: Path, count: int, *, seed: int) -> Iterator[Tensor]:
    """[ROWS, LENGTH] bytes from random places of a text."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()


def trained(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, work: Iterator[Tensor]
) -> Iterator[int]:
    """The number of steps made, after a step on each batch."""
    parameters = list(model.parameters())
    for number, ids in enumerate(work, start=1):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_gradients(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield number


@torch.no_grad()
def loss_of(model: nn.Module, held_out: list[Tensor]) -> float:
    """Mean loss of held-out batches: the weights as they are, computed in float32."""
    wide_model = copy.deepcopy(model).float()
    losses = [wide_model(input_ids=ids, labels=ids, use_cache=False).loss for ids in held_out]
    return float(torch.stack(losses).mean())


def numbers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The model with what the optimizer steps in place of its rounded weights."""
    if not isinstance(optimizer, MasterWeights):
        return model
    made = copy.deepcopy(model).float()
    with torch.no_grad():
        for number, weight in zip(made.parameters(), model.parameters(), strict=True):
            number.copy_(optimizer.form.take(weight))
    return made


def flat(model: nn.Module) -> Tensor:
    """All weights end to end, in float32."""
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def rounded(model: nn.Module) -> nn.Module:
    """The model with bfloat16 weights."""
    return copy.deepcopy(model).bfloat16()


@dataclass(frozen=True)
class Float32:
    """Float32's own weights after some steps: what the others are held against."""

    loss: float
    move: Tensor


def loss_tokens(
    step: int,
    model: nn.Module,
    numbers: nn.Module,
    began: Tensor,
    before: float,
    held_out: list[Tensor],
    of_float32: Float32,
) -> Learnt:
    """What a model has learnt, beside float32 after as many steps."""
    saved = rounded(model)
    weights, stepped = loss_of(saved, held_out), loss_of(numbers, held_out)
    gone = flat(saved) - began
    return Learnt(
        step,
        round(weights, 5),
        round(stepped, 5),
        round(weights / of_float32.loss - 1, 6),
        round(stepped / of_float32.loss - 1, 6),
        round((before - weights) / (before - of_float32.loss), 4),
        round(float((gone != 0).double().mean()), 4),
        round(float(gone @ of_float32.move / (of_float32.move @ of_float32.move)), 4),
    )


def measured(data: Path, steps: int, lr: float, ways: tuple[Way, ...]) -> Iterator[dict[str, Any]]:
    """Every way from the same start; what is known so far, after each step that is looked at."""
    torch.manual_seed(0)
    start = LlamaForCausalLM(LlamaConfig(max_position_embeddings=LENGTH, **CONFIG))
    text, target = parted(data)
    optimizer = adamw(list(start.parameters()), START_LR)
    for _ in trained(start, optimizer, batches(text, START_STEPS, seed=1)):
        pass
    start.bfloat16()
    began, held_out = flat(start), list(batches(target["held out"], 8, seed=2))
    before = loss_of(start, held_out)
    float32: dict[int, Float32] = {}
    reported: list[dict[str, Any]] = []
    for way in ways:
        model = copy.deepcopy(start).to(way.dtype)
        optimizer = way.make(list(model.parameters()), lr)
        one: dict[str, Any] = {"name": way.name, "bytes_a_weight": way.bytes_a_weight, "after": []}
        reported.append(one)
        last = min(steps, way.most_steps)
        cpu = time.process_time()
        for step in trained(model, optimizer, batches(target["train"], last, seed=3)):
            if step != last and step not in MARKS:
                continue
            one["seconds"] = round(one.get("seconds", 0) + time.process_time() - cpu, 1)
            if way.dtype == torch.float32:
                float32[step] = Float32(loss_of(model, held_out), flat(model) - began)
            numbers = numbers_of(model, optimizer)
            found = loss_tokens(step, model, numbers, began, before, held_out, float32[step])
            one["after"].append(asdict(found))
            yield {
                "what": "held-out loss after equal steps of AdamW",
                "weights": began.numel(),
                "lr": lr,
                "tokens_a_step": ROWS * LENGTH,
                "before": round(before, 5),
                "ways": reported,
            }
            cpu = time.process_time()


def parted(data: Path) -> tuple[Path, dict[str, Path]]:
    """The text to begin with, and that to learn: nine tenths, and one that is held out."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    first = max((data / "tinyshakespeare").glob("*"), key=lambda file: file.stat().st_size)
    second = max((data / "gsm8k").glob("*"), key=lambda file: file.stat().st_size)
    text = second.read_bytes()
    cut = len(text) * 9 // 10
    parts = {"train": text[:cut], "held out": text[cut:]}
    made = {name: folder / f"precision_learns_{name.replace(' ', '_')}.bin" for name in parts}
    for name, part in parts.items():
        made[name].write_bytes(part)
    return first, made


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--first", type=int, default=len(WAYS), help="measure the first so many ways")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asks = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asks, capture_output=True, text=True, check=False)
    reported = {
        "command": f"python benchmarks/precision_learns.py --steps {asked.steps} --lr {asked.lr:g}",
        "commit": commit.stdout.strip(),
        "device": f"one core of a CPU with AVX-512 BF16, torch {torch.__version__}",
    }
    for found in measured(Path(os.environ["MEMTRAIN_DATA"]), asked.steps, asked.lr, WAYS[: asked.first]):
        print(found["ways"][-1]["name"], found["ways"][-1]["after"][-1], flush=True)
        write_result(RESULT, reported | found)
    print(f"wrote {RESULT}")


if __name__ == "__main__":
    main()
