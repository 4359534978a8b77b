"""The sampler that asks a vLLM server, against a fake one that answers as vLLM 0.32's routes do.

A real server is tested in test_vllm_engine.py.
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memtrain.errors import LaunchError
from memtrain.recipes.sections.rewards import Environment, RewardFunction, Rewards
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.generation.turns import TurnWriter
from memtrain.trainers.online.rewards.environment import load_environment
from memtrain.trainers.online.vllm.server_sampler import ServerSampler, write_checkpoint
from memtrain.trainers.runtime.ranks import Ranks

GROUPS = [Group((3, 4 + i), 2, seed=100 * i) for i in range(4)]
SAMPLING = Sampling(max_tokens=5)


class FakeServer(ThreadingHTTPServer):
    """Tokens are a hash of the checkpoint's bytes, prompt, seed and number. Fails as its fields say."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.paths: list[str] = []
        self.has_dev_mode = self.has_token_ids = True
        self.num_completions = 0
        self.prompts: list[list[int]] = []
        self.fails_at = self.forgets_at = -1
        self.turn_tokens = 0
        self.weights, self.mark = "first", "first"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def restart(self) -> None:
        self.weights, self.mark = "first", "first"

    def load(self, folder: str) -> None:
        sums = hashlib.sha256()
        for path in sorted(Path(folder).glob("*.safetensors")):
            for name, tensor in sorted(load_file(path).items()):
                sums.update(name.encode() + tensor.numpy().tobytes())
        self.weights = sums.hexdigest()

    def completions(self, asked: dict) -> dict:
        number = self.num_completions
        self.num_completions += 1
        self.prompts.append(asked["prompt"])
        if number == self.forgets_at:
            self.restart()
        if number == self.fails_at:
            raise OSError
        choices = []
        for index in range(asked["n"]):
            text = f"{self.weights} {asked['prompt']} {asked['seed'] + index}"
            ids = [byte % 100 for byte in hashlib.sha256(text.encode()).digest()[: asked["max_tokens"]]]
            choices.append(
                {
                    "index": index,
                    "token_ids": ids if self.has_token_ids else None,
                    "logprobs": {"token_logprobs": [-token / 10 for token in ids]},
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            )
            if self.turn_tokens:
                # As vLLM ends at a string of `stop`, with the token that completes it.
                del ids[self.turn_tokens :]
                choices[-1] |= {"finish_reason": "stop", "stop_reason": asked["stop"][0]}
                choices[-1]["logprobs"]["token_logprobs"] = [-token / 10 for token in ids]
        return {"choices": choices[::-1]}


class Answers(BaseHTTPRequestHandler):
    """The routes."""

    server: FakeServer

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, asked: dict) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.paths.append(path)
        if path == "/v1/models":
            return self.send({"data": [{"id": "m", "max_model_len": 64}]})
        if path == "/v1/completions":
            try:
                return self.send(server.completions(asked))
            except OSError:
                return self.send({"error": "engine is dead"}, 500)
        if not server.has_dev_mode:
            return self.send({"detail": "Not Found"}, 404)
        if path == "/collective_rpc":
            assert asked["method"] == "reload_weights"
            server.load(asked["kwargs"]["weights_path"])
        if path == "/update_weight_version":
            server.mark = asked["new_version"]
        return self.send({"weight_version": server.mark} if path == "/weight_info" else {})

    def send(self, body: dict, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


class Side:
    def __init__(self, folder: Path, model: torch.nn.Module, **changes) -> None:
        self.server, self.version, self.reported = FakeServer(), 0, []
        fields = {"restarts": 2, "fallback": None, "deadline_s": 10.0, "start_deadline_s": 0.0} | changes
        self.sampler = ServerSampler(
            model=model,
            address=f"http://127.0.0.1:{self.server.server_port}/",
            folder=folder,
            version=lambda: self.version,
            ranks=Ranks(),
            emit=self.reported.append,
            **fields,
        )

    def write(self) -> list[list[Sample]]:
        return self.sampler.generate(GROUPS, SAMPLING)


@pytest.fixture
def side(tmp_path, tiny_llama):
    made: list[Side] = []

    def make(**changes) -> Side:
        made.append(Side(tmp_path / f"{len(made)}", tiny_llama(), **changes))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_weights_are_given_before_completions_are_asked_and_the_cache_emptied(side):
    one = side()
    made = one.write()
    assert [len(group) for group in made] == [2, 2, 2, 2]
    assert one.server.paths[:4] == [
        "/v1/models",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    ]
    sample = made[1][1]
    assert sample.logprobs == pytest.approx([-token / 10 for token in sample.token_ids])


def test_a_prompt_is_sent_as_it_is_whatever_is_written_beside_it(side):
    """Defect C6 of TRL 1.16's Online DPO: shorter prompts were padded on the left, and the pads attended."""
    one = side()
    groups = [Group(tuple(range(3, 3 + length)), 1, seed=length) for length in (2, 9, 5)]
    one.sampler.generate(groups, SAMPLING)
    assert sorted(one.server.prompts, key=len) == [[3, 4], list(range(3, 8)), list(range(3, 12))]


def test_new_weights_change_completions_and_one_checkpoint_is_kept(side, tmp_path):
    one = side()
    first = one.write()
    assert one.write() == first
    assert one.server.paths.count("/collective_rpc") == 1
    with torch.no_grad():
        one.sampler.model.lm_head.weight.add_(1)
    one.version += 1
    assert one.write() != first
    assert len(list((tmp_path / "0").iterdir())) == 1


def test_a_server_without_its_development_mode_is_refused(side):
    one = side()
    one.server.has_dev_mode = False
    with pytest.raises(LaunchError, match="cannot load new weights") as caught:
        one.write()
    assert "VLLM_SERVER_DEV_MODE=1" in caught.value.faults[0].fix


def test_a_server_that_was_started_again_between_rollouts_gets_its_weights(side):
    one = side()
    first = one.write()
    one.server.restart()
    assert one.write() == first
    assert one.server.paths.count("/collective_rpc") == 2


def test_completions_of_a_server_that_lost_its_weights_meanwhile_are_thrown_away(side):
    one, undisturbed = side(), side()
    one.server.forgets_at = 2
    assert one.write() == undisturbed.write()
    assert "restarted during generation" in one.reported[0]


def test_a_failed_request_is_asked_again_with_its_seed(side):
    one, undisturbed = side(), side()
    one.server.fails_at = 1
    assert one.write() == undisturbed.write()
    assert "500" in one.reported[0]


def test_a_server_that_fails_too_often_ends_the_run(side):
    one = side(restarts=0)
    one.server.fails_at = 0
    with pytest.raises(LaunchError, match="failed 1 times in one rollout"):
        one.write()


def test_no_server_is_said(side):
    one = side()
    one.sampler.address = "http://127.0.0.1:9"
    with pytest.raises(LaunchError, match="no vLLM server answers"):
        one.write()


def test_a_server_without_token_ids_is_refused(side):
    one = side()
    one.server.has_token_ids = False
    with pytest.raises(LaunchError, match="have no token ids"):
        one.write()


def test_a_prompt_that_the_server_does_not_take_is_refused(side):
    one = side()
    with pytest.raises(LaunchError, match="the server takes 64 tokens, and a prompt has 70"):
        one.sampler.generate([Group((1,) * 70, 1, 0)], SAMPLING)


def test_other_log_probs_than_the_trainers_are_refused(side):
    one = side(limit=0.3)
    with pytest.raises(LaunchError, match="nats from the trainer's for the same weights"):
        one.write()


def test_a_checkpoint_in_several_files_holds_every_weight(tmp_path, tiny_llama, monkeypatch):
    monkeypatch.setattr("memtrain.trainers.online.vllm.server_sampler.SHARD_BYTES", 50_000)
    weights = tiny_llama().state_dict()
    write_checkpoint(weights.items(), tmp_path / "c")
    files = sorted((tmp_path / "c").iterdir())
    assert len(files) > 2
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(held) == set(weights)
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())


class Numbers:
    """Words as numbers: each is a token."""

    def ids(self, words: str, *, closes_turn: bool) -> list[int]:
        return [int(word) for word in words.split()]

    def text(self, ids) -> str:
        return " ".join(map(str, ids))


def test_an_environment_answers_turns_that_a_server_wrote(side, tmp_path):
    """Each turn is asked with the conversation before it as its prompt; the server's log-probs stay with the
    model's own tokens, and the environment's are context alone."""
    (tmp_path / "own.py").write_text(
        "class Own:\n    def step(self, text):\n        return '7 ' + text.split()[-1]\n"
    )
    one = side()
    one.server.turn_tokens = 2
    asked = Environment(path=f"{tmp_path}/own.py:Own", max_turns=3)
    writer = TurnWriter(
        generating=Generating(make=lambda rows: one.sampler, max_rows=8, ranks=Ranks()),
        environment=load_environment(asked),
        rewards=Rewards(functions=(RewardFunction(function="exact_answer"),), environment=asked),
        words=Numbers(),
        ranks=Ranks(),
    )
    sampling = Sampling(max_tokens=30, stop_strings=("=",))
    made = writer.write([Group((3, 4), 2, seed=5)], sampling, lambda at: {})
    for sample in made.samples[0]:
        context = list(sample.context_ids)
        assert sample.is_written == (True, True, False, False) * 2 + (True, True)
        assert [context[at] for at in (2, 6)] == [7, 7]
        assert [context[at] for at in (3, 7)] == [context[1], context[5]]
        assert sample.logprobs == pytest.approx([-token / 10 for token in sample.token_ids])
        assert (sample.num_turns, sample.finish) == (3, "string")
        assert [3, 4, *context[:4]] in one.server.prompts
        assert [3, 4, *context[:8]] in one.server.prompts
    assert made.metrics == {"turns": 3.0, "environment_tokens": 4.0}
