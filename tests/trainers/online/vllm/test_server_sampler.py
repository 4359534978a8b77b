"""The sampler that asks a vLLM server, against a fake one that answers as vLLM 0.32's routes do.

A real server is tested in test_vllm_engine.py.
"""

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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
        self.lies: dict[str, Callable[[Any], Any]] = {}
        """By route: what becomes of the answer."""
        self.raw: dict[str, bytes | Callable[[Any], None]] = {}
        """By route: bytes that are sent as they are, status line included, or an act on the socket's file."""
        self.weights, self.mark = "first", "first"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

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
        if path in server.raw:
            raw = server.raw[path]
            self.close_connection = True
            # Whoever asked may have gone.
            with contextlib.suppress(OSError):
                self.wfile.write(raw) if isinstance(raw, bytes) else raw(self.wfile)
            return None
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
        lie = self.server.lies.get(self.path.partition("?")[0], lambda given: given)
        data = json.dumps(lie(body)).encode()
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


def choice_with(**changes) -> Callable[[Any], Any]:
    """The answer with other fields of its second choice; a field that is None is taken out."""

    def lie(answer: Any) -> Any:
        choice = answer["choices"][1]
        for name, value in changes.items():
            choice[name] = value(choice) if callable(value) else value
        return answer

    return lie


def logprobs_with(value: object) -> Callable[[Any], Any]:
    """The last log-prob is another."""
    return choice_with(
        logprobs=lambda one: {"token_logprobs": [*one["logprobs"]["token_logprobs"][:-1], value]}
    )


LIES = {
    "no object": (lambda answer: [], "choices: null"),
    "no choices": (lambda answer: {}, "choices: null"),
    "choices are text": (lambda answer: {"choices": "none"}, "choices: 'none'"),
    "a choice is null": (lambda answer: {"choices": [None, None]}, "a choice: null"),
    "too few": (lambda answer: {"choices": answer["choices"][:1]}, "choices"),
    "too many": (lambda answer: {"choices": answer["choices"] * 2}, "choices"),
    "one twice": (choice_with(index=1), r"choices \[1, 1\]"),
    "index is text": (choice_with(index="0"), "the index of a choice is '0'"),
    "index is true": (choice_with(index=True), "the index of a choice is True"),
    "another prompt": (choice_with(prompt_token_ids=[9, 9]), "another prompt was read"),
    "ids are text": (choice_with(token_ids="12345"), "the token ids: '12345'"),
    "an id is text": (choice_with(token_ids=["1", 2, 3, 4, 5]), "a token id is '1'"),
    "an id is a fraction": (choice_with(token_ids=[1.0, 2, 3, 4, 5]), "a token id is 1.0"),
    "an id is true": (choice_with(token_ids=[True, 2, 3, 4, 5]), "a token id is True"),
    "an id is null": (choice_with(token_ids=[None, 2, 3, 4, 5]), "a token id is null"),
    "an id is negative": (choice_with(token_ids=[-1, 2, 3, 4, 5]), "token id -1 is outside"),
    "an id is beyond": (choice_with(token_ids=[10**9, 2, 3, 4, 5]), "token id 1000000000 is outside"),
    "an id has a hundred digits": (choice_with(token_ids=[10**99, 2, 3, 4, 5]), "is outside"),
    "no tokens": (choice_with(token_ids=[], logprobs={"token_logprobs": []}), "a completion has 0 tokens"),
    "too many tokens": (choice_with(token_ids=[1] * 6), "a completion has 6 tokens"),
    "cut too early": (choice_with(token_ids=[1], logprobs={"token_logprobs": [-1.0]}), "'length'"),
    "no log-probs": (choice_with(logprobs=None), "the log-probs: null"),
    "log-probs are a list": (choice_with(logprobs=[-1.0] * 5), "came in place of an object"),
    "too few log-probs": (choice_with(logprobs={"token_logprobs": [-1.0] * 4}), "4 log-probs came with 5"),
    "a log-prob is null": (logprobs_with(None), "a log-prob is null"),
    "a log-prob is NaN": (logprobs_with(float("nan")), "a log-prob is nan"),
    "a log-prob is infinite": (logprobs_with(float("-inf")), "a log-prob is -inf"),
    "a log-prob is no number of float32": (logprobs_with(-1e300), "a log-prob is -1e"),
    "a log-prob stands for minus infinity": (logprobs_with(-9999.0), "a log-prob is -9999"),
    "a log-prob is above 0": (logprobs_with(0.5), "a log-prob is 0.5"),
    "a log-prob is text": (logprobs_with("-1"), "a log-prob is '-1'"),
    "a log-prob is true": (logprobs_with(False), "a log-prob is False"),
    "no finish": (choice_with(finish_reason=None), "ended by null"),
    "finish is a list": (choice_with(finish_reason=["stop"]), "ended by"),
    "finish is unknown": (choice_with(finish_reason="abort"), "ended by 'abort'"),
    "stop without its token": (choice_with(finish_reason="stop"), "ended by 'stop'"),
    "a string that was not asked": (choice_with(finish_reason="stop", stop_reason="x"), "not asked"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_server_that_lies_is_refused_and_nothing_of_its_answer_is_taken(side, name):
    lie, said = LIES[name]
    one = side(restarts=0)
    one.server.lies["/v1/completions"] = lie
    with pytest.raises(LaunchError, match="the vLLM server failed 1 times in one rollout") as caught:
        one.write()
    assert re.search(said, caught.value.faults[0].what)


def test_a_completion_that_goes_on_behind_its_end_is_refused(side):
    one = side(restarts=0)
    one.server.lies["/v1/completions"] = choice_with(token_ids=[1, 7, 2, 3, 4])
    with pytest.raises(LaunchError, match="goes on after a token that ends it"):
        one.sampler.generate(GROUPS, Sampling(max_tokens=5, stop_ids=(7,)))


@pytest.mark.parametrize("models", [None, [], [3], [{}], [{"id": 3}], [{"id": "m", "max_model_len": "64"}]])
def test_a_server_without_a_model_is_refused(side, models):
    one = side(restarts=0)
    one.server.lies["/v1/models"] = lambda answer: {"data": models}
    with pytest.raises(LaunchError, match="failed 1 times in one rollout"):
        one.write()


def test_a_server_that_keeps_no_version_of_weights_is_refused(side):
    one = side(restarts=0)
    one.server.lies["/weight_info"] = lambda answer: {"weight_version": None}
    with pytest.raises(LaunchError, match="does not hold the weights that it was given"):
        one.write()


def endless(file: Any) -> None:
    file.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        file.write(b" " * 2**16)


def dripping(beginning: bytes) -> Callable[[Any], None]:
    """A byte at a time, each within the timeout of a socket."""

    def write(file: Any) -> None:
        file.write(beginning)
        while True:
            file.write(b"1")
            time.sleep(0.05)

    return write


OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "nothing": (b"", "failed 1 times"),
    "no HTTP": (b"hello\r\n\r\n", "the answer is no HTTP"),
    "a line without end": (b"HTTP/1.1 " + b"2" * 70_000, "no HTTP"),
    "too many headers": (OK + b"A: b\r\n" * 200 + b"\r\n", "no HTTP"),
    "an error": (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\ndead", "500 Oops: dead"),
    "not allowed": (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "401"),
    "moved": (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n", "302"),
    "moved for good": (b"HTTP/1.1 308 Gone\r\nLocation: file:///etc/passwd\r\n\r\n", "308"),
    "cut off": (OK + b'Content-Length: 99\r\n\r\n{"choices": []}', "84 bytes before"),
    "cut off in a chunk": (OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{}", "no HTTP"),
    "a chunk of no length": (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}", "failed 1 times"),
    "half of a JSON": (OK + b'\r\n{"choices": [', "not JSON"),
    "deep JSON": (OK + b"\r\n" + b"[" * 100_000, "not JSON"),
    "no UTF-8": (OK + b"\r\n\xff\xfe{}", "not JSON"),
    "without end": (endless, "longer than"),
    "a drip": (dripping(OK + b"\r\n"), "not whole after 1 s"),
    "a drip of the status": (dripping(b"HTTP/1.1 20"), "not whole after 1 s"),
    "a drip of a header": (dripping(OK + b"A: b"), "not whole after 1 s"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_is_none_ends_within_its_time_and_is_a_fault(side, name):
    raw, said = ANSWERS[name]
    one = side(restarts=0, deadline_s=1.0)
    one.server.raw["/v1/completions"] = raw
    with pytest.raises(LaunchError, match="the vLLM server failed 1 times in one rollout") as caught:
        one.write()
    assert said in caught.value.faults[0].what


@pytest.mark.parametrize("route", ["/collective_rpc", "/reset_prefix_cache", "/weight_info"])
def test_an_answer_without_end_of_any_route_is_a_fault(side, route):
    one = side(restarts=0)
    one.server.raw[route] = endless
    with pytest.raises(LaunchError, match="longer than"):
        one.write()


def test_another_service_at_the_address_is_said_at_once(side):
    one = side(start_deadline_s=600.0)
    one.server.raw["/v1/models"] = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(LaunchError, match="no vLLM server answers"):
        one.write()


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
