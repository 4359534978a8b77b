"""Known cards, this machine, and what nvidia-smi says."""

import subprocess
import sys

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware import devices as hardware
from memtrain.memory.hardware.cards import ALIASES, CARDS, named_card
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.units import GIB, read_size

SMI = """0, GPU-aa, NVIDIA H100 80GB HBM3, 81559, 80994, 9.0, 551
1, GPU-bb, NVIDIA A100-SXM4-40GB, 40960, 40000, 8.0, [N/A]
"""


@pytest.mark.parametrize(
    ("name", "least_gib", "most_gib", "bf16"),
    [("h100", 79, 79.2, True), ("H200", 139, 140, True), ("a100-40", 39, 39.6, True)]
    + [("A100", 79, 79.3, True), ("4090", 23.4, 23.7, True), ("RTX 4090", 23.4, 23.7, True)]
    + [("t4", 14.5, 14.8, False), ("v100-16gb", 15.7, 15.8, False), ("l4", 21.9, 22.2, True)]
    + [("3060", 11.5, 11.8, True), ("rtx-pro-6000", 94.9, 95, True), ("b300", 267, 268, True)]
    + [("4060ti", 15.5, 15.6, True), ("RTX6000 Ada", 47.3, 47.4, True), ("rtxpro6000", 94.9, 95, True)]
    + [("NVIDIA GeForce RTX 4070 Ti SUPER", 15.5, 15.6, True), ("NVIDIA H100 80GB HBM3", 79, 79.2, True)]
    + [("A800-SXM4-80GB", 79, 79.3, True), ("h800", 79, 79.2, True), ("L20", 44.5, 44.6, True)]
    + [("NVIDIA H20", 94, 95, True), ("V100-SXM2-32GB", 31.7, 31.8, False)],
)
def test_a_named_card_has_its_memory_and_precision(name, least_gib, most_gib, bf16):
    card = Hardware.named(name)
    assert least_gib <= card.memory_bytes / GIB <= most_gib
    assert card.has_bfloat16 is bf16
    assert card.free_bytes == card.memory_bytes


@pytest.mark.parametrize("name", ["mi300x", "AMD Instinct MI250", "RX 7900 XTX"])
def test_a_gpu_of_amd_is_called_one(name):
    with pytest.raises(RecipeError, match="is an AMD GPU"):
        Hardware.named(name)


@pytest.mark.parametrize("name", ["RTX 3080 Ti", "3080-ti", "mi300", "gtx1080", "h1000", "xh100"])
def test_a_larger_sister_of_a_card_is_not_taken_for_it(name):
    assert named_card(name) is None


def test_no_card_has_more_than_it_is_sold_with():
    assert all(0.9 * card.sold_gib < card.torch_gib < card.sold_gib for card in CARDS)
    assert len({card.name.upper() for card in CARDS}) == len(CARDS)
    assert all(named_card(name) is not None for name in ALIASES)


@pytest.mark.parametrize(
    ("said", "name", "usable"),
    [("48GiB", "A6000", 47.40), ("24GiB", "3090", 23.56), ("80GiB", "A100-80", 79.14), ("8GiB", "3070", 7.65)]
    + [("20GiB", "L4", 21.95), ("47GiB", "6000-Ada", 47.37), ("500GiB", "B300", 267.69)],
)
def test_a_budget_is_for_a_card_of_that_size(said, name, usable):
    card = Hardware.for_budget(read_size(said))
    assert (card.name, card.memory_bytes) == (name, round(usable * GIB))


def test_the_memory_that_the_driver_keeps_is_not_the_programs():
    total = [card[1] // 2**20 for card in hardware.parse_smi(SMI, None)]
    assert total == [81559 - 551, 40960]


def test_a_driver_that_does_not_know_what_it_keeps_is_asked_without(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    row = "0, GPU-aa, NVIDIA A40, 46068, 45000, 8.6"
    smi.write_text(f'#!/bin/sh\ncase "$*" in *reserved*) exit 2;; esac\necho "{row}"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = hardware.detect()
    assert (found.name, found.memory_bytes // 2**20) == ("NVIDIA A40", 46068)


@pytest.mark.parametrize(("code", "name"), [(0, "NVIDIA H100 80GB HBM3"), (1, "CPU")])
def test_a_container_without_nvidia_smi_asks_torch_once(monkeypatch, tmp_path, code, name):
    """It trained on the CPU there, beside a GPU that torch could have used."""
    driver, python, asked = tmp_path / "nvidiactl", tmp_path / "python", tmp_path / "asked"
    driver.touch()
    row = "NVIDIA H100 80GB HBM3\t85000000000\t84000000000\t9\t0"
    python.write_text(f"#!/bin/sh\nprintf x >>{asked}\nprintf '{row}\\n'\nexit {code}\n")
    python.chmod(0o755)
    monkeypatch.setattr(hardware, "DRIVER", driver)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
    monkeypatch.setattr(hardware.sys, "executable", str(python))
    for _ in range(2):
        found = hardware.detect()
        assert (found.name, found.device) == (name, "cpu" if code else "cuda")
    assert asked.read_text() == "x"
    if not code:
        assert (found.memory_bytes, found.free_bytes) == (85_000_000_000, 84_000_000_000)
        assert found.compute_capability == (9, 0)


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


def test_every_line_of_the_table_is_a_possible_card():
    """A slip of a digit in a rate would time every run on that card wrongly."""
    for card in CARDS:
        assert 1.9 <= card.half_tflops / card.single_tflops <= 30.1, card.name
        # Operations that a product makes for each byte that the memory gives: 70 to 420 in all generations,
        # but 37 of an H20, whose products were made slow.
        assert (36 if card.name == "H20" else 60) <= card.half_tflops * 1e3 / card.gb_per_s <= 430, card.name
        assert card.pcie_gb_per_s in (16, 32, 64, 450), card.name
        assert 0 < card.reached <= 1, card.name


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
        "NVIDIA GB200": "B200",
        "NVIDIA A40": "A40",
        "NVIDIA L40": "L40",
        "NVIDIA RTX A5000": "A5000",
        "NVIDIA RTX A4000": "A4000",
        "NVIDIA RTX 6000 Ada Generation": "6000-Ada",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
        "NVIDIA GeForce RTX 4070 Ti SUPER": "4070-Ti-Super",
        "NVIDIA GeForce RTX 5070 Ti": "5070-Ti",
        "NVIDIA GeForce RTX 5070": "5070",
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
