"""Long tables of cases: of each test one case in four is fast. `make test-all` runs all."""

from collections import defaultdict

import pytest

TABLES = (
    "test_adapter_sums",
    "test_arithmetic_moments",
    "test_expert_moments",
    "test_layer_record",
    "test_outer_moments",
    "test_own_attention",
    "test_trace",
    "test_trace_head",
    "test_trace_weights_on_host",
    "test_trace_zero",
    "test_zero_ranks",
)
"""Files that hold arithmetic and measured layers against traces: steps of models, of one to five seconds."""
EVERY = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the others slow, before slow ones are left out."""
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        if (
            item.path.parent.name != "trace"
            or item.path.stem not in TABLES
            or item.get_closest_marker("slow")
        ):
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name] % EVERY:
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
