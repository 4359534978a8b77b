"""Record the keys that TRL's configurations have, with their defaults, for the tests of `import-trl`.

python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0 peft
trl-env/bin/python benchmarks/record_trl_fields.py tests/recipes/data/trl_fields.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import trl
from trl.experimental.gkd import GKDConfig
from trl.experimental.kto import KTOConfig
from trl.scripts.utils import DatasetMixtureConfig

CONFIGS: dict[str, type] = {
    "sft": trl.SFTConfig,
    "dpo": trl.DPOConfig,
    "kto": KTOConfig,
    "reward": trl.RewardConfig,
    "grpo": trl.GRPOConfig,
    "rloo": trl.RLOOConfig,
    "distill": GKDConfig,
}
BESIDE = (trl.ModelConfig, trl.ScriptArguments, DatasetMixtureConfig)


def defaults(config: type) -> dict[str, Any]:
    """Every field with its default; null where there is none, or where it is an object."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = field.default
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        value = getattr(value, "value", value)
        found[field.name] = value if isinstance(value, bool | int | float | str | list) else None
    return found


def main() -> None:
    beside: dict[str, Any] = {}
    for config in BESIDE:
        beside |= defaults(config)
    recorded = {"trl": trl.__version__} | {
        method: beside | defaults(config) for method, config in CONFIGS.items()
    }
    Path(sys.argv[1]).write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
