"""The token store: prepared rows on disk, and their cache."""
