"""Rows over several processes: groups and slices."""
