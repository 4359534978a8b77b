"""NF4 and int8 of our own: the numbers of bitsandbytes, and round trips of any range."""

from __future__ import annotations

import pytest
import torch

from memtrain.trainers.model.quantized import int8, nf4


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_is_that_of_bitsandbytes_bit_for_bit(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    given = weight(5, 96, 128).to(dtype)  # its kernel for a CPU wants rows of whole blocks
    theirs, state = functional.quantize_4bit(given, quant_type="nf4", compress_statistics=True)
    ours = nf4.pack(given)
    assert torch.equal(ours.codes, theirs.view(-1))
    assert torch.equal(ours.scale_codes, state.absmax)
    assert torch.equal(ours.scales, state.state2.absmax)
    assert torch.equal(ours.offset[0], state.offset)
    table = nf4.dynamic_numbers(torch.device("cpu"))
    # On a CPU bitsandbytes 0.49 writes -1 over the lowest number of its table; on a GPU it stays.
    assert torch.equal(table[1:], state.state2.code[1:])
    state.state2.code = table
    back = nf4.unpack(ours, 0, given.numel(), torch.float32).view_as(given)
    state.dtype = torch.float32
    assert torch.equal(back, functional.dequantize_4bit(theirs, state))


def test_int8_is_that_of_bitsandbytes_bit_for_bit() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    given = weight(48, 160)
    codes, scales, _ = functional.int8_vectorwise_quant(given.to(torch.float16))
    ours = int8.pack(given.to(torch.float16))
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.scales, scales)


def test_nf4_keeps_its_own_numbers_and_zeros() -> None:
    """Sixteen numbers times one scale come back exactly but for the scale's own eight bits."""
    exact = torch.tensor(nf4.NUMBERS).repeat(4).repeat(3, 1)
    packed = nf4.pack(exact)
    assert packed.codes[:2].tolist() == [0x01, 0x23]
    assert torch.equal(nf4.unpack(packed, 0, exact.numel(), torch.float32).view_as(exact), exact)
    assert not nf4.unpack(nf4.pack(torch.zeros(128)), 0, 128, torch.float32).any()


def test_a_range_is_unpacked_as_in_the_whole() -> None:
    given = weight(7, 64, 96)
    packed, size = nf4.pack(given), 64 * 96
    whole = nf4.unpack(packed, 0, given.numel(), torch.float32).view_as(given)
    assert torch.equal(nf4.unpack(packed, 3 * size, 5 * size, torch.float32).view(2, 64, 96), whole[3:5])
    assert (whole - given).abs().max() < 0.02


def test_int8_rows_are_within_half_a_step() -> None:
    given = weight(3, 8, 50)
    packed = int8.pack(given)
    step = given.abs().amax(-1, keepdim=True) / 127
    assert ((int8.unpack(packed, torch.float32) - given).abs() <= step * 0.5001).all()


def test_the_table_of_scales_is_made_while_a_model_without_data_is() -> None:
    """A trace of QDoRA for a CPU ended with "Cannot copy out of meta tensor"."""
    nf4._dynamic.cache_clear()
    with torch.device("meta"):
        assert len(nf4._dynamic()) == 256
