"""Ranks, signals, seeds, atomic files."""
