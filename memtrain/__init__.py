"""memtrain: post-training for scarce GPU memory, from a YAML recipe to a trained model."""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# With the `kernels` package transformers fetches code from the hub for some model types, and runs it. It asks
# when it is imported, and only who sets the variable by hand wants that: docs/security.md.
os.environ.setdefault("USE_HUB_KERNELS", "NO")

# Read when torch loads its threads. By default they spin while they wait; on cores that others use too a run
# is then six times slower, or more: docs/decisions/0004.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_API = ("load_recipe", "plan", "train", "inspect_lengths")
"""Names of memtrain.api that are names of the package too, imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name == "api":
        return importlib.import_module("memtrain.api")
    if name in _API:
        return getattr(importlib.import_module("memtrain.api"), name)
    raise AttributeError(f"module 'memtrain' has no attribute '{name}'")
