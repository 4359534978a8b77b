"""Images, audio and video of a row: refused as such, since memtrain trains on text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from memtrain.recipes.formats.fields import NO_MEDIA, BadRow, Row

COLUMNS = {
    **dict.fromkeys(("image", "images", "image_url", "image_path", "image_file"), "images"),
    **dict.fromkeys(("picture", "pictures", "photo", "pixel_values"), "images"),
    **dict.fromkeys(("audio", "audios", "audio_path", "speech"), "audio"),
    **dict.fromkeys(("video", "videos", "video_path"), "video"),
}
"""Column names that hold media, and their kind."""
FILES = ({"bytes", "path"}, {"array", "sampling_rate"})
"""Fields of the images and sounds of Hugging Face datasets."""


EMBEDDED = {"data:image/": "images", "data:audio/": "audio", "data:video/": "video"}
"""Beginnings of texts that are files."""


def refuse_media(row: Row, used: Collection[str]) -> None:
    """Raise BadRow when a column that is not used as text holds images, audio or video."""
    for column, value in row.items():
        if column in used or value is None or value in ("", [], {}):
            continue
        kind = COLUMNS.get(str(column).lower()) or _kind_of_file(value)
        if kind:
            raise BadRow(f"the row has {kind} (column '{column}')", NO_MEDIA)


def _kind_of_file(value: Any) -> str:
    held: Any = value
    first: Any = held[0] if isinstance(value, list) and held else held
    if isinstance(first, str):
        return next((kind for start, kind in EMBEDDED.items() if first.startswith(start)), "")
    if not isinstance(first, Mapping):
        return ""
    given = set(cast(Mapping[str, Any], first))
    return next(
        (kind for fields, kind in zip(FILES, ("images or audio", "audio"), strict=True) if fields <= given),
        "",
    )
