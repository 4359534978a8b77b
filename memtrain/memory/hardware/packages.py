"""Optional packages that are installed."""

from __future__ import annotations

import importlib.util


def installed(*packages: str) -> frozenset[str]:
    """The given packages that can be imported here."""
    return frozenset(name for name in packages if importlib.util.find_spec(name) is not None)
