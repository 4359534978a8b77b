"""The sample at the end of a run: the beginning of a row, and the model's text after it; no torch."""

from __future__ import annotations

from memtrain.trainers.run_folder.report.report import Report


def sample_rows(report: Report) -> list[tuple[str, str]]:
    """(name, text) of the sample: the beginning of a row, and the model's text after it."""
    final = report.final
    if final is None or not final.sample:
        return []
    if not final.sample_prompt or not final.sample.startswith(final.sample_prompt):
        return [("sample", final.sample)]
    return [
        ("sample: given", final.sample_prompt),
        ("sample: written", final.sample[len(final.sample_prompt) :]),
    ]
