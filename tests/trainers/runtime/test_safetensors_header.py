"""The header of a safetensors file, and files that are none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memtrain.trainers.runtime.safetensors_header import shapes_in

HEAD = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()


def sized(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_shapes_are_read_and_a_file_that_is_none_is_told(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(2)}, file)
    assert shapes_in(file) == {"w": ("F32", (2,))}
    damaged = {
        "empty": b"",
        "a length of 2^63": (2**63).to_bytes(8, "little") + HEAD,
        "a length beyond the file": (len(HEAD) + 9).to_bytes(8, "little") + HEAD,
        "cut": sized(HEAD)[:-5],
        "no JSON": sized(b"{" * 40),
        "deep": sized(b"[" * 100_000),
        "a list": sized(b"[1]"),
        "no shape": sized(b'{"w": {"dtype": "F32"}}'),
        "a number": sized(b'{"w": 3}'),
        "bytes": sized(b"\xff\xfe{}"),
    }
    for name, raw in damaged.items():
        file.write_bytes(raw)
        with pytest.raises(OSError, match="no safetensors file"):
            print(name, shapes_in(file))
