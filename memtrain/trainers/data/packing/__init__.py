"""Packing: rows into sequences, and the order of steps."""
