"""A run in which memory runs out goes on as the run in which it did not: the same curve up to rounding."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import sampled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.trainers.build import step
from memtrain.trainers.loop.oom import recover
from memtrain.trainers.optim import step as optim_whole
from memtrain.trainers.runtime import oom_errors as memory_errors

MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 42 bytes. Error code 12"
SMALL = ("train.max_steps=4", "train.micro_batch_size=4", "train.batch_size=8")


class Breaker(TorchDispatchMode):
    """Counts the operators that allocate, and fails at the numbers in `at`, each once.

    `above` bytes: only allocations larger than that count.
    """

    def __init__(self, at: Iterable[int] = (), above: int = 0) -> None:
        super().__init__()
        self.at = set(at)
        self.above = above
        self.count = 0
        self.broken = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if returns and all(one.alias_info is None for one in returns) and self._is_large(made):
            self.count += 1
            if self.count in self.at:
                self.broken += 1
                raise RuntimeError(MESSAGE)
        return made

    def _is_large(self, made: Any) -> bool:
        tensors = made if isinstance(made, tuple | list) else (made,)
        return any(isinstance(one, Tensor) and one.nbytes > self.above for one in tensors)


def break_at(
    monkeypatch: pytest.MonkeyPatch, *at: int, of: str = "step", above: int = 0, rank: int | None = None
) -> Breaker:
    """Let memory run out in the passes of a kind: `step` (forward and backward), `evaluation`, `optimizer`.

    `rank`: on that rank only.
    """
    breaker = Breaker(at, above)
    real = memory_errors.attempt

    def attempt(act: Callable[[], Any], *, is_on: bool = True) -> tuple[Any, bool]:
        import torch.distributed as dist

        here = dist.get_rank() if dist.is_initialized() else 0
        kind = "step" if torch.is_grad_enabled() else "evaluation"
        if rank not in (None, here) or (of != "optimizer" and kind != of):
            return real(act, is_on=is_on)

        def broken() -> Any:
            with breaker:
                return act()

        return real(broken, is_on=is_on)

    places = {"optimizer": optim_whole, "step": step, "evaluation": recover}
    monkeypatch.setattr(places[of], "attempt", attempt)
    return breaker


def losses(folder: Path, kind: str = "step") -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == kind]


def notes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == "note"]


def assert_same_course(folder: Path, undisturbed: Path) -> None:
    assert losses(folder) == pytest.approx(losses(undisturbed), rel=2e-5)
    assert losses(folder, "eval") == pytest.approx(losses(undisturbed, "eval"), rel=2e-5)


@pytest.fixture(scope="module")
def undisturbed(shared_runs) -> Path:
    return shared_runs.done("undisturbed", *SMALL)


@pytest.mark.parametrize("at", [5, 90, 250, 700, 1100])
def test_a_step_that_runs_out_is_made_again(runs, undisturbed: Path, monkeypatch, at: int):
    """Allocations of the forward and backward passes of one step: some 600."""
    breaker = break_at(monkeypatch, at)
    folder = runs.done("broken", *SMALL)
    assert breaker.broken == 1
    assert_same_course(folder, undisturbed)
    assert any("with micro-batches of this size split from now on" in note for note in notes(folder))
    assert "ran out of memory 1 time" in json.loads((folder / "status.json").read_text())["message"]


def test_it_runs_out_again_and_again_down_to_one_sequence_and_its_strategies(
    runs, undisturbed: Path, monkeypatch
):
    """Every attempt of the first step breaks at its tenth allocation, six times."""
    breaker = break_at(monkeypatch, 10, 20, 30, 40, 50, 60)
    options = ("memory.activation_checkpointing=auto", "memory.activation_offloading=auto")
    options += ("memory.never=[streamed_layers]",)  # slices would be a step of their own before these
    folder = runs.done("broken", *SMALL, *options)
    assert breaker.broken == 6
    assert_same_course(folder, undisturbed)
    said = " ".join(notes(folder))
    for words in (
        "every layer is checkpointed",
        "activations are offloaded to CPU",
        "the loss uses chunks of",
    ):
        assert words in said


def test_with_dropout_the_note_says_that_the_parts_draw_anew(runs, monkeypatch):
    break_at(monkeypatch, 90)
    adapter = "model.adapter={kind: lora, r: 4, dropout: 0.2}"
    folder = runs.done("broken", *SMALL, "train.max_steps=1", adapter)
    assert any("dropout masks are drawn again for each part" in note for note in notes(folder))


@pytest.mark.parametrize(
    ("at", "kind"), sampled(itertools.product([1, 17, 40], ["adamw", "adafactor", "muon", "sgd"]), 3)
)
def test_the_optimizer_step_is_whole_or_not_at_all(runs, monkeypatch, kind: str, at: int):
    """Bit for bit: nothing is summed in another order."""
    options = (*SMALL, f"optim.kind={kind}", "optim.weight_decay=0.1", "train.max_steps=2", "eval.max_rows=2")
    undisturbed = runs.done("whole", *options)
    breaker = break_at(monkeypatch, at, of="optimizer")
    folder = runs.done("broken", *options)
    assert breaker.broken == (0 if kind == "sgd" else 1)
    assert losses(folder) == losses(undisturbed)
    assert losses(folder, "eval") == losses(undisturbed, "eval")


def test_the_optimizer_step_with_float32_copies_is_whole_too(runs, monkeypatch):
    options = (*SMALL, "model.dtype=bfloat16", "optim.master_weights=true", "train.max_steps=2")
    undisturbed = runs.done("whole", *options)
    breaker = break_at(monkeypatch, 30, 75, of="optimizer")
    folder = runs.done("broken", *options)
    assert breaker.broken == 2
    assert losses(folder) == losses(undisturbed)


def test_an_evaluation_that_runs_out_takes_fewer_rows(runs, undisturbed: Path, monkeypatch):
    breaker = break_at(monkeypatch, 40, of="evaluation")
    folder = runs.done("broken", *SMALL)
    assert breaker.broken == 1
    assert_same_course(folder, undisturbed)
    assert any(note.startswith("evaluation ran out of memory") for note in notes(folder))


def test_what_was_learned_outlives_the_process(runs, monkeypatch):
    """The run that is continued splits as the run that never stopped: the same bits."""
    with monkeypatch.context() as patch:
        break_at(patch, 250)
        whole = runs.done("whole", *SMALL, "save.every_steps=2")
    with monkeypatch.context() as patch:
        break_at(patch, 250)
        folder = runs.done("cut", *SMALL, "save.every_steps=2")
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    runs.done("cut", *SMALL, "save.every_steps=2")
    assert losses(folder)[-2:] == losses(whole)[-2:]


def test_when_nothing_helps_the_last_whole_step_is_saved_and_the_ways_out_are_reported(runs, monkeypatch):
    breaker = break_at(monkeypatch, *range(2000, 10**5))
    ended = runs.run("broken", *SMALL, "train.max_steps=40")
    assert ended.code == 7, ended.err
    assert breaker.broken > 3
    folder = runs.folder / "broken"
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{len(losses(folder)):06d}"
    assert "the largest owners: " in ended.err
    assert "is saved; " in ended.err
    assert "(peak " in ended.err


def test_recovery_can_be_switched_off(runs, monkeypatch):
    break_at(monkeypatch, 250)
    ended = runs.run("broken", *SMALL, "memory.oom_recovery=off")
    assert ended.code == 7
    assert "ran out of memory" in ended.err


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert memory_errors.is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    )
    assert memory_errors.is_out_of_memory(RuntimeError(MESSAGE))
    assert not memory_errors.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("at", sampled([60, 420]))
def test_a_failure_on_one_of_two_ranks_is_met_by_both(runs, monkeypatch, at: int):
    """One fails in its first micro-batch, while the other goes on, and in the last backward pass."""
    for child in runs.fork_ranks("undisturbed", 2, *SMALL):
        assert child.wait() == 0, child.said
    break_at(monkeypatch, at, rank=1)
    for child in runs.fork_ranks("broken", 2, *SMALL):
        assert child.wait() == 0, child.said
    assert_same_course(runs.folder / "broken", runs.folder / "undisturbed")
    assert any("the step was repeated" in note for note in notes(runs.folder / "broken"))


ONLINE = """
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 40}}}}
length: {{max_length: 128}}
generate: {{num_generations: 4, max_tokens: 10}}
rewards: {{functions: ["{rewards}:short"]}}
train: {{batch_size: 16, micro_batch_size: 8, max_steps: 3}}
save: {{every_steps: 3}}
log: {{every_steps: 1}}
cluster: {{device: cpu, threads: 1, engine: ddp}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "online_dpo", "ppo"])
def test_an_update_on_completions_that_runs_out_on_one_of_two_ranks_is_made_again(
    runs, monkeypatch, method: str
):
    recipe = runs.folder / f"{method}.yaml"
    rewards = runs.folder / "rewards.py"
    rewards.write_text("def short(completions):\n    return [-len(text) / 50 for text in completions]\n")
    recipe.write_text(ONLINE.format(method=method, rewards=rewards))
    asked = {"verb": method.replace("_", "-"), "recipe": str(recipe)}
    for child in runs.fork_ranks("undisturbed", 2, **asked):
        assert child.wait() == 0, child.said
    break_at(monkeypatch, 60, rank=1)
    for child in runs.fork_ranks("broken", 2, **asked):
        assert child.wait() == 0, child.said
    # Losses of GRPO's first updates are nothing but rounding: advantages sum to 0.
    broken, undisturbed = (losses(runs.folder / name) for name in ("broken", "undisturbed"))
    assert broken == pytest.approx(undisturbed, rel=2e-5, abs=1e-6)
    assert any("was repeated" in note for note in notes(runs.folder / "broken"))
