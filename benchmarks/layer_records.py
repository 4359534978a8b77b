"""Peaks by the record of a layer against traces of the whole step: 8 families under 8 forms.

    python benchmarks/layer_records.py                  # all of them: minutes
    python benchmarks/layer_records.py --family phi3    # those of one family

Every record is measured by passes, whatever the planner takes for the family; the trace is that of the run's
own step, on four layers. A prediction may be a little too high, and never too low.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "trainers"))

from trace_cases import DORA, EVERY, EXPERTS, HALF, LORA, PADDED, SMALL, Case, sft  # noqa: E402

from memtrain.memory.estimate.peaks import estimate  # noqa: E402
from memtrain.memory.plan.heaviest_batch import HeaviestBatch  # noqa: E402
from memtrain.recipes.sections.model import Adapter  # noqa: E402
from memtrain.trainers.model.loading.module_shapes import counted_shape  # noqa: E402
from memtrain.trainers.tools.trace.layer_record import measure_layers  # noqa: E402
from memtrain.trainers.tools.trace.trace import trace  # noqa: E402

FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "phi3": {"sliding_window": None},
    "granite": {},
    "olmo2": {},
    "gemma": {"head_dim": 32},
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 64, "head_dim": 32},
}
FORMS = {
    "full, float32": {},
    "full": HALF,
    "full, checkpointed": HALF | EVERY,
    "LoRA": HALF | {"adapter": LORA},
    "LoRA, checkpointed": HALF | EVERY | {"adapter": LORA},
    "DoRA, checkpointed": HALF | EVERY | {"adapter": DORA},
    "LoRA with dropout": HALF | {"adapter": Adapter(r=8, dropout=0.1)},
    "full, padded": PADDED | HALF,
}
BATCH = HeaviestBatch(rows=2, tokens=1024, scored_tokens=1024, longest=512)


def case_of(family: str, form: str) -> Case:
    """Four layers of a family, rows of 512 tokens."""
    config = SMALL | {"model_type": family, "num_hidden_layers": 4} | FAMILIES[family]
    return replace(sft(config, {"max_length": 512} | FORMS[form]), batch=BATCH)


def error_of(case: Case) -> float:
    """Share by which the prediction is above the trace."""
    shape = replace(counted_shape(case.config), record=measure_layers(case.config, case.settings))
    predicted = estimate(case.settings, shape, case.batch, accumulates=False).peak.num_bytes
    return predicted / trace(case.job).recorder.peak_bytes - 1


def cases(family: str | None) -> Iterator[tuple[str, str]]:
    """Families and forms; PEFT has neither DoRA nor dropout for experts."""
    every = ((one, form) for one in FAMILIES for form in FORMS if family in (None, one))
    has_none = (("qwen3_moe", "DoRA, checkpointed"), ("qwen3_moe", "LoRA with dropout"))
    return (case for case in every if case not in has_none)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES)
    found = list[float]()
    for family, form in cases(parser.parse_args().family):
        found.append(error_of(case_of(family, form)))
        print(f"{family:10} {form:20} {found[-1]:+.2%}", flush=True)
    print(f"{len(found)} cases: {min(found):+.2%} to {max(found):+.2%}")


if __name__ == "__main__":
    main()
