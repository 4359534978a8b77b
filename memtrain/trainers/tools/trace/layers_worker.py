"""The process that passes layers: a LayersJob as JSON on standard input, a ModelRecord on the last line."""

from __future__ import annotations

import sys

from memtrain.trainers.runtime.signals import end_with_parent
from memtrain.trainers.tools.trace.client import LayersJob
from memtrain.trainers.tools.trace.other_kernels import hide_other_kernels


def main() -> None:
    """Read, pass, write; end with the process that asks, however that ends."""
    end_with_parent()
    hide_other_kernels()
    from memtrain.trainers.tools.trace.layer_record import measure_layers

    asked = LayersJob.model_validate_json(sys.stdin.read())
    print(measure_layers(asked.config, asked.settings, asked.treatments).model_dump_json())


if __name__ == "__main__":
    main()
