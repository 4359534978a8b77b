"""The real vLLM engine on a CPU: the native sampler's tokens, new weights, faults, a server, and a whole run.

`make test-vllm` makes its environment and runs these; MEMTRAIN_VLLM_PYTHON names an interpreter with vLLM.
"""

import json
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.cli.commands.train import run_recipe
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.vllm.process import Launch
from memtrain.trainers.online.vllm.sampler import VllmSampler
from memtrain.trainers.online.vllm.server_sampler import ServerSampler
from memtrain.trainers.online.vllm.weight_sync import Transport
from memtrain.trainers.runtime.ranks import Ranks

PYTHON = os.environ.get("MEMTRAIN_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="needs vLLM: `make test-vllm`, or MEMTRAIN_VLLM_PYTHON=an interpreter with it"
    ),
]

GREEDY = Sampling(max_tokens=24, temperature=0.0)
ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 32 * 2**20,
    "block_size": 32,
    "logprobs_mode": "processed_logprobs",
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 2048,
    "generation_config": "vllm",
    "disable_log_stats": True,
}


def prompts() -> list[tuple[int, ...]]:
    """Longer than a block of keys, so that a stale prefix cache would show."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return [tuple(torch.randint(3, 250, (40 + 3 * i,)).tolist()) for i in range(8)]


def groups(count: int) -> list[Group]:
    return [Group(prompt, count, seed=1000 + i) for i, prompt in enumerate(prompts())]


def model_of(*, tied: bool, vocabulary: int = 256) -> torch.nn.Module:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)  # Sure of itself: no ties.
    return model


def move(model: torch.nn.Module) -> None:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(9)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def native(model: torch.nn.Module) -> NativeSampler:
    return NativeSampler(model, AttentionBackend.TORCH_CPU, max_rows=64)


def tokens(made: list[list[Sample]]) -> list[tuple[int, ...]]:
    return [sample.token_ids for group in made for sample in group]


def logprobs(made: list[list[Sample]]) -> torch.Tensor:
    return torch.tensor([x for group in made for sample in group for x in sample.logprobs])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def engine(request, tmp_path_factory):
    """(sampler, its model, a list whose only item is the version)."""
    folder = tmp_path_factory.mktemp("vllm")
    model = model_of(tied=request.param)
    model.config.save_pretrained(folder)
    version = [0]
    (folder / "weights").mkdir()
    sampler = VllmSampler(
        model=model,
        launch=Launch(
            python=PYTHON,
            engine=ENGINE | {"model": str(folder)},
            log=folder / "log.txt",
            deadline_s=120.0,
            start_deadline_s=600.0,
            environment={"OMP_NUM_THREADS": "1"},
        ),
        transport=Transport(folder / "weights", 50_000),
        version=lambda: version[0],
        emit=lambda text: None,
        sleep_level=0,
        restarts=1,
        fallback=None,
        limit=0.3,
    )
    yield sampler, model, version
    sampler.close()


def test_the_engine_writes_the_native_samplers_greedy_tokens_before_and_after_a_push(engine):
    sampler, model, version = engine
    mine, theirs = native(model).generate(groups(1), GREEDY), sampler.generate(groups(1), GREEDY)
    assert tokens(theirs) == tokens(mine)
    torch.testing.assert_close(logprobs(theirs), logprobs(mine), atol=2e-5, rtol=0)
    move(model)
    stale = sampler.generate(groups(1), GREEDY)
    assert tokens(stale) == tokens(theirs), "It was not told of new weights."
    version[0] += 1
    mine, moved = native(model).generate(groups(1), GREEDY), sampler.generate(groups(1), GREEDY)
    assert tokens(moved) == tokens(mine)
    assert not set(tokens(moved)) & set(tokens(stale))


def test_log_probs_are_of_the_temperature_that_was_asked(engine):
    """log softmax(logits / T) of the sampled tokens, by the model's own forward pass."""
    sampler, model, _ = engine
    sampling = Sampling(max_tokens=8, temperature=0.7)
    made = sampler.generate(groups(2), sampling)
    group, sample = groups(2)[3], made[3][1]
    ids = torch.tensor([[*group.prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
    wanted = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, atol=5e-5, rtol=0)


def test_a_killed_engine_gives_identical_samples(engine):
    sampler, _, _ = engine
    sampling = Sampling(max_tokens=24, temperature=2.0)
    # More than are written at a time: some groups have not begun when the first ones are done.
    many = [Group(group.prompt_ids, 4, seed=7 * i) for i, group in enumerate(groups(4) * 4)]
    undisturbed = sampler.generate(many, sampling)
    assert len(set(tokens(undisturbed))) > 16, "Samples of a group are not the same one."
    seen: list[int] = []

    def kill(number: int, samples: list[Sample]) -> None:
        seen.append(number)
        if len(seen) == 3:
            os.kill(sampler.process.pid, signal.SIGKILL)

    survived = sampler.generate(many, sampling, kill)
    assert tokens(survived) == tokens(undisturbed)
    assert sorted(seen) == list(range(32))
    assert sampler.acts.count("start") == 1


def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine):
    sampler, _, _ = engine
    free = sampler.generate(groups(1), GREEDY)
    stop = free[0][0].token_ids[5]
    first = free[0][0].token_ids.index(stop)
    stopped = sampler.generate(groups(1), Sampling(max_tokens=24, temperature=0.0, stop_ids=(stop,)))[0][0]
    assert stopped.token_ids == free[0][0].token_ids[: first + 1]
    assert stopped.finish == "stop"


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    arguments = {
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 128,
        "--kv-cache-memory-bytes": 32 * 2**20,
        "--max-num-batched-tokens": 2048,
        "--block-size": 32,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    words = [str(word) for pair in arguments.items() for word in pair]
    more = ["--enforce-eager", "--no-enable-chunked-prefill"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            command + words + more,
            env=os.environ | variables | {"VLLM_NO_USAGE_STATS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def maps_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # It has ended, or is not ours to read.
        return ""


def test_a_stock_server_is_given_weights_and_survived_when_it_is_killed(tmp_path):
    """Untied: on a CPU a stock server keeps the old head of a tied model, which the sampler refuses."""
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.save_pretrained(tmp_path)
    model = model_of(tied=False, vocabulary=len(tokenizer))
    model.save_pretrained(tmp_path)
    move(model)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    before = {path.name for path in Path("/dev/shm").iterdir()}
    servers = [start_server(tmp_path, port)]
    reported: list[str] = []
    sampler = ServerSampler(
        model=model,
        address=f"http://127.0.0.1:{port}",
        folder=tmp_path / "weights",
        version=lambda: 1,
        ranks=Ranks(),
        emit=reported.append,
        deadline_s=120.0,
        start_deadline_s=400.0,
        restarts=2,
        fallback=None,
        limit=0.3,
    )
    try:
        mine = native(model).generate(groups(1), GREEDY)
        theirs = sampler.generate(groups(1), GREEDY)
        assert tokens(theirs) == tokens(mine)
        torch.testing.assert_close(logprobs(theirs), logprobs(mine), atol=2e-5, rtol=0)
        undisturbed = sampler.generate(groups(2), Sampling(max_tokens=24))
        os.killpg(servers[0].pid, signal.SIGKILL)
        servers[0].wait()
        threading.Timer(2.0, lambda: servers.append(start_server(tmp_path, port))).start()
        assert tokens(sampler.generate(groups(2), Sampling(max_tokens=24))) == tokens(undisturbed)
        assert "loaded the same weights" in reported[0]
    finally:
        sampler.close()
        for server in servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(30)
        # A server that was killed leaves its shared memory behind. What a process uses is somebody else's.
        used = "".join(maps_of(path) for path in Path("/proc").glob("[0-9]*/maps"))
        for path in Path("/dev/shm").iterdir():
            is_new = path.name.startswith(("psm_", "sem.mp-")) and path.name not in before
            if is_new and path.name not in used:
                path.unlink()


RECIPE = """
method: grpo
model: {{path: builtin:tiny}}
data: {{train: {{source: builtin:arithmetic, limit: 40}}, cache_dir: {folder}/cache}}
length: {{max_length: 128}}
generate:
  num_generations: 4
  max_tokens: 12
  stop: ["qz"]
  backend: vllm
  vllm: {{python: "{python}"}}
grpo: {{importance_correction: token_truncate}}
rewards: {{functions: {{function: format, args: {{pattern: "k"}}}}}}
optim: {{lr: 1e-3}}
train: {{batch_size: 8, max_steps: 3}}
memory: {{measure_peaks: false}}
log: {{every_steps: 1}}
cluster: {{device: cpu, threads: 1}}
"""


def test_a_run_of_grpo_learns_from_the_engines_completions(tmp_path):
    recipe = tmp_path / "grpo.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, python=PYTHON))
    run_recipe("grpo", str(recipe), [], run_dir=str(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 3
    # The third step's completions are of weights that two updates have moved.
    assert all(step["mismatch/mean"] < 1e-4 for step in steps), steps
