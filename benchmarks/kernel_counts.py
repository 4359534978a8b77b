"""Kernels of a micro-batch and of a decoded token, by where they come from.

    python benchmarks/kernel_counts.py [--only NAME ...]     writes benchmarks/results/kernel_counts.json
    python benchmarks/kernel_counts.py --before              also keeps the totals as those of before

Counted on a CPU: the operators that torch dispatches in the worker's own step, on tensors without data, for
Qwen3-0.6B with all 28 layers and the settings of its plan for an H100; in decoding on a narrow model as deep.
An operator that only makes a view or an empty tensor starts nothing and is not counted; every other one is a
kernel at least (a product may be split, a sort takes several). A `foreach` or fused operator counts once.
Liger's cases need `liger-kernel` and `triton`, whose kernels are counted as they are launched; nothing runs.
Those of QLoRA need `bitsandbytes`: unpacking a weight counts as three kernels, for its allocations are three.
"""

from __future__ import annotations

import argparse
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from plans_against_traces import recipe_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from turns import where, write

from memtrain.cli.plan.lookup import LookedAt, facts_without_data
from memtrain.memory.estimate.pricing import heaviest
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.planner.resolve import resolve
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.decoding import Decoder
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling
from memtrain.trainers.runtime.operator_tape import OperatorTape
from memtrain.trainers.tools.trace.fake_cuda import replaced
from memtrain.trainers.tools.trace.fake_model import fakeify
from memtrain.trainers.tools.trace.liger import as_fake_liger
from memtrain.trainers.tools.trace.operator_rules import with_operator_rules
from memtrain.trainers.tools.trace.setup import build_step
from memtrain.trainers.tools.trace.steps import one_step
from memtrain.trainers.tools.trace.trace import Job, bare_models

FREE = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "promote_types",
    "resize_",
    "set_",
}
"""Operators that start no kernel, beside views and those of no tensor."""
SYNCS = ("_local_scalar_dense", "nonzero")
"""Operators that the host waits for."""
LORA = {"model": {"adapter": {"r": 16}}}
CASES: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "lora, checkpointed": LORA | {"memory": {"activation_checkpointing": "on"}},
    "lora, liger": {"model": {"adapter": {"r": 16}, "liger": "on"}},
    "qlora": {"model": {"adapter": {"r": 16}, "quantize": "4bit"}},
    "qlora, checkpointed": {
        "model": {"adapter": {"r": 16}, "quantize": "4bit"},
        "memory": {"activation_checkpointing": "on"},
    },
    "full": {},
    "full, checkpointed": {"memory": {"activation_checkpointing": "on"}},
    "full, liger": {"model": {"liger": "on"}},
    "lora, liger, checkpointed": {
        "model": {"adapter": {"r": 16}, "liger": "on"},
        "memory": {"activation_checkpointing": "on"},
    },
    "full, liger, checkpointed": {
        "model": {"liger": "on"},
        "memory": {"activation_checkpointing": "on"},
    },
}
"""Recipes of one micro-batch of 16,384 tokens."""
NEEDS = {"liger": "triton", "qlora": "bitsandbytes"}
"""Packages that cases need, by a word of their names."""
DECODE_TOKENS = 257


class KernelCount(TorchDispatchMode):
    """Counts kernels by (phase, source, operator), and waits of the host.

    In the backward pass a kernel belongs to the part whose forward pass made its node.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.num_syncs = 0
        self._inside = ["other"]
        self._made: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::"):
            self.num_syncs += name.removeprefix("aten::") in SYNCS
            if not func.is_view:
                self.add(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def add(self, name: str) -> None:
        """Count a kernel here."""
        if name not in FREE and not name.startswith("sym_"):
            self.counts[*self._here(), name] += 1

    def enter(self, part: str) -> None:
        """From now on kernels are of this part."""
        self._inside.append(part)
        self._note()

    def leave(self) -> None:
        """The part is over."""
        self._inside.pop()
        self._note()

    def table(self) -> list[dict[str, Any]]:
        """Rows of (phase, source, kernels), the largest first."""
        sums: Counter[tuple[str, str]] = Counter()
        for (phase, source, _), number in self.counts.items():
            sums[phase, source] += number
        return [
            {"phase": phase, "source": source, "kernels": number}
            for (phase, source), number in sums.most_common()
        ]

    def _here(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return self.phase, self._inside[-1]
        if len(self._inside) > 1:
            return "recomputed", self._inside[-1]
        at = bisect_right(self._made, node._sequence_nr(), key=lambda one: one[0])
        return "backward", self._made[at - 1][1] if at else "other"

    def _note(self) -> None:
        self._made.append((torch.autograd._get_sequence_nr(), self._inside[-1]))


def part_of(name: str, module: nn.Module) -> str | None:
    """The kind of part that a module is."""
    last, kind = name.rsplit(".", 1)[-1], type(module).__name__
    if last == "lm_head":
        return "head and loss"
    if "lora_" in name or hasattr(module, "lora_A"):
        return "adapters"
    for found, part in (("Norm", "norms"), ("Rotary", "rotary"), ("Attention", "attention"), ("MLP", "mlp")):
        if found in kind:
            return part
    if kind.endswith("DecoderLayer"):
        return "residuals"
    return "linear maps" if isinstance(module, nn.Linear) else None


def watch(model: nn.Module, counter: KernelCount) -> None:
    """Tell the counter which part is at work. A frozen map under an adapter is the adapter's: the two are one
    product where nothing hooks the map."""
    for name, module in model.named_modules():
        part = part_of(name, module)
        if part is not None and not name.endswith(".base_layer"):
            module.register_forward_pre_hook(lambda module, inputs, part=part: counter.enter(part))
            module.register_forward_hook(lambda module, inputs, output: counter.leave(), always_call=True)


@contextmanager
def counted_launches(counter: KernelCount) -> Iterator[None]:
    """Triton's launches are counted and do nothing."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import KernelInterface  # type: ignore[import-not-found]

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: counter.add(f"triton: {kernel.__name__}")

    with replaced(KernelInterface, "__getitem__", launch):
        yield


def micro_batch(form: dict[str, Any]) -> dict[str, Any]:
    """Kernels of one micro-batch, and of the update after it."""
    config = dict(known_config("qwen3-0.6b") or {})
    recipe = recipe_of(form)
    asked = SourcedRecipe(recipe, lambda key: "default")
    found = resolve(asked, facts_without_data(asked, LookedAt(config), Hardware.named("h100", 1)))
    settings = found.settings
    job = Job(recipe, settings, config, heaviest(settings, found.case.facts))
    counter = KernelCount()
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        with_operator_rules(settings.device, skips_tiles=False),
        as_fake_liger(settings),
        counted_launches(counter),
    ):
        with unset_fake_temporarily():
            cast = bare_models(job, "meta")
        for model in cast.models:
            fakeify(model)
        cast = replace(
            cast,
            micro_batches=[with_tensors(micro_batch, mode.from_tensor) for micro_batch in cast.micro_batches],
        )
        stage = build_step(cast.model, cast.copy, recipe, settings, cast.micro_batches, is_fake=True)
        watch(cast.model, counter)
        one_step(stage, want_stats=False)
        counter.counts.clear()

        def enter(phase: str) -> None:
            counter.phase = "update" if phase in ("exchange", "optimizer", "end") else "forward"

        with counter:
            one_step(stage, want_stats=False, enter=enter)
    table = counter.table()
    update = sum(row["kernels"] for row in table if row["phase"] == "update")
    return {
        "micro_batch": sum(row["kernels"] for row in table) - update,
        "update": update,
        "syncs": counter.num_syncs,
        "tokens": job.batch.tokens,
        "loss_chunk_size": settings.loss_tile_bytes,
        "checkpoint_every": settings.checkpoint_every,
        "liger": settings.liger,
        "by_source": table,
    }


def decoded_token() -> dict[str, Any]:
    """Kernels of a token of 8 rows, as they are started one by one, and with recorded passes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    narrow = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=128, head_dim=16, num_hidden_layers=28, **narrow))
    model.to(torch.bfloat16).eval()
    groups = [Group((5, 9, 2, 11), 4, seed=1), Group((3, 7), 4, seed=2)]
    found: dict[str, Any] = {}
    plain_look, plain_write = Decoder._fetched, Decoder.write
    for name, tape in (("started one by one", None), ("recorded", OperatorTape())):
        counter, looks = KernelCount(), [0]
        graphs = None if tape is None else DecodeGraphs(lambda tape=tape: tape, print)
        sampler = NativeSampler(model, AttentionBackend.TORCH_CPU, 8, tokens_per_sync=8, graphs=graphs)

        def look(self: Decoder, *args: Any, looks: list[int] = looks) -> Any:
            looks[0] += 1
            return plain_look(self, *args)

        def written(self: Decoder, *args: Any, counter: KernelCount = counter) -> Any:
            with counter:
                return plain_write(self, *args)

        with replaced(Decoder, "_fetched", look), replaced(Decoder, "write", written):
            sampler.generate(groups, Sampling(max_tokens=DECODE_TOKENS))
        passes = DECODE_TOKENS - 1
        found[name] = {
            "kernels_a_token": round(sum(counter.counts.values()) / passes, 1),
            "looks_of_the_host": looks[0],
            "tokens": DECODE_TOKENS,
        }
        if tape is not None:
            # A start computes again what the tape holds; on a GPU it is one launch.
            found[name] |= {"recordings": tape.num_records, "starts": tape.num_starts}
    return found


def main() -> None:
    """Count, tell and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", help="some of the cases; the others' figures stay")
    parser.add_argument("--before", action="store_true", help="note the totals as those of before")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    path = asked.output or Path(__file__).parent / "results" / "kernel_counts.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    result = where("python benchmarks/kernel_counts.py", "peft")
    result |= {"before": known.get("before", {}), "cases": known.get("cases", {})}
    for name, form in CASES.items():
        if asked.only and name not in asked.only:
            continue
        missing = [package for word, package in NEEDS.items() if word in name and find_spec(package) is None]
        if missing:
            print(f"{name}: not counted, {missing[0]} is not installed")
            continue
        made = micro_batch(form) | {"commit": result["commit"], "versions": result["versions"]}
        result["cases"][name] = made
        print(f"{name}: {made['micro_batch']:,} a micro-batch, {made['update']:,} an update", flush=True)
        for row in made["by_source"]:
            print(f"  {row['phase']:<12}{row['source']:<16}{row['kernels']:>6,}")
    if not asked.only or "decode" in asked.only:
        result["cases"]["decode"] = decoded_token() | {"commit": result["commit"]}
        print("decode", json.dumps(result["cases"]["decode"]))
    if asked.before:
        result["before"] = {"at": result["commit"]} | {
            name: {key: value for key, value in case.items() if key != "by_source"}
            for name, case in result["cases"].items()
        }
    write("kernel_counts", result, asked.output)


if __name__ == "__main__":
    main()
