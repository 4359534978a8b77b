"""`memtrain plan` as a user runs it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain.cli.app import run
from memtrain.cli.plan.lookup import budget_words
from memtrain.errors import DoesNotFit, LaunchError, RecipeError
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.plan import PhasePeak, Prediction
from memtrain.memory.plan.units import gib
from memtrain.trainers.tools.trace.client import Traced

LLAMA = """
method: sft
model:
  config: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336,
           num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 8}
  tokenizer: builtin:tiny
data:
  train: {source: builtin:arithmetic, limit: 60}
length: {max_length: 512}
"""


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "llama.yaml"
    file.write_text(LLAMA)
    return str(file)


def reported(capsys) -> str:
    """What was printed, as one line."""
    return " ".join(capsys.readouterr().out.split())


SMALL = """
method: sft
model:
  config: {model_type: llama, vocab_size: 1000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 2}
  tokenizer: builtin:tiny
data: {train: builtin:arithmetic}
length: {max_length: 64}
train: {batch_size: 2}
memory: {activation_checkpointing: off, loss: full}
"""


def test_packages_of_another_machine_are_assumed_and_named_in_one_line(recipe, capsys, monkeypatch):
    """Every package that a plan computes with; none where it computes with none."""
    for module in ("memtrain.memory.rules.ledger", "memtrain.memory.estimate.pricing"):
        monkeypatch.setattr(f"{module}.installed", lambda *names: frozenset())
    Path(recipe).write_text(SMALL)
    packed = ["model.adapter={}", "model.quantize=4bit"]
    scored = [
        "method=rloo",
        "generate={num_generations: 2, max_tokens: 8}",
        "rewards.functions=[{function: exact_answer}]",
    ]
    cases = {
        "flash-attn": [["model.attention=flash"]],
        "FlashAttention-3": [["model.attention=flash3"]],
        "Liger": [["model.liger=on"], ["memory.loss=liger"]],
        "bitsandbytes": [["optim.kind=adamw_8bit"], packed],
        "DeepSpeed": [["cluster.engine=zero2", "--num-gpus", "2"]],
        "vLLM": [[*scored, "generate.backend=vllm"]],
        "flash-attn, Liger, bitsandbytes": [[*packed, "model.attention=flash", "model.liger=on"]],
        "": [[], ["memory.allow=[adamw_8bit]"], [*scored, "generate.backend=native"]],
    }
    for named, words in ((name, one) for name, many in cases.items() for one in many):
        run(["plan", recipe, "--gpu", "h200", "--without-data", "--json", *words])
        notes = [one for one in json.loads(capsys.readouterr().out)["notes"] if "that the machine has" in one]
        assert len(notes) == bool(named), words
        every = ("flash-attn", "FlashAttention-3", "Liger", "bitsandbytes", "DeepSpeed", "vLLM")
        assert ", ".join(name for name in every if notes and f"{name} (" in notes[0]) == named, words


def test_the_packages_of_the_card_in_this_machine_are_looked_at(recipe, monkeypatch):
    """By the name of its driver; another card is another machine, whatever is here."""
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset())
    here = replace(Hardware.named("h100"), name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("memtrain.cli.plan.lookup.detect", lambda device: here)
    Path(recipe).write_text(SMALL)
    asked = ["plan", recipe, "--without-data", "model.attention=flash"]
    for gpu in ([], ["--gpu", "h100"]):
        with pytest.raises(RecipeError, match="the flash-attn package is not installed"):
            run([*asked, *gpu])
    assert run([*asked, "--gpu", "a100"]) == 0


def test_a_plan_for_a_card_that_is_not_here_says_what_fits_and_stays_within_80_columns(recipe, capsys):
    run(["plan", recipe, "--gpu", "h100"])
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "llama.yaml on H100, 79.10 GiB: fits" in words
    assert "60 rows" in words
    assert "of 79.10 GiB." in words
    assert "29.92" in words
    assert " without (rule)" in words
    assert max(len(line) for line in out.splitlines()) <= 80


def test_the_lines_from_live_tensors_to_the_card_add_up(recipe, capsys):
    run(["plan", recipe, "--gpu", "h100", "--without-data"])
    lines = capsys.readouterr().out.splitlines()
    start = next(at for at, line in enumerate(lines) if "live tensors, highest" in line)
    units = {"GiB": 1.0, "MiB": 1 / 1024}
    numbers = [float(line.split()[0]) * units[line.split()[1]] for line in lines[start : start + 5]]
    assert sum(numbers[:4]) == pytest.approx(numbers[4], abs=0.02)


def test_explaining_tells_the_others_the_sizes_and_the_pins(recipe, capsys):
    run(["plan", recipe, "--gpu", "a100-40", "--without-data", "--explain", "memory.allow=lora"])
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "every sequence is assumed to have 512 tokens" in words
    assert "left out" in words
    assert "memory.allow: [adafactor] permits it" in words
    assert "The best plan of each size" in words
    assert "  activation_checkpointing:" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("asked", [["--num-gpus", "2"], ["cluster.processes=2"]])
def test_a_plan_as_json_is_all_that_is_printed_and_holds_everything(asked: list[str], recipe, capsys):
    """Of a card that is named there are as many as processes."""
    run(["plan", recipe, "--gpu", "h200", *asked, "--without-data", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"]["count"] == 2
    assert plan["settings"]["num_processes"] == 2
    assert plan["without_margin_bytes"] < plan["need_bytes"] <= plan["budget_bytes"]
    assert plan["data_was_read"] is False
    assert plan["frontier"]
    assert plan["left_out"]["qlora"]
    assert {one["strategy"] for one in plan["gains"]}.isdisjoint(plan["left_out"])
    assert plan["traced"] is None


def test_console_json_and_page_say_the_same_need_and_no_other(recipe, tmp_path, capsys):
    """The sum of the console ends in the need; JSON and the page have that number."""
    asked = ["plan", recipe, "--gpu", "4090", "--without-data", "model.adapter={r: 8}"]
    run([*asked, "--json"])
    made = json.loads(capsys.readouterr().out)
    need, budget = (f"{made[key] / 2**30:.2f} GiB" for key in ("need_bytes", "budget_bytes"))
    run(asked)
    shown = reported(capsys)
    assert f"fits, needs {need} of {budget}." in shown
    assert f"{need} of {budget} Host memory" in shown
    assert f"Host memory: {made['host']['need_bytes'] / 2**30:.2f} GiB" in shown
    run([*asked, "--html", str(tmp_path / "p.html")])
    page = " ".join((tmp_path / "p.html").read_text().split())
    assert f"needs on each device</span><b>{need}</b><small>of {budget}, margin included" in page
    sizes = re.findall(r"(\S+ [GM]iB) (?:live tensors|the allocator|CUDA context|margin)", shown)
    assert len(sizes) == 4
    assert all(f">{size}</td>" in page for size in sizes)
    parts = [size for size in made["need_parts"].values() if size]
    assert sizes == [gib(size) for size in parts]
    assert sum(parts) == pytest.approx(made["need_bytes"], abs=1)


def test_a_plan_has_one_speed_also_where_it_writes_completions(tmp_path, monkeypatch, capsys):
    """The table of plans counted the update alone: 7,062 tokens/s beside 1,471 of the same plan."""
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "grpo/qwen3-4b-lora", "--gpu", "l40s", "--without-data"]
    run([*asked, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made["rollout_s"] > 0
    speeds = [one["tokens_per_s"] for one in made["frontier"] if one["need_bytes"] == made["need_bytes"]]
    assert speeds == [pytest.approx(made["tokens_per_s"])]
    run([*asked, "--explain"])
    said = f"{made['tokens_per_s']:,.0f}"
    table = capsys.readouterr().out.split("The best plan of each size")[1]
    assert re.search(rf"^\* .*GiB +{said} ", table, re.MULTILINE)
    run([*asked, "--solve", "max_length"])
    assert "in the update, completions not counted" in reported(capsys)


def test_ways_out_heed_the_host_memory_that_is_given(recipe):
    """A larger card was offered with 164 GiB of host beside it where 64 are; and 127 GiB were said to be
    needed where a plan does with 93."""
    asked = ["plan", recipe, "--gpu", "h100", "--without-data", "length.max_length=4096"]
    with pytest.raises(DoesNotFit) as refused:
        run([*asked, "--host-memory", "64GiB"])
    said = str(refused.value)
    assert "the plan needs 93.00 GiB of host memory, but only 64.00 GiB are there" in said
    larger = re.search(r"a larger card, (\S+) of", said)
    assert larger is not None
    run(
        ["plan", recipe, "--gpu", larger[1], "--without-data", "length.max_length=4096"]
        + ["--host-memory", "64GiB"]
    )
    run([*asked, "--host-memory", "93.01GiB"])


@pytest.mark.parametrize(
    ("asked", "said", "way"),
    [
        (
            "model.adapter={}",
            "3.00 GiB of host memory, but only 2.00 GiB are there (processes",
            "a machine with",
        ),
        (
            "save.layout=sharded",
            "6.50 GiB of host memory, but only 2.00 GiB are there (proc",
            "lower cluster.pro",
        ),
        (
            "save.layout=full",
            "of host memory, but only 2.00 GiB are there (checkpoint",
            "set save.layout: sharded",
        ),
    ],
)
def test_a_plan_that_moves_nothing_to_the_host_fits_it_too(recipe, asked, said, way):
    """What processes and a save need was printed as 968 of 90 GiB beside "fits". Two processes that write
    shards have 256 MiB of pieces each."""
    several = ["cluster.processes=2", "cluster.engine=fsdp2"] if "save" in asked else []
    card = ["--gpu", "h200", "--num-gpus", str(max(1, len(several))), "--host-memory", "2GiB"]
    with pytest.raises(DoesNotFit) as refused:
        run(["plan", recipe, *card, "--without-data", asked, *several])
    assert said in refused.value.faults[0].what
    assert way in refused.value.faults[0].fix


def test_a_plan_as_a_page_is_written_and_loads_nothing(recipe, tmp_path, capsys):
    run(["plan", recipe, "--gpu", "h100", "--without-data", "--html", str(tmp_path / "p.html")])
    text = (tmp_path / "p.html").read_text()
    assert "wrote" in capsys.readouterr().out
    assert "llama.yaml on H100, 79.10 GiB" in text
    assert "steady step" in text
    assert "http" not in text


def test_a_budget_without_a_unit_is_gib_as_for_the_card(recipe, capsys):
    """The card was one of 48 GiB, and the recipe's budget 48 bytes."""
    for budget in ("48GiB", "48", "48.0"):
        run(["plan", recipe, "--budget", budget, "--without-data", "model.adapter={}", "--json"])
        made = json.loads(capsys.readouterr().out)
        assert (made["device"]["name"], gib(made["budget_bytes"])) == ("A6000", "47.40 GiB")


def test_a_budget_limits_the_plan_and_what_does_not_fit_is_refused_with_ways_out(recipe):
    away = "memory.weights_offload=off"
    with pytest.raises(DoesNotFit, match=r"24\.00 GiB[\s\S]*lora"):
        run(["plan", recipe, "--gpu", "h100", "--budget", "24GiB", "--without-data", away])


@pytest.mark.parametrize(
    ("words", "budget", "said"),
    [
        (["--gpu", "h100", "--budget", "96GiB"], 96, "at the speed of H100: that has 79.10 GiB"),
        (["--budget", "1TiB"], 1024, "at the speed of B300: no known card has more than 267.7 GiB"),
    ],
)
def test_a_budget_above_the_card_is_planned_as_asked_and_said(recipe, words, budget, said, capsys):
    run(["plan", recipe, "--without-data", *words])
    assert said in reported(capsys)
    run(["plan", recipe, "--without-data", "--json", *words])
    assert json.loads(capsys.readouterr().out)["budget_bytes"] == budget * 2**30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h9000"], "unknown GPU"),
        (["--budget", "much"], "not a size"),
        (["--num-gpus", "8"], "needs a kind of GPU"),
        (["--gpu", "h100", "cluster.device=cpu"], "cluster.device: cpu"),
        (["--gpu", "h100", "--without-data", "length.max_length=null"], "the length of the rows is unknown"),
        (
            ["--gpu", "h100", "--without-data", "--solve", "speed"],
            "max_length, micro_batch, budget, num_gpus",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_words(recipe, words, said):
    with pytest.raises(RecipeError) as caught:
        run(["plan", recipe, *words])
    assert said in caught.value.text()


def test_a_model_that_is_nowhere_is_refused_and_a_known_one_is_planned_without_the_hub(capsys):
    run(["plan", "sft/llama-3.1-8b-full", "--gpu", "h200"])
    words = reported(capsys)
    assert "the shape of meta-llama/Llama-3.1-8B-Instruct is from memtrain's own table" in words
    assert "every sequence is assumed to have 4,096 tokens" in words
    with pytest.raises(LaunchError, match="not in memtrain's table"):
        run(["plan", "sft/llama-3.1-8b-full", "--gpu", "h200", "model.path=someone/other"])


@pytest.mark.slow
def test_the_other_way_round_what_is_found_fits_and_the_next_does_not(recipe, capsys):
    command = ["plan", recipe, "--gpu", "h100", "--without-data", "--json", "memory.never=[weights_offload]"]
    run([*command, "--solve", "max_length"])
    longest = json.loads(capsys.readouterr().out)["value"]
    assert longest % 64 == 0
    run([*command, f"length.max_length={longest}"])
    capsys.readouterr()
    with pytest.raises(DoesNotFit):
        run([*command, f"length.max_length={longest + 64}"])
    run([*command, "--solve", "budget"])
    budget = json.loads(capsys.readouterr().out)
    run([*command, f"memory.budget={budget['keys']['memory.budget']}"])
    capsys.readouterr()
    with pytest.raises(DoesNotFit):
        run([*command, f"memory.budget={budget['value'] - 2**28}B"])
    run([*command, "--solve", "micro_batch"])
    assert json.loads(capsys.readouterr().out)["value"] == 32 * 512
    run(["plan", recipe, "--gpu", "h100", "--without-data", "--solve", "num_gpus"])
    assert "One H100 is enough" in reported(capsys)
    run(["plan", "sft/llama-3.1-8b-full", "--gpu", "4090", "--without-data", "--solve", "num_gpus"])
    said = reported(capsys)
    assert "4090 are enough, and fewer are not" in said
    assert "They share weights, gradients and moments (fsdp2)." in said


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("24GiB", "the known card of that size, 3090"),
        ("20GiB", "the smallest known card that has as much, L4"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a budget is for the GPU that is here")
def test_a_budget_names_the_card_that_it_is_for(capsys, budget: str, words: str):
    run(["plan", "sft/qwen3-0.6b-lora", "--budget", budget, "--without-data"])
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_smallest_budget_is_one_that_the_host_has_room_for(capsys):
    """A host of 6 GiB has no room for the weights; and tiles of the loss are as small as any."""
    command = ["plan", "sft/qwen3-8b-qlora", "--gpu", "h100", "--without-data", "--json", "--host-memory"]
    budgets: list[dict[str, Any]] = []
    for words in (["6GiB"], ["6GiB", "memory.loss_chunk_size=16MiB"]):
        run([*command, *words, "--solve", "budget"])
        budgets.append(json.loads(capsys.readouterr().out))
    assert budgets[0]["value"] <= budgets[1]["value"]
    run([*command, "6GiB", f"memory.budget={budgets[0]['keys']['memory.budget']}"])
    with pytest.raises(DoesNotFit, match="host memory"):
        run([*command, "2GiB", "--solve", "budget", "memory.weights_offload=on"])


def test_the_first_answer_loads_no_torch_and_takes_about_a_second():
    """Of the processor, imports included: other programs may be waiting for it too."""
    code = (
        "import sys, time\nfrom memtrain.__main__ import main\n"
        "assert main(['plan', 'sft/llama-3.1-8b-full', '--gpu', 'h200', '--explain']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "print(time.process_time(), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stderr.split()[-1]) < 4.0


@pytest.mark.parametrize(
    ("reserved", "least", "words"),
    [
        (
            17,
            16,
            "17.00 GiB reserved (+6.2%; the plan takes +5%), so 18.25 GiB with context and margin: it fits.",
        ),
        (24, 16, "more than 23.50 GiB. It still fits, in 17.23 GiB"),
        (24, 23, "and 24.37 GiB at least: it does not fit 23.50 GiB by this trace."),
    ],
)
def test_the_allocators_part_of_a_trace_is_reported_against_the_card(
    recipe, capsys, monkeypatch, reserved, least, words
):
    def traced(job):
        peak = PhasePeak(phase="steady step", num_bytes=16 * 2**30, owners=())
        reported = Prediction(phases=(peak,), method="trace", budget_bytes=None)
        assert job.is_whole, "--explain traces a model of 32 layers whole"
        return Traced(
            prediction=reported, reserved_bytes=reserved * 2**30, least_bytes=least * 2**30, seconds=1.0
        )

    monkeypatch.setattr("memtrain.trainers.tools.trace.client.traced", traced)
    asked = ["plan", recipe, "--gpu", "4090", "model.adapter={r: 8}", "--trace", "--explain"]
    run(asked)
    assert words in reported(capsys)
    run([*asked, "--json"])
    made = json.loads(capsys.readouterr().out)
    assert made["traced_need_bytes"] == pytest.approx((reserved + 0.648) * 2**30 * 1.02 + 2**28, rel=1e-3)


def test_two_shallow_models_stand_for_a_deep_one_unless_the_plan_is_explained(recipe, capsys, monkeypatch):
    def traced(job):
        assert not job.is_whole
        peak = PhasePeak(phase="steady step", num_bytes=16 * 2**30, owners=())
        reported = Prediction(phases=(peak,), method="trace", budget_bytes=None)
        return Traced(prediction=reported, reserved_bytes=None, seconds=1.0)

    monkeypatch.setattr("memtrain.trainers.tools.trace.client.traced", traced)
    run(["plan", recipe, "--gpu", "4090", "model.adapter={r: 8}", "--trace"])
    assert "With --explain the trace goes through every layer" in reported(capsys)


@pytest.mark.slow
def test_a_plan_is_checked_by_a_trace_of_the_runs_own_step(recipe, capsys):
    run(["plan", "smoke/sft", "--trace", "--explain"])
    assert "Checked on the run's own step: traced" in reported(capsys)


def test_where_activations_wait_is_reported_and_a_folder_that_nothing_uses(recipe, capsys):
    words = ["plan", recipe, "--gpu", "h100", "model.adapter={r: 8}", "memory.offload_disk=/scratch"]
    words += ["memory.offload_host=64MiB", "memory.activation_checkpointing=on"]
    run([*words, "memory.activation_offloading=on", "memory.offload_keep=8"])
    used = reported(capsys)
    assert "offloaded activations beyond 64.0 MiB of a process" in used
    assert "the last 8 layers keep theirs" in used
    run(words)
    assert "not used: nothing is offloaded" in reported(capsys)


def test_the_hosts_memory_is_what_the_command_says(capsys):
    """262,144 tokens x 8,192 numbers x 2 bytes x 80 layers, all but the last layers', is up to 320 GiB."""
    long = ["plan", "sft/llama-3.3-70b-qlora", "--gpu", "h100", "--without-data", "length.max_length=262144"]
    long += ["train.batch_size=1"]
    with pytest.raises(DoesNotFit, match="of host memory, but only 140.0 GiB"):
        run(long)
    run([*long, "--host-memory", "512GiB"])
    words = reported(capsys)
    assert "on H100, 79.10 GiB: fits" in words
    assert "streamed_layers" in words
    assert "model.rope_scaling: {rope_type: llama3, factor: 16} scales its positions" in words


def test_the_hosts_memory_is_reported_by_phase_and_kind(recipe, capsys):
    """8 rows of 8 inputs wait in locked memory; processes and a tensor being written are pageable."""
    words = ["plan", recipe, "--gpu", "h100", "--without-data", "memory.activation_checkpointing=on"]
    words += ["memory.activation_offloading=on", "memory.loss=chunked"]
    run(words)
    text = " ".join(capsys.readouterr().out.split())
    assert "Host memory: " in text
    assert "offloaded activations" in text
    run([*words, "--json"])
    host = json.loads(capsys.readouterr().out)["host"]
    assert "offloaded activations" in host["pinned"]
    assert set(host["phases"]) == {"data preparation", "steps", "saving"}
    assert host["need_bytes"] == max(sum(owners.values()) for owners in host["phases"].values())
    assert host["phases"]["saving"]["checkpoint being written"] > 0


def test_a_budget_is_planned_for_a_card_sold_with_so_much_which_is_named(capsys):
    run(["plan", "sft/qwen3-0.6b-lora", "--budget", "48GiB", "--without-data"])
    words = reported(capsys)
    assert "A6000, 47.40 GiB: fits" in words
    assert "of that size, A6000, of which a program can use 47.40 GiB" in words
    assert "of 47.40 GiB" in words


def test_positions_are_scaled_by_the_recipe(capsys):
    scaled = ["sft/llama-3.1-8b-qlora", "model.rope_scaling={rope_type: llama3, factor: 16}"]
    run(["plan", *scaled, "--gpu", "h100", "--without-data", "length.max_length=200000"])
    words = reported(capsys)
    assert "llama3 x 16" in words
    assert "rows of up to 262,144 tokens; the adapter does not carry it" in words


def test_the_plan_says_why_it_is_for_these_devices(recipe, capsys):
    assert run(["plan", "smoke/sft", "--without-data", "cluster.device=cpu"]) == 0
    assert "for this machine's CPU, as cluster.device says (from the command line: " in reported(capsys)
    assert run(["plan", recipe, "--without-data", "--gpu", "h100", "model.adapter={}"]) == 0
    assert "The plan is for" not in reported(capsys)


def test_a_budget_that_no_program_gets_of_the_card_is_told():
    card = Hardware.named("h100")
    said = budget_words(200 * 2**30, card, "my.yaml:3:11")
    assert "asks for 200.0 GiB (my.yaml:3:11), and a program gets 79.10 GiB of H100" in said
    assert not any(budget_words(one, card, "") for one in ("auto", 2**30, card.memory_bytes, card.sold_bytes))
