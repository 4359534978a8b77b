"""What follows from the number of processes: written down in full, so that a change is seen."""

import os
import subprocess
import sys
from pathlib import Path

import memtrain
from memtrain.cli.launch.topology import (
    Engine,
    Topology,
    accelerate_config,
    argv,
    environment,
    started_environment,
)
from memtrain.trainers.tools.trace.client import _asked

ALONE = Topology(num_nodes=1, processes_per_node=1, device="cpu", threads=2)
TWO_CPU = Topology(num_nodes=1, processes_per_node=2, device="cpu", threads=1)
NODES = Topology(num_nodes=2, processes_per_node=8, device="cuda", threads=8)


def test_settings_say_the_topology(make_settings):
    assert Topology.of(make_settings(num_processes=16, device="cuda", threads=8), 2) == NODES
    assert (NODES.num_processes, NODES.engine, ALONE.engine) == (16, Engine.DDP, Engine.ALONE)


def test_a_topology_says_engine_stage_and_who_holds_rows(make_settings):
    cut = Topology.of(
        make_settings(
            num_processes=16, device="cuda", engine="fsdp2", context_parallel=4, context_by="ulysses"
        ),
        2,
    )
    assert cut.words() == "2 nodes with 8 processes on cuda: fsdp2, rows held by 4 (ulysses)"
    assert (cut.stage, cut.context_parallel, cut.context_by) == (0, 4, "ulysses")
    stages = [Topology.of(make_settings(num_processes=2, engine=f"zero{n}")).stage for n in (1, 2, 3)]
    assert stages == [1, 2, 3]
    assert ALONE.words() == "1 process on cpu: alone"


def test_the_configuration_of_accelerate_never_names_multi_cpu():
    expected = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "num_machines": 1,
        "machine_rank": 0,
        "main_process_port": 0,
        "mixed_precision": "no",
        "dynamo_backend": "NO",
        "use_cpu": False,
        "rdzv_backend": "static",
        "same_network": True,
    }
    assert accelerate_config(TWO_CPU) == expected
    assert accelerate_config(ALONE) == expected | {"distributed_type": "NO", "num_processes": 1}


def test_the_environment_says_threads_allocator_and_network():
    alone = {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    kept = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
    assert environment(ALONE) == alone | kept
    assert environment(TWO_CPU) == alone | kept | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    assert environment(NODES) == alone | {
        "OMP_NUM_THREADS": "8",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_a_file_of_the_folder_at_hand_is_none_of_pythons_own_modules(tmp_path, monkeypatch):
    """A numbers.py there ended two processes, and each trace, in an error of json that did not name it."""
    monkeypatch.chdir(tmp_path)
    Path("argparse.py").write_text("raise SystemExit(3)")
    for given, code in ((environment(TWO_CPU), 3), (started_environment(TWO_CPU), 0)):
        words = [sys.executable, "-m", "json.tool", "--help"]
        assert subprocess.run(words, env=os.environ | given, capture_output=True).returncode == code
    assert _asked("json.tool", "{}", 30.0) == "{}"


def test_a_tree_that_is_not_installed_is_found_in_the_folder_at_hand(monkeypatch):
    monkeypatch.chdir(Path(memtrain.__file__).parents[1])
    assert "PYTHONSAFEPATH" not in started_environment(ALONE)


def test_compiled_products_of_a_cpu_are_as_many_as_the_user_says(monkeypatch):
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1024")
    given = environment(ALONE)
    assert (given["LRU_CACHE_CAPACITY"], given["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("1024", "64")


def test_a_worker_gets_the_plan_and_its_digest():
    run, python = Path("runs/x"), "/env/bin/python"
    assert argv(ALONE, run, python, "0123abcd") == [
        python,
        "-m",
        "memtrain.trainers.loop.worker",
        "runs/x/plan.json",
        "--plan-digest",
        "0123abcd",
    ]
    assert argv(TWO_CPU, run, python, "0123abcd") == [
        python,
        "-m",
        "memtrain.trainers.runtime.loopback",
        "--config_file",
        "runs/x/accelerate.yaml",
        "-m",
        "memtrain.trainers.loop.worker",
        "runs/x/plan.json",
        "--plan-digest",
        "0123abcd",
    ]
