"""Layout of the rows in a micro-batch, as one value: decided together, and changed together."""

from __future__ import annotations

from typing import NamedTuple


class RowForm(NamedTuple):
    """Settings of the same names."""

    padding_free: bool
    """Rows lie end to end; else each is padded on the right."""
    positions_by_row: bool
    """Padded rows tell their own lengths, where positions depend on them."""
    shared_prompts: bool
    """A prompt lies there once for all its answers."""

    def updates(self) -> dict[str, object]:
        """The three settings."""
        return self._asdict()
