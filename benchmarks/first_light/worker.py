"""The process with the device: a stage asked as a line of JSON, its result as another.

    python -m first_light.worker WORK [--stand-in] [--shared]

What stages print goes to standard error, which the supervisor keeps in log.txt.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from first_light.bench import Bench
from first_light.device import has_neighbours

SPOILT = ("CUDA error", "device-side assert", "cuBLAS", "CUBLAS_STATUS", "CUDNN_STATUS", "illegal memory")
"""Words of faults after which a CUDA context computes nothing more."""


def answered(bench: Bench, question: dict[str, Any]) -> dict[str, Any]:
    """The result of one stage; a fault is a result."""
    from memtrain.errors import MemtrainError
    from memtrain.trainers.runtime.oom_errors import is_out_of_memory

    module, _, function = question["run"].partition(":")
    bench.stage = question["stage"]
    print(f"== {question['stage']}", file=sys.stderr, flush=True)
    try:
        stage = getattr(import_module(f"first_light.stages.{module}"), function)
        made: dict[str, Any] = stage(bench, **question["given"])
    except MemtrainError as error:
        made = {"refused": error.faults[0].what}
    except BaseException as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:300]
        made = {"fault": "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {first}"}
        made["is_spoilt"] = any(words in str(error) for words in SPOILT)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            made["is_spoilt"] = True
    return made | ({"shared": True} if bench.device.is_shared else {})


def main() -> None:
    """Answer until the pipe is closed."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    stand_in = "--stand-in" in sys.argv
    is_shared = "--shared" in sys.argv or (not stand_in and has_neighbours())
    bench = Bench(Path(sys.argv[1]), stand_in=stand_in, is_shared=is_shared)
    for line in sys.stdin:
        made = answered(bench, json.loads(line))
        made["left_bytes"] = bench.device.freed()
        pipe.write(json.dumps(made) + "\n")
        pipe.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
