"""The vLLM sampler against a fake engine process: what is sent, in which order, and what faults do to it.

The real engine is tested in test_vllm_engine.py.
"""

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from memtrain.errors import LaunchError
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.vllm.process import Faulty, Launch, Process
from memtrain.trainers.online.vllm.sampler import VllmSampler
from memtrain.trainers.online.vllm.weight_sync import (
    PREFIX,
    Transport,
    in_buckets,
    open_transport,
    sweep,
    vllm_weights,
)
from memtrain.trainers.runtime.namespaces import pid_namespace

FAKE = Path(__file__).parents[2] / "fake_vllm"
GROUPS = [Group((3, 4 + i), 2, seed=100 * i) for i in range(4)]
SAMPLING = Sampling(max_tokens=5)


class Side:
    """A sampler on the fake engine, and what the fake noted."""

    def __init__(self, folder: Path, model: torch.nn.Module, **changes) -> None:
        self.folder, self.model, self.version, self.reported = folder, model, 0, []
        self.state = folder / "state"
        self.state.mkdir()
        (folder / "weights").mkdir()
        launch = Launch(
            python=sys.executable,
            engine={"model": "none"},
            log=folder / "log.txt",
            deadline_s=changes.pop("deadline_s", 20.0),
            start_deadline_s=20.0,
            environment={"PYTHONPATH": str(FAKE), "FAKE_VLLM": str(self.state)},
        )
        fields = {"sleep_level": 0, "restarts": 2, "fallback": None} | changes
        self.sampler = VllmSampler(
            model=model,
            launch=launch,
            transport=Transport(folder / "weights", 4096),
            version=lambda: self.version,
            emit=self.reported.append,
            **fields,
        )

    def write(self, sampling: Sampling = SAMPLING) -> list[list[Sample]]:
        return self.sampler.generate(GROUPS, sampling)

    def fault(self, name: str) -> None:
        (self.state / name).touch()

    @property
    def noted(self) -> list[str]:
        lines = (self.state / "log").read_text().split("\n")[:-1]
        return [line.split()[0] if line.startswith("start") else line for line in lines]


@pytest.fixture
def side(tmp_path, tiny_llama):
    made: list[Side] = []

    def make(model=None, **changes) -> Side:
        folder = tmp_path / f"{len(made)}"
        folder.mkdir()
        made.append(Side(folder, model or tiny_llama(), **changes))
        return made[-1]

    yield make
    for one in made:
        one.sampler.close()


def test_completions_come_in_the_order_of_the_groups_with_their_log_probs(side):
    made = side().write()
    assert [len(group) for group in made] == [2, 2, 2, 2]
    sample = made[2][1]
    assert len(sample.token_ids) == 5
    assert sample.logprobs == pytest.approx([-token / 10 for token in sample.token_ids])
    assert sample.finish == "length"


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"logprob": float("nan")}, "a log-prob is nan"),
        ({"logprob": None}, "a log-prob is null"),
        ({"logprob": 2.0}, "a log-prob is 2.0"),
        ({"silent": True}, "the log-probs: null"),
        ({"token_ids": [10**6] * 5}, "token id 1000000 is outside"),
        ({"token_ids": [1] * 6}, "a completion has 6 tokens"),
        ({"token_ids": []}, "a completion has 0 tokens"),
        ({"token_ids": [1, 2]}, "2 tokens cannot have ended by 'length'"),
        ({"finish_reason": "abort"}, "ended by 'abort'"),
        ({"finish_reason": "stop"}, "ended by 'stop'"),
        ({"finish_reason": "stop", "stop_reason": "x"}, "ended by 'string'"),
    ],
)
def test_an_engine_that_lies_is_refused(side, lie, said):
    one = side(restarts=0)
    (one.state / "lie.json").write_text(json.dumps(lie))
    with pytest.raises(LaunchError, match="the vLLM process failed 1 times in one rollout") as caught:
        one.write()
    assert said in caught.value.faults[0].what


FRAMES = {
    "no JSON": (b"{", "not JSON"),
    "deep JSON": (b"[" * 50_000, "not JSON"),
    "no object": (b"[1]", "says no event"),
    "no event": (b'{"ev": 3}', "says no event"),
    "another event": (b'{"ev": "want"}', "want came in place of completions"),
    "another group": (b'{"ev": "done", "number": 9, "version": 0, "samples": []}', "group 9 came"),
    "no number": (b'{"ev": "done", "version": 0, "samples": []}', "the number of a group is null"),
    "other weights": (b'{"ev": "done", "number": 0, "version": 1, "samples": []}', "weights 1 came"),
    "no samples": (b'{"ev": "done", "number": 0, "version": 0}', "the completions: null"),
    "a sample is null": (b'{"ev": "done", "number": 0, "version": 0, "samples": [null, 1]}', "null came"),
    "an early end": (b'{"ev": "ok"}', "4 of 4 groups of completions did not come"),
    "an error without text": (b'{"ev": "error"}', "None"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_none_is_a_fault(side, name, monkeypatch):
    raw, said = FRAMES[name]
    one = side(restarts=0)
    ours, theirs = socket.socketpair()
    process = Process.__new__(Process)
    process.launch, process.socket, process.is_alive = one.sampler.launch, ours, False
    one.sampler.process, one.sampler.held, one.sampler.has_started = process, 0, True
    theirs.sendall(struct.pack("<I", len(raw)) + raw)
    with ours, theirs, pytest.raises(LaunchError, match="failed 1 times in one rollout") as caught:
        one.write()
    assert said in caught.value.faults[0].what


def test_a_frame_of_gigabytes_is_a_fault(side):
    one = side(restarts=0)
    ours, theirs = socket.socketpair()
    process = Process.__new__(Process)
    process.launch, process.socket, process.is_alive = one.sampler.launch, ours, False
    theirs.sendall(struct.pack("<I", 2**32 - 1))
    with ours, theirs, pytest.raises(Faulty, match="a frame of 4,294,967,295 bytes"):
        process.receive()


def test_every_field_of_sampling_is_sent(side):
    one = side()
    one.write(Sampling(5, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, stop_ids=(7,), stop_strings=("x",)))
    sent = json.loads((one.state / "sampling.json").read_text())
    assert (sent["temperature"], sent["top_k"], sent["top_p"], sent["min_p"]) == (0.7, 3, 0.9, 0.1)
    assert sent["stop_token_ids"] == [7]
    assert (sent["stop"], sent["detokenize"]) == (["x"], True)
    assert sent["ignore_eos"] is True


def test_a_prompt_is_sent_as_it_is_whatever_is_written_beside_it(side):
    """Defect C6 of TRL 1.16's Online DPO: shorter prompts were padded on the left, and the pads attended."""
    groups = [Group(tuple(range(3, 3 + length)), 1, seed=length) for length in (2, 9, 5)]
    one = side()
    together = one.sampler.generate(groups, SAMPLING)
    assert together == [one.sampler.generate([group], SAMPLING)[0] for group in groups]


def test_weights_are_sent_whole_once_for_each_version_and_the_cache_emptied(side):
    one = side()
    first = one.write()
    assert one.write() == first
    assert one.noted.count("reload") == 1
    with torch.no_grad():
        one.model.lm_head.weight.add_(1)
    one.version += 1
    assert one.write() != first
    order = [word for word in one.noted if not word.startswith("group")]
    assert order == ["start", "reload", "repack_tied_head", "reset", "reload", "repack_tied_head", "reset"]
    shapes = json.loads((one.state / "shapes.json").read_text())
    wanted = {name: list(tensor.shape) for name, tensor in one.model.state_dict().items()}
    assert shapes == wanted


def test_a_bucket_smaller_than_a_tensor_gives_the_same_weights(side):
    wide, narrow = side(), side()
    narrow.sampler.transport.bucket_bytes = 192
    wide.sampler.transport.bucket_bytes = 2**24
    assert narrow.write() == wide.write()
    assert not list((narrow.folder / "weights").iterdir())


def test_sleep_gives_back_after_writing_and_takes_weights_before_keys(side):
    one = side(sleep_level=2)
    one.write()
    one.version += 1
    one.write()
    assert [word for word in one.noted if not word.startswith(("group", "repack"))] == [
        *("start", "reload", "reset", "sleep 2"),
        *("wake weights", "reload", "reset", "wake kv_cache", "sleep 2"),
    ]


def test_a_deep_sleep_drops_the_weights_and_a_light_one_keeps_them(side):
    """The same version is asked twice: after level 2 the weights must come again.

    Defect C5 of TRL 1.16's Online DPO: it sent them when the step had moved, and wrote with none before.
    """
    deep, light = side(sleep_level=2), side(sleep_level=1)
    assert deep.write() == deep.write() == light.write() == light.write()
    assert (deep.noted.count("reload"), light.noted.count("reload")) == (2, 1)


def test_a_killed_process_is_replaced_and_only_missing_groups_are_written_again(side):
    undisturbed, killed = side(), side()
    killed.fault("die-after-2")
    assert killed.write() == undisturbed.write()
    seeds = [word for word in killed.noted if word.startswith("group")]
    assert seeds == ["group 0", "group 100", "group 200", "group 300"]
    assert killed.noted.count("start") == 2
    assert "by SIGKILL" in killed.reported[0]
    assert "2 groups are generated again" in killed.reported[0]


def test_a_hung_process_is_replaced_after_the_deadline(side):
    undisturbed, hung = side(), side(deadline_s=1.0)
    hung.fault("hang-after-1")
    assert hung.write() == undisturbed.write()
    assert "no answer before the deadline" in hung.reported[0]


def test_a_failed_load_is_not_repeated_on_the_same_process(side):
    one = side()
    one.fault("bad-sync")
    assert one.write() == side().write()
    assert one.noted.count("start") == 2
    assert "no such weight" in one.reported[0]


def test_a_cache_that_cannot_be_emptied_counts_as_a_failed_load(side):
    one = side()
    one.fault("stuck-cache")
    one.write()
    assert "prefix cache could not be emptied" in one.reported[0]


def test_a_process_that_fails_too_often_ends_the_run(side):
    one = side(restarts=1)
    one.fault("die-after-0-always")
    with pytest.raises(LaunchError, match="failed 2 times in one rollout"):
        one.write()


def test_the_trained_module_goes_on_where_the_recipe_says_so(side):
    class Native:
        name = "native"

        def generate(self, groups, sampling, on_done=None):
            made = [[Sample((1,), (0.0,), "length")] * group.count for group in groups]
            for number, samples in enumerate(made):
                on_done(number, samples)
            return made

    one = side(restarts=0, fallback=Native)
    whole = side().write()
    one.fault("die-after-3-always")
    assert one.write()[:3] == whole[:3]
    assert one.write()[0][0].token_ids == (1,)
    assert "the trained module generates from now on" in one.reported[0]
    assert one.noted.count("start") == 1


def test_an_engine_that_does_not_start_says_where_to_get_one(side):
    one = side()
    one.fault("no-start")
    with pytest.raises(LaunchError, match=r"does not start: RuntimeError: no such device") as caught:
        one.write()
    assert "generate.vllm.python" in caught.value.faults[0].fix


def test_an_interpreter_without_vllm_is_named(side, tmp_path):
    one = side()
    object.__setattr__(one.sampler.launch, "environment", {})
    with pytest.raises(LaunchError, match="No module named 'vllm'"):
        one.write()


def test_an_engine_with_other_weights_is_refused_before_it_writes(side):
    one = side(limit=0.3)
    with pytest.raises(LaunchError, match="nats from the trainer's for the same weights"):
        one.write()


def test_a_request_for_a_version_that_is_not_held_is_refused(side):
    one = side()
    one.write()
    process = one.sampler.process
    process.send({"op": "generate", "version": 7, "sampling": {}, "groups": []})
    with pytest.raises(Faulty, match="weights of version 7 were asked, 0 are held"):
        process.expect("ok")


def test_the_process_ends_with_its_trainer(side):
    """A trainer that is killed says nothing: the end of the connection must be enough."""
    one = side()
    one.write()
    process: Process = one.sampler.process
    process.socket.close()
    assert process.popen.wait(10) == 0


def test_the_kernel_ends_a_process_that_is_at_work_when_its_trainer_is_killed(side, tmp_path):
    """The parent is a process of its own, which kills itself while the engine hangs."""
    one = side()
    one.fault("hang-after-0")
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from memtrain.trainers.online.vllm.process import Launch, Process\n"
        f"launch = Launch({sys.executable!r}, {{}}, Path({str(tmp_path / 'log')!r}), 20, 20, "
        f"{dict(one.sampler.launch.environment)!r})\n"
        "process = Process(launch)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(process.pid, signal.SIGSTOP)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    made = os.popen(f"{sys.executable} {script}").read()
    pid = int(made.split()[0])
    until = time.monotonic() + 10
    while time.monotonic() < until and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    stat = Path("/proc", str(pid), "stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] not in "ZX"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_is_added_without_touching_the_model(tiny_llama, kind):
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=kind == "dora")
    adapted = get_peft_model(tiny_llama(), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    made = {name: tensor.clone() for name, tensor in vllm_weights(adapted)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapted.state_dict().items())
    merged = adapted.merge_and_unload().state_dict()
    assert set(made) == set(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(made[name], tensor, atol=1e-6, rtol=1e-5)


def test_an_adapter_is_added_in_float32_and_rounded_once(tiny_llama):
    adapted = get_peft_model(
        tiny_llama().bfloat16(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 1e-3)
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    update = 2.0 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    wanted = (layer.base_layer.weight.float() + update).bfloat16()
    made = dict(vllm_weights(adapted))["model.layers.0.self_attn.q_proj.weight"]
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, wanted)


def test_a_tied_head_is_left_out_and_a_saved_one_refused(tiny_llama):
    tied = tiny_llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(vllm_weights(tied))
    saved = get_peft_model(tied, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(LaunchError, match="vLLM would use it for both"):
        dict(vllm_weights(saved))


def test_a_module_that_is_trained_whole_is_sent_as_trained(tiny_llama):
    adapted = get_peft_model(
        tiny_llama(tie_word_embeddings=False),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    )
    head = adapted.base_model.model.lm_head.modules_to_save["default"].weight
    with torch.no_grad():
        head.add_(1)
    made = dict(vllm_weights(adapted))
    assert torch.equal(made["lm_head.weight"], head)
    assert not [name for name in made if "original_module" in name or "modules_to_save" in name]


def test_packed_experts_go_by_the_names_of_the_checkpoint(tmp_path):
    """transformers stacks experts on loading; what it saves is what others load."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    made = dict(vllm_weights(model))
    assert set(made) == set(saved)
    assert all(torch.equal(made[name], tensor) for name, tensor in saved.items())


def test_buckets_hold_every_byte_once_at_aligned_places(tiny_llama):
    model = tiny_llama()
    buckets = list(in_buckets(vllm_weights(model), 1000 * 64))
    pieces = [piece for bucket in buckets for piece in bucket.pieces]
    assert all(piece.offset % 64 == 0 for piece in pieces)
    assert all(bucket.num_bytes <= 1000 * 64 for bucket in buckets)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(piece.num_bytes for piece in pieces) == total


def test_what_a_killed_trainer_left_in_memory_is_swept(tmp_path):
    """One whose process is seen to be gone; a process of another container is not seen, and may live."""
    space = pid_namespace()
    names = (f"999999999-{space}", f"{os.getpid()}-{space}", "999999999-other")
    gone, here, elsewhere = (tmp_path / f"{PREFIX}{name}-a" for name in names)
    for folder in (gone, here, elsewhere):
        folder.mkdir()
    sweep(tmp_path)
    assert not gone.exists()
    assert here.exists()
    assert elsewhere.exists()


def test_weights_go_through_the_run_folder_where_memory_has_no_room(tmp_path):
    transport = open_transport(tmp_path, 2**62, torch.device("cpu"), is_same_device=True)
    assert transport.folder.parent == tmp_path
    transport.close()
    assert not transport.folder.exists()
