"""Devices, their memory and their rates."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from memtrain.errors import RecipeError
from memtrain.memory.hardware.calibration import Measured, launches_of, measured_of
from memtrain.memory.hardware.cards import (
    CARDS,
    REACHED,
    Card,
    card_of_driver,
    is_of_amd,
    named_card,
    sold_card,
)
from memtrain.memory.hardware.host import host_memory
from memtrain.memory.plan.units import GIB, MIB, gib

HOST_PER_CARD = 1.75
"""Host memory that is assumed beside a named card, as a multiple of the memory it is sold with. Cloud
nodes have 1.8 (A100-80 in p4de, H200 in p5en) to 3.2 (H100 in p5) times as much; `--host-memory` says how
much there is."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that a device reaches in practice, not the data sheet's."""

    half_matmul_per_s: float
    """Floating-point operations a second of a large bfloat16 (or float16) matrix product."""
    single_matmul_per_s: float
    """The same in float32 (TF32 off, torch's default)."""
    bytes_per_s: float
    """Device memory read and written by elementwise kernels."""
    host_bytes_per_s: float
    """Speed of one direction between pinned host memory and the device."""
    launch_s: float
    """Host time of one eager operation."""
    kernel_s: float
    """Shortest kernel."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of one node and the host they sit in. On `cpu` the device is the host."""

    name: str
    device: Literal["cpu", "cuda"]
    num_devices: int
    memory_bytes: int
    """Memory of one device."""
    free_bytes: int
    """Memory that is free now; all memory for a device that is only named."""
    host_bytes: int
    """Memory that the processes of this node may use: RAM, or the limit of the container."""
    num_cores: int
    compute_capability: tuple[int, int] | None
    """CUDA only."""
    has_bfloat16: bool
    """The device computes in bfloat16 at full speed."""
    rates: Rates
    num_nodes: int = 1
    """Number of such nodes."""
    sold_bytes: int = 0
    """Memory that a named card is sold with, a little more than a program can use; 0 for another."""
    own_bytes: int = 0
    """Memory of the device itself, where a plan counts with more than it has; 0: it does not."""
    measured: Measured | None = None
    """Measurements of `memtrain calibrate` on this very machine; None: rates and overheads are typical."""

    @staticmethod
    def named(name: str, num_devices: int = 1) -> Hardware:
        """A node with `num_devices` of a known card (`h100`, `a100-40`, `4090`, ...), all memory free.

        Host: HOST_PER_CARD times the memory of all cards, at least 64 GiB, and 8 cores a card, as rented
        nodes come.

        Raises: RecipeError for a name that is not in the table.
        """
        card = named_card(name)
        if card is None and is_of_amd(name):
            raise RecipeError(
                f"{name} is an AMD GPU, and memtrain has not been run on ROCm",
                where="--gpu",
                fix="name an NVIDIA card; or plan memory only, with --budget 192GiB",
            )
        if card is None:
            raise RecipeError(
                f"unknown GPU: {name}",
                where="--gpu",
                fix=f"give one of {', '.join(known_names())}; or give its size with --budget 24GiB",
            )
        return _of_table(card, num_devices)

    @property
    def presumes_host(self) -> bool:
        """Whether nobody said how much memory the host has: it is what is assumed beside named cards."""
        return self.sold_bytes > 0 and self.host_bytes == presumed_host(self.sold_bytes, self.num_devices)

    @staticmethod
    def for_budget(num_bytes: int, num_devices: int = 1) -> Hardware:
        """The known card that a budget of so much is for (see `sold_card`); the largest where none has it."""
        card = sold_card(num_bytes) or max(CARDS, key=lambda card: card.torch_gib)
        return _of_table(card, num_devices)

    def with_devices(self, num_devices: int) -> Hardware:
        """The same node with another number of devices."""
        return replace(self, num_devices=num_devices)

    def with_more_memory(self, num_bytes: int) -> Hardware:
        """The same node, each device with so much memory, all of it free."""
        return replace(self, memory_bytes=num_bytes, free_bytes=num_bytes, own_bytes=self.memory_bytes)

    def rates_of(self, threads: int, num_processes: int) -> Rates:
        """Rates that a process of so many reaches: on a CPU with its threads, as far as there are cores.

        `rates` of a CPU are those of all its cores together, but for bytes, which are those of one.
        """
        if self.device == "cuda":
            return self.rates
        cores = min(threads, self.num_nodes * self.num_cores / num_processes)
        share = cores / self.num_cores
        return replace(
            self.rates,
            half_matmul_per_s=share * self.rates.half_matmul_per_s,
            single_matmul_per_s=share * self.rates.single_matmul_per_s,
        )

    def words(self) -> str:
        """The hardware in a line for people."""
        count = f"{self.num_devices} x " if self.num_devices > 1 else ""
        nodes = f"{self.num_nodes} nodes with " if self.num_nodes > 1 else ""
        return f"{nodes}{count}{self.name}, {gib(self.memory_bytes)}"


CPU_RATES = Rates(
    half_matmul_per_s=40e9,
    single_matmul_per_s=60e9,
    bytes_per_s=8e9,
    host_bytes_per_s=8e9,
    launch_s=8e-6,
    kernel_s=2e-6,
)
"""Rates of one core. Measured: x86 server core, torch 2.13, 1024-wide products; bfloat16 without AMX is
slower."""


def known_names() -> tuple[str, ...]:
    """Names that `named` takes."""
    return tuple(card.name.lower() for card in CARDS)


def card_name(driver_name: str) -> str | None:
    """The name in the table of a card that a driver, or a cluster, calls so; None for an unknown card, or a
    card of several sizes."""
    lowered = driver_name.lower().replace("_", " ")
    if lowered.strip() in known_names():
        return lowered.strip()
    card = card_of_driver(lowered)
    return None if card is None else card.name.lower()


def cpu(host_bytes: int, num_cores: int) -> Hardware:
    """A machine without a GPU, given its memory and cores."""
    rates = replace(
        CPU_RATES,
        half_matmul_per_s=CPU_RATES.half_matmul_per_s * num_cores,
        single_matmul_per_s=CPU_RATES.single_matmul_per_s * num_cores,
    )
    return Hardware(
        name="CPU",
        device="cpu",
        num_devices=1,
        memory_bytes=host_bytes,
        free_bytes=host_bytes,
        host_bytes=host_bytes,
        num_cores=num_cores,
        compute_capability=None,
        has_bfloat16=True,
        rates=rates,
    )


def detect(device: Literal["auto", "cpu", "cuda"] = "auto") -> Hardware:
    """The hardware of this machine. Asks nvidia-smi, not torch, so that it costs milliseconds and creates no
    context; torch in a process of its own where the driver is there without nvidia-smi.

    `auto` takes the GPUs that CUDA_VISIBLE_DEVICES leaves visible; of unlike cards the smallest counts.
    """
    limit, available = host_memory()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cards = [] if device == "cpu" else _visible_cards()
    if not cards:
        return _calibrated(replace(cpu(limit, num_cores), free_bytes=available))
    name, total, free, capability = min(cards, key=lambda card: card[1])
    card = _card_of(name, capability)
    found = _from_card(card, len(cards), total, limit, num_cores)
    return _calibrated(replace(found, name=name, free_bytes=free, compute_capability=capability))


def _calibrated(found: Hardware) -> Hardware:
    """The hardware of this machine with its measured rates, where there are any. Rates of a CPU are of one
    core."""
    measured, launches = measured_of(found.name), launches_of(found.name)
    if measured is None:
        known = found.rates if launches is None else replace(found.rates, launch_s=launches.launch_s)
        return replace(found, rates=known)
    cores = found.num_cores if found.device == "cpu" else 1
    rates = Rates(
        half_matmul_per_s=measured.half_matmul_per_s * cores,
        single_matmul_per_s=measured.single_matmul_per_s * cores,
        bytes_per_s=measured.bytes_per_s,
        host_bytes_per_s=measured.host_bytes_per_s,
        launch_s=measured.launch_s if launches is None else launches.launch_s,
        kernel_s=found.rates.kernel_s,
    )
    return replace(found, rates=rates, measured=measured)


def parse_smi(text: str, visible: str | None) -> list[tuple[str, int, int, tuple[int, int]]]:
    """(name, total bytes, free bytes, compute capability) of each GPU in nvidia-smi's CSV that is visible.

    The total is torch's: without the memory that the driver keeps for itself (`memory.reserved`, the last
    column, where the driver says it). `visible` is CUDA_VISIBLE_DEVICES: indices or UUIDs; None shows all, an
    empty word none.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    wanted = None if visible is None else [word.strip() for word in visible.split(",") if word.strip()]
    cards: list[tuple[str, int, int, tuple[int, int]]] = []
    for index, uuid, name, total, free, capability, *reserved in rows:
        if wanted is not None and index not in wanted and not any(uuid.startswith(w) for w in wanted):
            continue
        major, minor = capability.split(".")
        kept = int(reserved[0]) if reserved and reserved[0].isdigit() else 0
        usable = (int(total) - kept) * MIB
        cards.append((name, usable, min(usable, int(free) * MIB), (int(major), int(minor))))
    return cards


SMI_COLUMNS = "index,uuid,name,memory.total,memory.free,compute_cap"


def _visible_cards() -> list[tuple[str, int, int, tuple[int, int]]]:
    if shutil.which("nvidia-smi") is None:
        return list(_cards_of_torch(sys.executable)) if DRIVER.exists() else []
    # Drivers before 470 do not know memory.reserved, and answer nothing where they are asked for it.
    for columns in (f"{SMI_COLUMNS},memory.reserved", SMI_COLUMNS):
        said = said_by_smi(columns)
        if said is not None:
            return parse_smi(said, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return []


def said_by_smi(columns: str) -> str | None:
    """Columns of nvidia-smi, a line for each card; None where it is not there or does not know one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = subprocess.run(
        [program, f"--query-gpu={columns}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return asked.stdout if asked.returncode == 0 else None


DRIVER = Path("/dev/nvidiactl")
"""File of NVIDIA's driver, also in containers that are not given nvidia-smi."""
ASK_TORCH = """
import torch
for number in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(number)
    found = torch.cuda.get_device_properties(number)
    print(found.name, total, free, found.major, found.minor, sep="\\t")
"""


@cache
def _cards_of_torch(python: str) -> tuple[tuple[str, int, int, tuple[int, int]], ...]:
    """Cards that torch sees, asked once and in another process, for seconds; none where it fails."""
    try:
        asked = subprocess.run(
            [python, "-c", ASK_TORCH], capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        return ()
    rows = [line.split("\t") for line in asked.stdout.splitlines()] if asked.returncode == 0 else []
    return tuple((name, int(total), int(free), (int(a), int(b))) for name, total, free, a, b in rows)


def _card_of(driver_name: str, capability: tuple[int, int]) -> Card:
    """The card of a driver's name; an unknown one computes like an L4, the slowest of its kind."""
    return card_of_driver(driver_name) or Card(driver_name, "", 0, 0, capability, 121, 30, 300, 32)


def _of_table(card: Card, num_devices: int) -> Hardware:
    sold = card.sold_gib * GIB
    host = presumed_host(sold, num_devices)
    found = _from_card(card, num_devices, card.memory_bytes, host, 8 * num_devices)
    return replace(found, sold_bytes=sold)


def presumed_host(sold_bytes: int, num_devices: int) -> int:
    """Host memory that is assumed beside so many named cards."""
    return max(64 * GIB, int(HOST_PER_CARD * num_devices * sold_bytes))


def _from_card(card: Card, num_devices: int, memory: int, host: int, num_cores: int) -> Hardware:
    rates = Rates(
        half_matmul_per_s=card.half_tflops * 1e12 * card.reached,
        single_matmul_per_s=card.single_tflops * 1e12 * REACHED,
        bytes_per_s=card.gb_per_s * 1e9 * REACHED,
        host_bytes_per_s=card.pcie_gb_per_s * 1e9 * REACHED,
        launch_s=6e-6,
        kernel_s=2.5e-6,
    )
    return Hardware(
        name=card.name,
        device="cuda",
        num_devices=num_devices,
        memory_bytes=memory,
        free_bytes=memory,
        host_bytes=host,
        num_cores=num_cores,
        compute_capability=card.capability,
        has_bfloat16=card.capability >= (8, 0),
        rates=rates,
    )
