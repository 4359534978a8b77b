"""Known cards, this machine, and what nvidia-smi says."""

import subprocess
import sys

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware import devices as hardware
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import GIB

SMI = """0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 80994, 9.0
1, GPU-bb, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0
"""


@pytest.mark.parametrize(
    ("name", "least_gib", "most_gib", "bf16"),
    [("h100", 79, 80, True), ("H200", 139, 141, True), ("a100-40", 40, 40, True), ("A100", 80, 80, True)]
    + [("4090", 23, 24, True), ("t4", 15, 15, False), ("v100-16gb", 16, 16, False), ("l4", 22, 23, True)],
)
def test_a_named_card_has_its_memory_and_precision(name, least_gib, most_gib, bf16):
    card = Hardware.named(name)
    assert least_gib <= card.memory_bytes / GIB <= most_gib
    assert card.has_bfloat16 is bf16
    assert card.free_bytes == card.memory_bytes


def test_an_unknown_card_is_refused_with_the_known_ones():
    with pytest.raises(RecipeError, match=r"h9000[\s\S]*h100.*--budget"):
        Hardware.named("h9000")


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"]), ("1", ["NVIDIA A100-SXM4-40GB"])]
    + [("GPU-aa", ["NVIDIA H100 80GB HBM3"]), ("", [])],
)
def test_only_visible_cards_count(visible, names):
    assert [card[0] for card in hardware.parse_smi(SMI, visible)] == names


def test_of_unlike_cards_the_smallest_decides(monkeypatch):
    monkeypatch.setattr(hardware, "_visible_cards", lambda: hardware.parse_smi(SMI, None))
    found = hardware.detect()
    assert (found.num_devices, found.memory_bytes // GIB, found.compute_capability) == (2, 40, (8, 0))
    assert found.rates == Hardware.named("a100-40").rates


def test_drivers_names_find_their_own_line_of_the_table():
    lines = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA H200": "H200",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA A100-SXM4-80GB": "A100-80",
        "NVIDIA A10G": "A10G",
        "NVIDIA A10": "A10",
        "NVIDIA L40S": "L40S",
        "NVIDIA L4": "L4",
        "NVIDIA GeForce RTX 4090": "4090",
        "Tesla T4": "T4",
        "NVIDIA B200": "B200",
    }
    assert {name: hardware._card_of(name, (0, 0)).name for name in lines} == lines


def test_a_machine_without_a_gpu_is_a_cpu_with_its_memory():
    found = hardware.detect("cpu")
    assert (found.device, found.num_devices) == ("cpu", 1)
    assert 0 < found.free_bytes <= found.memory_bytes == found.host_bytes


def test_looking_at_the_machine_loads_no_torch():
    code = (
        "import sys; from memtrain.memory.hardware.devices import detect; detect(); "
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("h100", "h100"),
        ("nvidia_a100-sxm4-40gb", "a100-40"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("nvidia_geforce_rtx_4090", "4090"),
        ("tesla_v100-sxm2-32gb", "v100-32"),
        ("a100", None),
        ("radeon", None),
    ],
)
def test_a_card_is_known_by_what_a_cluster_calls_it(said: str, name: str | None):
    assert hardware.card_name(said) == name
