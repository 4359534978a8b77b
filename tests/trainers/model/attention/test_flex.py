"""The block mask of FlexAttention, made from the bounds of the segments."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from memtrain.memory.estimate.positions import MASK_BLOCK
from memtrain.trainers.model.attention import flex
from memtrain.trainers.model.attention.flex import BLOCK, attend, block_mask_of
from memtrain.trainers.model.attention.masked import attend as attend_masked
from memtrain.trainers.model.attention.masked import mask_of
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout

LAYOUTS = {
    "rows of all lengths": packed_layout([130, 7, 260, 1]),
    "rows of whole blocks": packed_layout([128, 256]),
    "one token": packed_layout([1]),
    "prompts with completions": shared_layout([(150, [40, 9]), (300, [130]), (5, [1, 1])]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_block_mask_is_the_one_that_torch_makes_of_all_pairs(name: str):
    """torch's looks at every pair of tokens; blocks where all attend differ from those where some do."""
    layout = LAYOUTS[name]
    found, T = block_mask_of(layout), layout.num_tokens
    mask_IJ = mask_of(layout)
    expected = create_block_mask(lambda b, h, i, j: mask_IJ[i, j], None, None, T, T, device="cpu")
    for part in ("kv", "full_kv"):
        counts = [getattr(one, f"{part}_num_blocks") for one in (found, expected)]
        assert torch.equal(*counts)
        taken = [getattr(one, f"{part}_indices")[0, 0] for one in (found, expected)]
        for row, count in enumerate(counts[0][0, 0].tolist()):
            assert torch.equal(*(one[row, :count] for one in taken))
    index = torch.arange(T)
    assert torch.equal(found.mask_mod(index[:0], index[:0], index[:, None], index[None]), mask_IJ)


def test_attention_with_it_is_the_masked_one():
    layout: Layout = LAYOUTS["prompts with completions"]
    query, key, value = (torch.randn(layout.num_tokens, heads, 16) for heads in (4, 2, 2))
    found = attend(query, key, value, layout, 0.25)
    assert torch.allclose(found, attend_masked(query, key, value, layout, 0.25), atol=1e-5)


def test_short_rows_are_left_to_the_kernel_of_all_rows(monkeypatch: pytest.MonkeyPatch):
    """torch's compiler would choose its kernel for decoding, which has no form for 100 tokens of two heads to
    a key: rounded up to 256 queries, more than a block of the mask."""
    asked: list[object] = []

    def note(query: torch.Tensor, *others: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options["kernel_options"])
        return query

    monkeypatch.setattr(flex, "_kernel", lambda device_type: note)
    layout = packed_layout([100])
    query, key, value = (torch.randn(100, heads, 16) for heads in (4, 2, 2))
    attend(query, key, value, layout, 0.25)
    assert asked == [{"BACKEND": "TRITON"}]


def test_the_plan_counts_blocks_of_the_same_size():
    assert MASK_BLOCK == BLOCK
