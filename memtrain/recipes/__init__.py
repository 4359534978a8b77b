"""Recipes: strict, read from YAML; no torch."""
