"""Attention memory where several processes hold a row together: gathered keys, or exchanged heads."""

# a: bytes of a number, N: tokens of one process, M: gathered tokens, Q and K: widths of queries and keys.

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtrain.memory.estimate.workload import Workload


def num_gathered_kv(load: Workload) -> int:
    """Most tokens whose keys and values a process gathers from the processes that share its rows.

    All of the row where rows share prompts; else no token of the last of 2n chunks, and no more than a
    document has, or a sliding window of all layers, at each of the 2n - 2 borders between two processes.
    """
    settings, shape = load.settings, load.shape
    if settings.context_parallel == 1 or settings.context_by == "ulysses":
        return 0
    if settings.shared_prompts:
        return load.num_whole
    chunks = 2 * settings.context_parallel
    span = load.batch.longest
    if shape.sliding_window is not None and shape.num_sliding_layers == shape.num_layers:
        span = min(span, shape.sliding_window)
    return min(load.num_whole * (chunks - 1) // chunks, (chunks - 2) * span)


def score_pairs(load: Workload) -> tuple[int, int]:
    """Pairs of a query and a key whose scores masked attention keeps for its backward pass, and has at once
    in it, each for every head of a process's model.

    All tokens with all; of heads that are dealt out, as many as the processes have of a whole row. Where keys
    are gathered, spans of rows are merged by their log-sum-exp and keep no score.
    """
    settings = load.settings
    if load.batch.foreign is not None and not settings.padding_free and settings.packing == "none":
        # Another tool's rows are padded, and each has scores of its own.
        pairs = load.batch.rows * load.batch.longest**2
        return pairs, pairs
    if settings.context_parallel == 1:
        return load.N**2, load.N**2
    if settings.context_by == "ulysses":
        pairs = load.num_whole**2 // settings.context_parallel
        return pairs, pairs
    longest = load.batch.longest
    return 0, min(load.N, longest) * min(max(load.N, num_gathered_kv(load)), longest)


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
