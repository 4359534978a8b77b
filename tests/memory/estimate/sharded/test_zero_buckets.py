"""Gradients of one rank in DeepSpeed's stage 2, by hand."""

from memtrain.memory.estimate.sharded.zero_buckets import END, Arrival, Cut, arrivals, largest_part

CUT = Cut(embedding=8, maps=(4, 4), num_layers=1, head=8, width=1, num_ranks=2, bucket=8, size=2)
"""24 numbers, 12 a rank: the second has the head and a layer's last matrix."""


def test_a_bucket_is_widened_and_laid_end_to_end_where_it_is_of_several_weights():
    """Of 2 ranks: the head alone is 8 numbers in float32, 32 bytes; norm and last matrix are 5 numbers, end
    to end in 2 bytes and in 4; the first matrix 4. The second rank has 12 numbers in float32 from the start
    of the norm on, 48 bytes, and each gradient that has no room is beside them."""
    summed = [one for one in arrivals(CUT, holds=False) if one.copies]
    assert summed == [
        Arrival(layer=1, place=0, gradients=48 + 2 * 1, copies=4 * 8),
        Arrival(layer=0, place=1, gradients=48 + 2 * 4, copies=(4 + 2) * 5),
        Arrival(layer=END, place=0, gradients=48 + 2 * 8, copies=4 * 4),
        Arrival(layer=END, place=1, gradients=48, copies=4 * 8),
    ]


def test_whole_weights_are_laid_out_in_float32_for_any_part_of_them():
    """Of 3 ranks with 8 numbers each all weights begin where a part does; of 5 with 5 each the second has
    parts of the embedding and the first matrix, the fourth of the second and the head: 12 numbers."""
    assert largest_part(CUT._replace(size=4, num_ranks=3)) == 4 * 8
    assert largest_part(CUT._replace(size=4, num_ranks=5)) == 4 * 12
    assert largest_part(CUT._replace(size=4, num_ranks=5, is_away=True)) == 0
    assert largest_part(CUT._replace(num_ranks=5, is_away=True)) == 4 * 5


def test_parts_in_float32_are_added_to_and_whole_weights_lie_twice():
    ends = {size: arrivals(CUT._replace(size=size), holds=True)[-1] for size in (2, 4)}
    assert ends[2].gradients == 4 * 12
    assert ends[4].gradients == 2 * 4 * 12


def test_a_weight_larger_than_a_bucket_is_summed_by_itself_in_turns():
    """Buckets of 3 numbers: the head's 8 wait by themselves until the norm's come, and are summed whole, for
    they are of one rank; of four ranks with 6 each they are 2 and 6, summed together."""
    alone = next(one for one in arrivals(CUT._replace(bucket=3), holds=False) if one.copies)
    assert alone == Arrival(layer=1, place=0, gradients=48 + 2 * 1 + 2 * 8, copies=4 * 8)
    cut = next(one for one in arrivals(CUT._replace(bucket=3, num_ranks=4), holds=False) if one.copies)
    assert (cut.layer, cut.copies) == (1, (4 + 2) * 8)
