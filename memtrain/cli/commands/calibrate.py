"""`memtrain calibrate`: measure this machine's device once, so that plans need not take typical values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text

if TYPE_CHECKING:
    from memtrain.memory.hardware.calibration import Measured

Show = Annotated[bool, typer.Option("--show", help="Print the stored measurements, and measure nothing.")]
Forget = Annotated[
    bool, typer.Option("--forget", help="Empty the store: measurements, and peaks of past runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")]

SHARED_BYTES = 2**30
"""Memory in other processes from which a card is said to be shared; a desktop has less. Taste."""


def calibrate(show: Show = False, forget: Forget = False, as_json: Json = False) -> None:
    """Measure rates and overheads of this machine, and store them for later plans.

    They are stored in ~/.cache/memtrain/calibration (or the folder in MEMTRAIN_CALIBRATION; `off` disables
    the store), by device name and versions of torch and transformers. Finished runs store their measured
    peaks there too, which correct later predictions by at most 10 %.
    """
    from memtrain.errors import LaunchError
    from memtrain.memory.hardware.calibration import device_file, folder, measured_of, remember
    from memtrain.memory.hardware.devices import detect
    from memtrain.memory.hardware.peak_history import FILE, read_history
    from memtrain.memory.plan.units import count_of, gib

    where, hardware = folder(), detect()
    if where is None:
        raise LaunchError(
            "the store of measurements is switched off",
            "MEMTRAIN_CALIBRATION",
            "unset it, or set it to a folder",
        )
    if forget:
        files = [*where.glob("device-*.json"), *where.glob(FILE)]
        for file in files:
            file.unlink()
        print_text(f"{count_of(len(files), 'file')} removed from {where}.")
        return
    found: Measured | None = measured_of(hardware.name)
    if not show:
        from memtrain.trainers.tools.calibrate import measure

        found = measure(hardware.device, hardware.name)
        remember(found)
    if found is None:
        print_text(f"There are no measurements of {hardware.name} yet: run `memtrain calibrate`.")
        return
    if as_json:
        typer.echo(json.dumps(found.model_dump() | {"file": str(device_file(found.device))}, indent=1))
        return
    print_text(f"{found.device}, measured on {found.made}:")
    if found.others_bytes > SHARED_BYTES:
        print_text(f"Other processes held {gib(found.others_bytes)} of it: rates are what they left.")
    print_table(("what", "measured"), _rows(found, hardware.device))
    kinds = len(read_history().ratios)
    print_text(f"Stored in {where}, with peaks of {kinds} kinds of runs. Plans for this machine use both.")


def _rows(found: Measured, device: str) -> list[tuple[str, str]]:
    """(what, figure) of each measurement."""
    from memtrain.memory.plan.units import MIB

    core = " of one core" if device == "cpu" else ""
    rows = [
        ("matrix products, half precision", f"{found.half_matmul_per_s / 1e12:.3f} TFLOP/s{core}"),
        ("matrix products, float32", f"{found.single_matmul_per_s / 1e12:.3f} TFLOP/s{core}"),
        ("memory, read and written", f"{found.bytes_per_s / 1e9:.1f} GB/s"),
        (
            "copies between host and device, in the slower direction",
            f"{found.host_bytes_per_s / 1e9:.1f} GB/s",
        ),
        ("launch of one operation", f"{found.launch_s * 1e6:.1f} us"),
        ("memory beside tensors", f"{found.beside_bytes / MIB:.0f} MiB"),
        ("allocations are rounded up to multiples of", f"{found.granularity_bytes} B"),
        *((f"scratch memory of {name}", f"{size / MIB:.1f} MiB") for name, size in found.scratch.items()),
    ]
    if found.communication_bytes is not None:
        rows.append(("a communicator", f"{found.communication_bytes / MIB:.0f} MiB"))
    return rows
