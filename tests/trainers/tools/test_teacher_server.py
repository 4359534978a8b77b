"""Likeliest tokens from a server that answers as vLLM does: those of the same model asked here."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from memtrain.cli.commands.score_teacher import score_teacher
from memtrain.errors import LaunchError, RecipeError
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.data.store.top_k import TopKFile
from memtrain.trainers.data.tokenize.tiny_tokenizer import FOLDER
from memtrain.trainers.tools.teacher_server import TeacherServer, find_server

RECIPE = """
method: distill
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
    num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 6}}, cache_dir: {folder}/cache}}
length: {{max_length: 64}}
cluster: {{device: cpu, threads: 1}}
distill: {{teacher: {folder}/teacher, top_k: 4, top_k_file: {folder}/local}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = AutoTokenizer.from_pretrained(str(FOLDER))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.yaml"


class Server:
    """vLLM's answers, from the model itself; `most` is its --max-logprobs."""

    def __init__(self, folder: Path, served: str, most: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        asked: list[list[int]] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self, values: dict[str, Any]) -> None:
                text = json.dumps(values).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                self.answer({"object": "list", "data": [{"id": served, "object": "model", "root": served}]})

            def do_POST(self) -> None:
                assert self.path == "/v1/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert body["model"] == served
                ids = body["prompt"]
                asked.append(ids)
                with torch.no_grad():
                    logp_TV = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                places: list[Any] = [None]
                for row, token in zip(logp_TV[:-1], ids[1:], strict=True):
                    best = row.topk(min(most, body["prompt_logprobs"])).indices.tolist()
                    # The token that stands there is reported too, with its own rank.
                    places.append({str(one): entry(row, one) for one in dict.fromkeys([token, *best])})
                choice = {"index": 0, "text": "", "prompt_logprobs": places}
                self.answer({"object": "text_completion", "choices": [choice]})

        self.asked = asked
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def entry(logp_V: torch.Tensor, token: int) -> dict[str, Any]:
    rank = int((logp_V > logp_V[token]).sum()) + 1
    return {"logprob": float(logp_V[token]), "rank": rank, "decoded_token": str(token)}


@pytest.fixture
def serve(recipe: Path) -> Iterator[Any]:
    """Starts a server with the teacher."""
    begun: list[Server] = []

    def start(served: str | None = None, most: int = 20) -> Server:
        folder = recipe.parent / "teacher"
        begun.append(Server(folder, served or str(folder), most))
        return begun[-1]

    yield start
    for server in begun:
        server.http.shutdown()
        server.http.server_close()


def test_a_served_teacher_gives_the_file_of_the_same_teacher_here(recipe: Path, serve, capsys) -> None:
    score_teacher(str(recipe), [])
    server = serve()
    there = recipe.parent / "served"
    words = [f"distill.teacher_server={server.address}/v1", f"distill.top_k_file={there}"]
    score_teacher(str(recipe), words)
    assert "its top 4 tokens are in" in " ".join(capsys.readouterr().out.split())
    local, served = TopKFile(recipe.parent / "local"), TopKFile(there)
    for name in ("keys", "starts", "ids"):
        assert np.array_equal(local._arrays[name], served._arrays[name]), name
    np.testing.assert_allclose(served._arrays["logps"], local._arrays["logps"], atol=1e-5)
    np.testing.assert_allclose(served._arrays["tail"], local._arrays["tail"], atol=1e-4)
    assert len(server.asked) == len(local._arrays["keys"]), "each row is asked for once"


@pytest.mark.parametrize(
    ("served", "most", "words"),
    [
        ("another/model", 20, "does not serve .*teacher: its models are another/model"),
        (None, 2, "gives 2 top-k tokens, but top_k is 4"),
    ],
)
def test_a_server_with_another_model_or_fewer_tokens_is_refused(
    recipe: Path, serve, tmp_path: Path, served: str | None, most: int, words: str
) -> None:
    server = serve(served, most)
    overrides = [f"distill.teacher_server={server.address}", f"distill.top_k_file={tmp_path}"]
    with pytest.raises(LaunchError, match=words):
        score_teacher(str(recipe), overrides)
    assert not (tmp_path / "teacher.safetensors").exists()


def place(**logprobs: float) -> dict[str, Any]:
    """Tokens `t7` of a place, likeliest first."""
    named = enumerate(logprobs.items(), start=1)
    return {name[1:]: {"rank": rank, "logprob": value} for rank, (name, value) in named}


GOOD = place(t4=-1.0, t7=-1.5)
WRONG_PLACES = {
    "null": (None, "a place: null"),
    "a list": ([GOOD], "a place: "),
    "a token is no number": ({**GOOD, "x": {"rank": 3, "logprob": -9.0}}, "a token is 'x'"),
    "a token is negative": ({**GOOD, "-3": {"rank": 3, "logprob": -9.0}}, "a token is '-3'"),
    "a token is null": ({**GOOD, "9": None}, "the token '9': null"),
    "no rank": ({**GOOD, "9": {"logprob": -9.0}}, "a rank is null"),
    "a rank is 0": ({**GOOD, "9": {"logprob": -9.0, "rank": 0}}, "a rank is 0"),
    "NaN": (place(t4=-1.0, t7=float("nan")), "a log-prob is nan"),
    "infinite": (place(t4=-1.0, t7=float("-inf")), "a log-prob is -inf"),
    "above 0": (place(t4=0.5, t7=-1.0), "a log-prob is 0.5"),
    "null log-prob": (place(t4=-1.0, t7=None), "a log-prob is null"),  # pyright: ignore[reportArgumentType]
    "text": (place(t4=-1.0, t7="-2"), "a log-prob is '-2'"),  # pyright: ignore[reportArgumentType]
    "another token": (place(t5=-1.0, t7=-1.5), "the token 4 that was sent is not among"),
    "too few": (place(t4=-1.0), "gives 1 top-k tokens"),
    "beyond": (place(t4=-1.0, t700=-1.5), "tokens beyond the 100 of the student"),
    "more than all mass": (place(t4=-0.1, t7=-0.2), "a probability of 1.724 together"),
    "ranks the wrong way": (place(t4=-3.0, t7=-1.0), "ranks that their log-probs do not have"),
}


@pytest.mark.parametrize("name", WRONG_PLACES)
def test_a_teacher_that_lies_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, said = WRONG_PLACES[name]
    answer: dict[str, Any] = {"choices": [{"prompt_logprobs": [None, given]}]}
    monkeypatch.setattr("memtrain.trainers.tools.teacher_server.ask", lambda *words, **more: answer)
    server = TeacherServer("http://t", "t", 2, 100, "distill.teacher_server")
    with pytest.raises(LaunchError, match=re.escape(said)):
        server.likely([3, 4])
    answer["choices"][0]["prompt_logprobs"][1] = GOOD
    assert server.likely([3, 4]).ids_nK.tolist() == [[4, 7]]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [3]},
        {"choices": [{}]},
        {"choices": [{"prompt_logprobs": [None]}]},
    ],
)
def test_a_teachers_answer_of_another_form_is_refused(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.trainers.tools.teacher_server.ask", lambda *words, **more: answer)
    with pytest.raises(LaunchError, match="answers without prompt_logprobs of the 2 tokens"):
        TeacherServer("http://t", "t", 2, 100, "distill.teacher_server").likely([3, 4])


@pytest.mark.parametrize("data", [None, 3, [], [None], ["x"], [{"id": None}]])
def test_a_list_of_models_of_another_form_is_refused(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.trainers.tools.teacher_server.ask", lambda *words, **more: {"data": data})
    with pytest.raises(LaunchError, match="does not serve t"):
        find_server("http://t", "t", top_k=2, num_columns=100, place="distill.teacher_server")


def test_a_server_that_is_not_there_is_one_error(recipe: Path, tmp_path: Path) -> None:
    overrides = ["distill.teacher_server=http://127.0.0.1:9", f"distill.top_k_file={tmp_path}"]
    with pytest.raises(LaunchError, match="does not answer") as caught:
        score_teacher(str(recipe), overrides)
    assert "vllm serve" in caught.value.faults[0].fix


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("distill.teacher_server=localhost:8000", "is not an address"),
        ("distill.temperature=2", "are those at temperature 1"),
        ("distill.teacher=adapter_off", "needs teacher, the model that it serves"),
    ],
)
def test_a_recipe_that_a_server_cannot_serve_is_refused(recipe: Path, override: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(str(recipe), ["distill.teacher_server=http://localhost:8000", override])
