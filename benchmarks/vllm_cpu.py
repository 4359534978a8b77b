"""The vLLM process on a CPU beside the native sampler: start, push, completions, a kill; `-o` writes JSON.

Run with an interpreter that has vLLM: python benchmarks/vllm_cpu.py ~/envs/vllm/bin/python -o FILE
Wall times on a shared machine say little; CPU seconds of the engine's process and equal tokens say more.
"""

import argparse
import os
import platform
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from result_files import text_of, write_result
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.vllm.process import Launch
from memtrain.trainers.online.vllm.sampler import VllmSampler
from memtrain.trainers.online.vllm.weight_sync import open_transport

GREEDY = Sampling(max_tokens=32, temperature=0.0)
SAMPLED = Sampling(max_tokens=64)
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
    "block_size": 32,
    "logprobs_mode": "processed_logprobs",
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
    "generation_config": "vllm",
    "disable_log_stats": True,
}


def tiny() -> torch.nn.Module:
    """Qwen3-shaped, 2 layers, width 256, 1,024 tokens, head tied; sure of itself."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def cpu_seconds(pid: int) -> float:
    """Of a process until now."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def timed(act: Any, pid: int | None = None) -> tuple[Any, dict[str, float]]:
    """(what `act` made, wall and CPU seconds of this process or another)."""
    wall, cpu = time.perf_counter(), cpu_seconds(pid or os.getpid())
    made = act()
    return made, {
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(cpu_seconds(pid or os.getpid()) - cpu, 2),
    }


def tokens(made: list[list[Sample]]) -> list[tuple[int, ...]]:
    return [sample.token_ids for group in made for sample in group]


def agreement(mine: list[list[Sample]], theirs: list[list[Sample]]) -> dict[str, Any]:
    """Equal completions, and how far their log-probs are apart where they are equal."""
    pairs = list(zip([s for g in mine for s in g], [s for g in theirs for s in g], strict=True))
    equal = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    apart = [abs(x - y) for a, b in equal for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return {"equal": len(equal), "of": len(pairs), "largest_difference_nats": max(apart, default=None)}


def measure(python: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = tiny()
    model.config.save_pretrained(folder)
    lengths = [40 + number * 50 // 31 for number in range(32)]
    groups = [
        Group(tuple(torch.randint(3, 1000, (length,)).tolist()), 4, 1000 + number)
        for number, length in enumerate(lengths)
    ]
    ones = [Group(group.prompt_ids, 1, group.seed) for group in groups]
    version = [0]
    sampler = VllmSampler(
        model=model,
        launch=Launch(
            python,
            ENGINE | {"model": str(folder)},
            folder / "log.txt",
            120.0,
            600.0,
            {"OMP_NUM_THREADS": "1"},
        ),
        transport=open_transport(folder, 256 * 2**20, torch.device("cpu"), is_same_device=True),
        version=lambda: version[0],
        emit=lambda text: None,
        sleep_level=0,
        restarts=1,
        fallback=None,
        limit=0.3,
    )
    native = NativeSampler(model, AttentionBackend.TORCH_CPU, max_rows=128)  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    began = time.perf_counter()
    first = sampler.generate(ones, GREEDY)
    assert sampler.process is not None
    found["start_push_and_first_rollout"] = {
        "wall_s": round(time.perf_counter() - began, 2),
        "engine_cpu_s": round(cpu_seconds(sampler.process.pid), 2),
    }
    found["engine_rss_mib"] = psutil.Process(sampler.process.pid).memory_info().rss >> 20
    found["engine"] = sampler.process.about["vllm"]
    found["greedy_against_native"] = agreement(native.generate(ones, GREEDY), first)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found["greedy_with_stale_weights"] = agreement(
        native.generate(ones, GREEDY), sampler.generate(ones, GREEDY)
    )
    version[0] = 1
    process = sampler.process
    _, found["push"] = timed(lambda: sampler._sync(process), process.pid)
    found["greedy_after_a_push"] = agreement(native.generate(ones, GREEDY), sampler.generate(ones, GREEDY))
    undisturbed, found["128_completions_of_64_vllm"] = timed(
        lambda: sampler.generate(groups, SAMPLED), sampler.process.pid
    )
    _, found["128_completions_of_64_native"] = timed(lambda: native.generate(groups, SAMPLED))
    seen: list[int] = []

    def kill(number: int, samples: list[Sample]) -> None:
        seen.append(number)
        if len(seen) == 8 and sampler.process is not None:
            os.kill(sampler.process.pid, signal.SIGKILL)

    began = time.perf_counter()
    survived = sampler.generate(groups, SAMPLED, kill)
    found["killed_after_8_groups"] = {
        "wall_s": round(time.perf_counter() - began, 2),
        "samples_are_identical": tokens(survived) == tokens(undisturbed),
        "groups_delivered_once": sorted(seen) == list(range(len(groups))),
    }
    sampler.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", help="an interpreter with vLLM")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked.python, Path(folder))
    load = os.getloadavg()[0]
    about = {
        "device": f"{platform.machine()} CPU, one thread each, load {load:.1f}",
        "torch": torch.__version__,
        "model": "Qwen3-shaped, 2 layers, width 256, vocabulary 1,024, float32, tied",
        "prompts": "32 of 40 to 88 tokens",
    }
    made = {"about": about, "found": found}
    print(text_of(made), end="")
    if asked.output:
        write_result(asked.output, made)


if __name__ == "__main__":
    main()
