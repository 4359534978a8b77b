"""Which optional packages are installed."""

from __future__ import annotations

import importlib.util


def installed(*packages: str) -> frozenset[str]:
    """Which of the packages can be imported here."""
    return frozenset(name for name in packages if importlib.util.find_spec(name) is not None)
