"""A fake engine with the names that the worker calls in vLLM 0.32: it tests the protocol, not vLLM.

A token is a hash of the weights, the prompt, the seed and its place. Like the real one it keeps a prefix
cache that a reload does not empty. What goes wrong is said by files in FAKE_VLLM: `die-after-2` kills the
process when two groups are written, `hang-after-2` stops it, `bad-sync` refuses a load, `no-start` the start,
`stuck-cache` emptying the cache; each once, unless it is named `...-always`. `lie.json` holds other fields of
every completion.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "fake"

STATE = Path(os.environ["FAKE_VLLM"])


def note(word):
    with (STATE / "log").open("a") as file:
        file.write(word + "\n")


def is_asked(fault):
    if (STATE / f"{fault}-always").exists():
        return True
    path = STATE / fault
    is_there = path.exists()
    path.unlink(missing_ok=True)
    return is_there


class SamplingParams:
    def __init__(self, **fields):
        self.__dict__.update(fields)
        (STATE / "sampling.json").write_text(json.dumps(fields, default=str))


class LLM:
    def __init__(self, **arguments):
        if is_asked("no-start"):
            raise RuntimeError("no such device")
        note(f"start {os.getpid()}")
        (STATE / "arguments.json").write_text(json.dumps(arguments))
        self.llm_engine = self
        self.weights = None
        self.cached = {}
        self.waiting = []
        self.written = 0
        self.level = 0

    def collective_rpc(self, name, kwargs):
        assert name == "reload_weights"
        shapes, sums = {}, hashlib.sha256()
        for tensor_name, tensor in kwargs["weights_iterator"]:
            if is_asked("bad-sync"):
                raise ValueError("no such weight")
            shapes[tensor_name] = list(tensor.shape)
            sums.update(tensor_name.encode() + tensor.tobytes())
        self.weights = sums.hexdigest()
        (STATE / "shapes.json").write_text(json.dumps(shapes))
        note("reload")

    def apply_model(self, act):
        note(act.__name__)

    def reset_prefix_cache(self):
        note("reset")
        self.cached.clear()
        return not is_asked("stuck-cache")

    def sleep(self, level):
        note(f"sleep {level}")
        if level > 1:
            self.weights = None

    def wake_up(self, tags):
        note("wake " + " ".join(tags))

    def add_request(self, request, prompt, params):
        self.waiting.append((request, tuple(prompt["prompt_token_ids"]), params))

    def step(self):
        for fault, act in (("die", signal.SIGKILL), ("hang", signal.SIGSTOP)):
            if is_asked(f"{fault}-after-{self.written}"):
                os.kill(os.getpid(), act)
                time.sleep(5)
        request, prompt, params = self.waiting.pop(0)
        self.written += 1
        weights = self.cached.setdefault(prompt, self.weights)
        note(f"group {params.seed}")
        outputs = [self.completion(weights, prompt, params, number) for number in range(params.n)]
        return [SimpleNamespace(finished=True, request_id=request, outputs=outputs)]

    def completion(self, weights, prompt, params, number):
        text = f"{weights} {prompt} {params.seed + number}"
        digest = hashlib.sha256(text.encode()).digest()
        ids = [byte % 100 for byte in digest[: params.max_tokens]]
        lie = json.loads((STATE / "lie.json").read_text()) if (STATE / "lie.json").exists() else {}
        ids = lie.get("token_ids", ids)
        logprobs = [{token: SimpleNamespace(logprob=lie.get("logprob", -abs(token) / 10))} for token in ids]
        return SimpleNamespace(
            token_ids=ids,
            logprobs=None if params.logprobs is None or lie.get("silent") else logprobs,
            finish_reason=lie.get("finish_reason", "length"),
            stop_reason=lie.get("stop_reason"),
        )
