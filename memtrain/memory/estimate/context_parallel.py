"""Attention memory where several processes hold a row together: gathered keys, or exchanged heads."""

# a: bytes of a number, N: tokens of one process, M: gathered tokens, Q and K: widths of queries and keys.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtrain.memory.estimate.workload import Workload


def num_gathered_kv(load: Workload) -> int:
    """Most tokens whose keys and values a process gathers from the processes that share its rows.

    All of the row; in packed rows without shared prompts, no more than a document at each of the 2n - 1
    borders of their slices.
    """
    settings = load.settings
    if settings.context_parallel == 1 or settings.context_by == "ulysses":
        return 0
    if settings.shared_prompts or not settings.padding_free:
        return load.num_whole
    return min(load.num_whole, (2 * settings.context_parallel - 1) * load.batch.longest)


def ulysses_width(load: Workload) -> int:
    """Numbers that a process sends of each of its tokens where heads are dealt out: Q + 2K, K for each copy.

    0 where they are not dealt out.
    """
    shape, settings = load.shape, load.settings
    if settings.context_parallel == 1 or settings.context_by == "all_gather":
        return 0
    copies = max(1, settings.context_parallel // shape.num_kv_heads)
    return shape.query_width + 2 * copies * shape.kv_width


def ulysses_kept(load: Workload) -> int:
    """Extra bytes of attention by heads: its output before it goes back, and copies of keys."""
    numbers = ulysses_width(load)
    return load.a * load.N * (numbers - 2 * load.shape.kv_width) if numbers else 0


def gathered_forward(load: Workload) -> int:
    """Gathered keys and values of one layer, as they arrive and in the order of the row: 2 * 2*a*M*K.

    By heads: what is dealt out, laid in order to be sent, and as it arrives.
    """
    if ulysses_width(load):
        return 2 * load.a * load.N * ulysses_width(load)
    return 4 * load.a * num_gathered_kv(load) * load.shape.kv_width


def gathered_backward(load: Workload) -> int:
    """Gathered keys and values, a kernel's gradients of them (2*a*M*K each), and float32 sums (8*M*K).

    By heads: the output's gradient, and those that go back, laid in order and as they arrive.
    """
    if ulysses_width(load):
        return load.a * load.N * (load.shape.query_width + 2 * ulysses_width(load))
    return (4 * load.a + 8) * num_gathered_kv(load) * load.shape.kv_width
