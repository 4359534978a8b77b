"""What each way to train bfloat16 weights learns: held-out loss after equal steps, against float32.

    MEMTRAIN_DATA=DIR python benchmarks/precision_learns.py [--steps 30] [--lr 1e-5]   (a core, ten minutes)

DIR holds tinyshakespeare/ and gsm8k/. A Llama of 11 million weights is trained on Shakespeare's bytes
in float32, as the model that users begin with; then every way below fine-tunes a bfloat16 copy of it on
questions and answers of GSM8K: the same batches, the same AdamW. The result goes to
benchmarks/results/precision_learns.json.

Kahan's sum is no strategy of memtrain: it is here to be measured beside them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain.trainers.optim.build import clip_gradients
from memtrain.trainers.optim.compressed_moments import CompressedMoments
from memtrain.trainers.optim.master_weights import MasterWeights

RESULT = Path(__file__).parent / "results" / "precision_learns.json"
CONFIG: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 4, 128
START_STEPS, START_LR = 40, 1e-3
BETAS, CLIP = (0.9, 0.999), 1.0


@dataclass(frozen=True)
class Way:
    """One way to train."""

    name: str
    bytes_a_weight: float
    """Weights, copies and moments; not gradients."""
    make: Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16


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

    stays = False

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

    def begin_step(self) -> None:
        """Nothing to do."""


def kahan(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW with compensated sums."""
    groups = [{"params": parameters, "weight_decay": 0.0}]
    made = MasterWeights(groups, lambda given: adamw(given, lr), lr, form="split")
    made.form = Kahan(parameters)
    return made


WAYS = (
    Way("float32", 12, adamw, torch.float32),
    Way("float32 copies", 14, wide("float32")),
    Way("pure bfloat16", 6, adamw),
    Way("split copies", 12, wide("split")),
    Way("stochastic rounding", 10, wide("stochastic")),
    Way("split copies, 8-bit moments", 6.25, wide("split", compress=True)),
    Way("stochastic rounding, 8-bit moments", 4.25, wide("stochastic", compress=True)),
    Way("split copies, 8-bit moments, drawn", 6.25, wide("split", compress=True, draws=True)),
    Way("Kahan sums", 12, kahan),
)


@dataclass(frozen=True)
class Learnt:
    """What a way learnt."""

    name: str
    bytes_a_weight: float
    held_out_loss: float
    """Of the bfloat16 weights, as they would be saved."""
    loss_of_numbers: float
    """Of the float32 numbers that the optimizer steps, where it has any; else as above."""
    against_float32: float
    """Share by which its loss is above float32's."""
    of_what_float32_learns: float
    """Its fall of the loss over float32's."""
    moved: float
    """Share of weights that are not where they began."""
    along_float32: float
    """Projection of its move on float32's, over the length of that."""
    seconds: float
    """CPU time of its steps."""


def batches(path: Path, count: int, *, seed: int) -> Iterator[Tensor]:
    """[ROWS, LENGTH] bytes from random places of a text."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts.tolist()]).long()


def trained(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, work: Iterator[Tensor]
) -> LlamaForCausalLM:
    """The model after a step on each batch."""
    parameters = list(model.parameters())
    for ids in work:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_gradients(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


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


def measured(data: Path, steps: int, lr: float, ways: tuple[Way, ...]) -> Iterator[dict[str, Any]]:
    """Every way from the same start; what is known so far, after each."""
    torch.manual_seed(0)
    start = LlamaForCausalLM(LlamaConfig(max_position_embeddings=LENGTH, **CONFIG))
    text, target = parted(data)
    optimizer = adamw(list(start.parameters()), START_LR)
    trained(start, optimizer, batches(text, START_STEPS, seed=1))
    start.bfloat16()
    began, held_out = flat(start), list(batches(target["held out"], 8, seed=2))
    before = loss_of(start, held_out)
    learnt: list[Learnt] = []
    move, after = Tensor(), before
    for way in ways:
        model = copy.deepcopy(start).to(way.dtype)
        cpu = time.process_time()
        optimizer = way.make(list(model.parameters()), lr)
        trained(model, optimizer, batches(target["train"], steps, seed=3))
        seconds = time.process_time() - cpu
        loss, gone = loss_of(model, held_out), flat(model) - began
        if way.dtype == torch.float32:
            move, after = gone, loss
        learnt.append(
            Learnt(
                way.name,
                way.bytes_a_weight,
                round(loss, 5),
                round(loss_of(numbers_of(model, optimizer), held_out), 5),
                round(loss / after - 1, 6),
                round((before - loss) / (before - after), 4),
                round(float((gone != 0).double().mean()), 4),
                round(float(gone @ move / (move @ move)), 4),
                round(seconds, 1),
            )
        )
        yield {
            "what": "held-out loss after equal steps of AdamW",
            "weights": began.numel(),
            "steps": steps,
            "lr": lr,
            "tokens_a_step": ROWS * LENGTH,
            "before": round(before, 5),
            "ways": [asdict(one) for one in learnt],
        }


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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--first", type=int, default=len(WAYS), help="measure the first so many ways")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asks = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asks, capture_output=True, text=True, check=False)
    told = {
        "command": f"python benchmarks/precision_learns.py --steps {asked.steps} --lr {asked.lr:g}",
        "commit": commit.stdout.strip(),
        "device": f"one core of a CPU with AVX-512 BF16, torch {torch.__version__}",
    }
    for found in measured(Path(os.environ["MEMTRAIN_DATA"]), asked.steps, asked.lr, WAYS[: asked.first]):
        print(found["ways"][-1], flush=True)
        RESULT.write_text(json.dumps(told | found, indent=1) + "\n")
    print(f"wrote {RESULT}")


if __name__ == "__main__":
    main()
