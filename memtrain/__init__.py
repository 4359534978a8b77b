"""memtrain: post-training for scarce GPU memory, from a YAML recipe to a trained model."""

import os

__version__ = "0.1.0"

# With the `kernels` package transformers fetches code from the hub for some model types, and runs it. It asks
# when it is imported, and only who sets the variable by hand wants that: docs/security.md.
os.environ.setdefault("USE_HUB_KERNELS", "NO")
