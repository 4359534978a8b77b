"""Decoding: tokens of several passes between two looks, and of recorded passes, are those of one by one."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.decoding import Decoder
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs
from memtrain.trainers.runtime.operator_tape import OperatorTape

PROMPTS = [(5, 9, 2, 11), (3,), (7, 7, 1, 30, 8, 2, 90), (14, 6), tuple(range(20, 43))]
STOPS = tuple(range(5, 128, 17))
KINDS = {
    "plain": Sampling(max_tokens=40, stop_ids=STOPS),
    "greedy": Sampling(max_tokens=23, temperature=0, stop_ids=STOPS),
    "cut": Sampling(max_tokens=30, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, stop_ids=STOPS),
    "penalised": Sampling(max_tokens=20, repetition_penalty=1.3, stop_ids=STOPS),
    "strings": Sampling(max_tokens=30, stop_strings=("x", "ab")),
}


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def written(model: torch.nn.Module, sampling: Sampling, rows: int = 64, **changes) -> list[Sample]:
    sampler = NativeSampler(model, AttentionBackend.TORCH_CPU, rows, decode=letters, **changes)
    groups = [Group(prompt, 3 + i % 2, seed=100 + i) for i, prompt in enumerate(PROMPTS)]
    return sum(sampler.generate(groups, sampling), [])


def sharp(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a head that is sure of itself."""
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    return model.eval()


def same(made: list[Sample], expected: list[Sample]) -> None:
    """Tokens and ends are the same; log-probs but for the order of sums in wider passes."""
    for one, other in zip(made, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish == other.finish
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_between_two_looks_are_those_of_one(tiny_qwen3, kind):
    """Rows that end in the middle of a block, rows that are refilled, a group in two parts."""
    model, sampling = sharp(tiny_qwen3()), KINDS[kind]
    plain = written(model, sampling)
    if kind == "plain":
        assert len({len(sample.token_ids) for sample in plain}) > 4
    for rows in (64, 5, 2):
        same(written(model, sampling, rows, tokens_per_sync=7), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_passes_write_the_same_tokens(tiny_llama, kind):
    """Started from a tape: what Python would have to change, or wait for, between two tokens shows here."""
    model, sampling = sharp(tiny_llama()), KINDS[kind]
    plain = written(model, sampling)
    tape, reported = OperatorTape(), []
    graphs = DecodeGraphs(lambda: tape, reported.append)
    for rows in (64, 6):
        same(written(model, sampling, rows, tokens_per_sync=3, graphs=graphs), plain)
    assert reported == []
    assert tape.num_starts > 2 * tape.num_records > 0


def test_the_host_looks_once_in_a_block(tiny_llama, monkeypatch):
    """20 tokens: the first with the prompt, 19 in blocks of 8, 8 and 3."""
    looks = []
    plain = Decoder._fetched

    def spy(self, row_R, last_R, num_tokens):
        looks.append(num_tokens)
        return plain(self, row_R, last_R, num_tokens)

    monkeypatch.setattr(Decoder, "_fetched", spy)
    written(tiny_llama().eval(), Sampling(max_tokens=20), tokens_per_sync=8)
    assert looks == [1, 8, 8, 3]


def test_a_model_that_cannot_be_recorded_is_written_without_and_warned_of(tiny_llama):
    """Its forward pass looks at a number, as one that chooses by lengths does; the tape is asked once."""
    model = sharp(tiny_llama())
    plain = written(model, KINDS["plain"])
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: [kwargs["position_ids"].max().item(), None][1], with_kwargs=True
    )
    tape, reported = OperatorTape(), []
    graphs = DecodeGraphs(lambda: tape, reported.append)
    for _ in range(2):
        same(written(model, KINDS["plain"], graphs=graphs), plain)
    assert tape.num_records == 0
    assert len(reported) == 1
    assert "cannot be captured" in reported[0]
    assert "wait for a number" in reported[0]


def test_memory_that_runs_out_while_recording_is_no_reason_to_go_on_without():
    class Full:
        def record(self, run):
            raise torch.OutOfMemoryError("no room")

        def release(self):
            pass

    graphs = DecodeGraphs(Full, print)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(lambda: None)
    assert graphs.is_on


def windowed(window: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
    )
    return sharp(MistralForCausalLM(config))


@pytest.mark.parametrize("graphs", [False, True])
def test_a_block_ends_where_the_window_does(graphs):
    """23 tokens of prompt and 20 written, the last of which has no keys: 42 places."""
    sampling = Sampling(max_tokens=20)
    made = {}
    for tokens_per_sync in (1, 8):
        recorded = DecodeGraphs(OperatorTape, print) if graphs else None
        made[tokens_per_sync] = written(
            windowed(42), sampling, tokens_per_sync=tokens_per_sync, graphs=recorded
        )
        with pytest.raises(LaunchError, match="a sliding window of 41 tokens"):
            written(windowed(41), sampling, tokens_per_sync=tokens_per_sync, graphs=recorded)
    same(made[8], made[1])


def test_a_tape_reads_what_stands_in_its_tensors_and_keeps_pythons_numbers():
    held, added = torch.zeros(3), [1.0]

    def run() -> None:
        held.add_(added[0]).copy_(held.view(3) * 2)

    start = OperatorTape().record(run)
    assert held.tolist() == [0, 0, 0]
    added[0] = 100.0
    start()
    assert held.tolist() == [2, 2, 2]
    held.fill_(5)
    start()
    assert held.tolist() == [12, 12, 12]


class Graph:
    """A graph whose capture cannot be ended, once its body has failed."""

    ended = "well"

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local", "Another thread may pin memory meanwhile."

    def capture_end(self):
        if self.ended != "well":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self):
        pass


class Generator:
    """The generator of a device: after a broken capture only a copy of its state can be drawn from."""

    state = "waits for a capture"

    def get_offset(self):
        return 0

    def clone_state(self):
        return "a copy"

    def graphsafe_set_state(self, state):
        self.state = state


@pytest.fixture
def no_card(monkeypatch):
    """Stands in for the parts of torch.cuda that a capture meets; what happened, by name."""
    seen = {
        "stream": "of compute",
        "ended": [],
        "generator": Generator(),
        "mode": 0,
        "pools": 0,
        "emptied": 0,
    }

    @contextmanager
    def stream(of):
        before, seen["stream"] = seen["stream"], of
        try:
            yield
        finally:
            seen["stream"] = before

    def pool():
        seen["pools"] += 1
        return (0, seen["pools"])

    fakes = {
        "graph_pool_handle": pool,
        "CUDAGraph": Graph,
        "Stream": lambda: "of captures",
        "stream": stream,
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "default_generators": (seen["generator"],),
        "get_sync_debug_mode": lambda: seen["mode"],
        "set_sync_debug_mode": lambda mode: seen.update(mode=mode),
        "empty_cache": lambda: seen.update(emptied=seen["emptied"] + 1),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda device, pool, name=name: seen["ended"].append((name, pool)), raising=False
        )
    return seen


def test_captures_run_on_their_stream_and_the_cache_is_emptied_before_the_first(no_card):
    """Once for a pool: `torch.cuda.graph` does so each time, and training makes its memory anew after it."""
    graphs, streams = CudaGraphs(), []
    for emptied in (1, 1, 1):
        graphs.record(lambda: streams.append(no_card["stream"]))
        assert no_card["emptied"] == emptied
    assert streams == ["of captures"] * 3
    assert no_card["stream"] == "of compute"
    graphs.release()
    assert no_card["emptied"] == 2
    graphs.record(lambda: None)
    assert (no_card["emptied"], no_card["pools"], no_card["ended"]) == (3, 2, [])


def test_a_capture_that_breaks_off_leaves_nothing_behind(no_card, monkeypatch):
    """torch would leave the allocator recording, and the random numbers spoilt."""
    told: list[str] = []
    monkeypatch.setattr(Graph, "ended", "badly")

    def waits():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nadvice")

    graphs = DecodeGraphs(CudaGraphs, told.append)
    assert graphs.record(waits) is None
    assert not graphs.is_on
    assert no_card["stream"] == "of compute"
    assert no_card["ended"] == [("_cuda_endAllocateToPool", (0, 1)), ("_cuda_releasePool", (0, 1))]
    assert no_card["generator"].state == "a copy"
    assert "not permitted when stream is capturing" in told[0]
    assert "previous error" not in told[0]


def test_memory_that_runs_out_in_a_capture_is_told_as_that(no_card, monkeypatch):
    """Not as the error of the capture's end, which comes over it."""
    monkeypatch.setattr(Graph, "ended", "badly")

    def fills():
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = DecodeGraphs(CudaGraphs, print)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(fills)
    assert graphs.is_on


@pytest.mark.parametrize("waits", [False, True])
def test_a_pass_that_waits_for_the_device_is_seen_before_it_is_captured(no_card, waits):
    """By torch's warning, which comes in a pass that is computed as always; other warnings mean nothing."""
    told: list[str] = []
    modes: list[object] = []

    def run():
        modes.append(no_card["mode"])
        warnings.warn("called a synchronizing CUDA operation" if waits else "beta", stacklevel=1)

    graphs = DecodeGraphs(CudaGraphs, told.append)
    graphs.rehearse(run)
    assert (modes, no_card["mode"]) == (["warn"], 0)
    assert (graphs.is_on, graphs.is_rehearsed) == (not waits, not waits)
    assert len(told) == waits


def test_the_second_pass_of_a_run_is_looked_at_and_no_later_one(tiny_llama, monkeypatch):
    """In the first one, kernels are still made ready."""
    rehearsed = []
    plain = DecodeGraphs.rehearse
    monkeypatch.setattr(DecodeGraphs, "rehearse", lambda self, run: [rehearsed.append(1), plain(self, run)])
    graphs = DecodeGraphs(OperatorTape, print)
    model = sharp(tiny_llama())
    for _ in range(2):
        same(written(model, KINDS["plain"], graphs=graphs), written(model, KINDS["plain"]))
    assert len(rehearsed) == 1
    assert graphs.is_rehearsed
